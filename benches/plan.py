"""How long a search for a plan takes, and how far its plan is from the best, by the number of ranks.

Usage: python benches/plan.py OUT.json [--ranks 64,1024,16384] [--whole 4,8,16] [--search EXECUTABLE]

Each row is a process of its own (`crates/plan/examples/search.rs`): LLaVA-OneVision 7B on H100 with 76 GB a
rank, four samples a rank and step from the mixed set of fixtures/mixes. Rows with `--whole` ranks also judge
every candidate that no certified bound rules out; `regret` is what the quick search's plan takes more, as a
part of the best step.

`seconds` is the search alone; `processor_seconds` and `peak_bytes` are those of the whole process.
`placement` says which candidates there are.
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


def row(search: Path, ranks: int, is_whole: bool, is_pipelined: bool) -> dict[str, Any]:
    """One search in a process of its own: its answer, time and memory."""
    command = [str(search), str(ranks)]
    command += ["whole"] if is_whole else []
    command += ["colocated=false"] if is_pipelined else []
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    said = process.stdout.read()
    _, status, usage = os.wait4(process.pid, 0)
    if status != 0:
        sys.exit(f"{' '.join(command)} ended with status {os.waitstatus_to_exitcode(status)}")
    spent = {"processor_seconds": usage.ru_utime + usage.ru_stime, "peak_bytes": usage.ru_maxrss * PEAK_UNIT}
    return json.loads(said) | spent | {"placement": "pipelines" if is_pipelined else "all"}


def main() -> None:
    """Runs all rows and writes them; a line for each to stderr."""
    parser = argparse.ArgumentParser()
    parser.add_argument("out", type=Path)
    parser.add_argument("--ranks", type=numbers, default=[64, 1_024, 16_384])
    parser.add_argument("--whole", type=numbers, default=[4, 8, 16])
    parser.add_argument("--search", type=Path, default=Path("target/release/examples/search"))
    wanted = parser.parse_args()
    rows: list[dict[str, Any]] = []
    for is_pipelined in (False, True):
        for ranks in sorted({*wanted.ranks, *wanted.whole}):
            one = row(wanted.search, ranks, ranks in wanted.whole, is_pipelined)
            rows.append(one)
            regret = "" if one.get("regret") is None else f", regret {100 * one['regret']:.2f} %"
            memory = one["peak_bytes"] / 2**20
            print(
                f"{ranks:>6} ranks, {one['placement']:<9} {one['seconds']:.2f} s, {memory:.0f} MiB{regret}: "
                f"{one['plan']}",
                file=sys.stderr,
            )
    wanted.out.parent.mkdir(parents=True, exist_ok=True)
    answer = {"cores": os.cpu_count(), "machine": platform.machine(), "rows": rows}
    wanted.out.write_text(json.dumps(answer, indent=1) + "\n")


if __name__ == "__main__":
    main()
