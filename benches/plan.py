"""How long a search for a plan takes, and how far its plan is from the best, by the number of ranks.

Usage: python benches/plan.py OUT.json [--ranks 64,1024,16384] [--whole 4,8,16] [--search EXECUTABLE]

Each row is a process of its own (`crates/plan/examples/search.rs`): LLaVA-OneVision 7B on H100 with 76 GB a
rank, four samples a rank and step from the mixed set of fixtures/mixes. Rows with `--whole` ranks also judge
every candidate that no certified bound rules out; `regret` is what the quick search's plan takes more, as a
part of the best step.

`seconds` is the search alone; `processor_seconds` and `peak_bytes` are those of the whole process.
Pipelines of 16 ranks are thousands of candidates, and take too long to judge: a run was stopped after
twenty minutes. There both searches look at a part, and `part` says which (`WHOLE_PARTS`).

`placement` says which candidates there are. Clusters too large to judge everything are searched among
colocated layouts and among pipelines alone, too: `regret_to_parts` is what the plan of all candidates takes
more than the better of these two, which the search must not pass over.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import subprocess
import sys
from pathlib import Path
from typing import Any

# Linux gives the peak of a process in units of 1,024 bytes.
PEAK_UNIT = 1024


def numbers(text: str) -> list[int]:
    """The numbers of a comma-separated list."""
    return [int(part) for part in text.split(",") if part]


ASKED = {"all": [], "pipelines": ["colocated=false"], "colocated": ["colocated=true"]}
"""What a search is asked for, by placement."""


WHOLE_PARTS = {
    ("pipelines", 16): "encoder.tp=1,encoder.pp=1,llm.tp=2,cut=even,encoder.recompute=full,llm.recompute=full"
}
"""Which candidates are judged whole, where all of them take too long: layouts like the best one."""


def row(search: Path, ranks: int, is_whole: bool, placement: str) -> dict[str, Any]:
    """One search in a process of its own: its answer, time and memory."""
    part = WHOLE_PARTS.get((placement, ranks)) if is_whole else None
    only = ",".join([*ASKED[placement], *([part] if part else [])])
    command = [str(search), str(ranks), *(["whole"] if is_whole else []), *([only] if only else [])]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    said = process.stdout.read()
    _, status, usage = os.wait4(process.pid, 0)
    if status != 0:
        sys.exit(f"{' '.join(command)} ended with status {os.waitstatus_to_exitcode(status)}")
    spent = {"processor_seconds": usage.ru_utime + usage.ru_stime, "peak_bytes": usage.ru_maxrss * PEAK_UNIT}
    return json.loads(said) | spent | {"placement": placement, "part": part}


def main() -> None:
    """Runs all rows and writes them; a line for each to stderr."""
    parser = argparse.ArgumentParser()
    parser.add_argument("out", type=Path)
    parser.add_argument("--ranks", type=numbers, default=[64, 1_024, 16_384])
    parser.add_argument("--whole", type=numbers, default=[4, 8, 16])
    parser.add_argument("--search", type=Path, default=Path("target/release/examples/search"))
    wanted = parser.parse_args()
    rows: list[dict[str, Any]] = []
    for placement in ASKED:
        for ranks in sorted({*wanted.ranks, *wanted.whole}):
            if placement == "colocated" and ranks in wanted.whole:
                continue
            one = row(wanted.search, ranks, ranks in wanted.whole, placement)
            rows.append(one)
            regret = "" if one.get("regret") is None else f", regret {100 * one['regret']:.2f} %"
            memory = one["peak_bytes"] / 2**20
            part = f" ({one['part']})" if one["part"] else ""
            print(
                f"{ranks:>6} ranks, {one['placement']:<9} {one['seconds']:.2f} s, {memory:.0f} MiB{regret}: "
                f"{one['plan']}{part}",
                file=sys.stderr,
            )
    for ranks in set(wanted.ranks) - set(wanted.whole):
        step_ns = {one["placement"]: one["step_ns"] for one in rows if one["num_ranks"] == ranks}
        parts = [step_ns[part] for part in step_ns if part != "all" and step_ns[part] is not None]
        if parts and step_ns["all"] is not None:
            regret = max(0.0, step_ns["all"] / min(parts) - 1.0)
            next(one for one in rows if one["num_ranks"] == ranks)["regret_to_parts"] = regret
            print(f"{ranks:>6} ranks, regret to the better part {100 * regret:.2f} %", file=sys.stderr)
    wanted.out.parent.mkdir(parents=True, exist_ok=True)
    answer = {"cores": os.cpu_count(), "machine": platform.machine(), "rows": rows}
    wanted.out.write_text(json.dumps(answer, indent=1) + "\n")


if __name__ == "__main__":
    main()
