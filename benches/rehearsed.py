"""LLaVA-OneVision-7B on 8 to 32 estimated H100: the layouts in front, simulated, and rehearsed by real ranks.

Usage: python benches/rehearsed.py OUT.json [--ranks 8,16,32] [--rehearsed-steps 6] [--first 10]

For each number of ranks three searches (colocated, disaggregated, disaggregated with interleaved stages)
give up to six layouts each. The first ten of all of them and the first of each kind are rehearsed: `dflop
rehearse` starts all ranks on this machine, and each action takes its predicted time. Beside them stands what
people run today, each the best of its own search. `fsdp` (arrival order) and `fsdp-tokens` (packed by LLM
tokens) are rehearsed as well. Megatron and the paper's system place samples and cut models in ways of their
own, so they are only simulated.

`over colocated` is the simulated step over that of the best colocated layout: disaggregation wins where it
is below 1. Simulated steps are means over the planner's batches; an error is that of a rehearsed step against
its own simulation.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from collect import origin

CONFIG = """\
model: {{name: llava-onevision-qwen2-7b}}
data: {{mixture: data/mixture.yaml, video_max_frames: 16}}
cluster: {{device: h100, num_ranks: {ranks}}}
train: {{global_batch_size: {batch}, schedule: {schedule}}}
"""
SEARCHES = {
    "colocated": "colocated=true",
    "disaggregated": "colocated=false,llm.interleave=1",
    "interleaved": "colocated=false,llm.interleave=2",
}
ARMS = {"fsdp": "blind", "fsdp-tokens": "tokens"}
"""How the baselines that are rehearsed place samples."""
SIDES = ("encoder", "llm")
DEGREES = {"tp": "tensor_parallel_degree", "pp": "pipeline_parallel_degree", "dp": "data_parallel_degree"}


def dflop(*arguments: object, folder: Path) -> str:
    """Stdout of the command line of this environment; its talk goes to stderr."""
    command = [sys.executable, "-m", "dflop", *map(str, arguments)]
    done = subprocess.run(command, cwd=folder, check=True, stdout=subprocess.PIPE, text=True)
    return done.stdout


def degrees_of(layout: dict[str, Any]) -> str:
    """A layout in a few words."""
    parts = []
    for side in SIDES:
        found = {short: layout[side].get(long, 1) for short, long in DEGREES.items()}
        parts.append(
            " ".join([side, *(f"{short} {n}" for short, n in found.items() if n > 1 or short == "dp")])
        )
    if layout.get("placement") == "colocated":
        parts = [parts[1].replace("llm", "colocated")]
    if layout.get("llm_interleave", 1) > 1:
        parts[-1] += f" interleave {layout['llm_interleave']}"
    if layout.get("expert_parallel_degree", 1) > 1:
        parts.append(f"ep {layout['expert_parallel_degree']}")
    if layout.get("shard_ranks"):
        parts.append(f"shards of {layout['shard_ranks']}")
    return ", ".join([*parts, f"zero {layout.get('zero', 0)}"])


def searched(folder: Path, only: str) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """The file of a search's plan, and its plans, the best first; none where no plan fits."""
    flags = ("--config", "dflop.yaml", "--only", only, "--out", "found.json")
    try:
        dflop("plan", *flags, folder=folder)
    except subprocess.CalledProcessError:
        return {}, []
    plan = json.loads((folder / "found.json").read_text())
    return plan, [plan["best"], *plan["runners_up"]]


def baselines(folder: Path) -> dict[str, dict[str, Any]]:
    """What people run today, each the best of its own search."""
    return json.loads(dflop("plan", "--config", "dflop.yaml", "--compare", "--json", folder=folder))[
        "baselines"
    ]


def only_of(baseline: str) -> str:
    """What gives the layout of a baseline, as in `colocated tp 2 dp 4, zero 1, full recomputation`."""
    first, *rest = baseline.split(", ")
    words = first.split()
    assert words[0] == "colocated", baseline
    found = dict(zip(words[1::2], words[2::2], strict=True))
    zero = next((part.split()[1] for part in rest if part.startswith("zero ")), "0")
    end = " recomputation"
    said = next((part.removesuffix(end) for part in rest if part.endswith(end)), "none")
    modes = said.replace(" and", "").split()
    if len(modes) == 1:
        recompute = {"recompute": said}
    else:
        named = dict(zip(modes[::2], modes[1::2], strict=True))
        recompute = {f"{side}.recompute": named.get(side, "none") for side in SIDES}
    fields = {f"{side}.{name}": found[name] for side in SIDES for name in ("tp", "dp") if name in found}
    experts = next((part.split()[1] for part in rest if part.startswith("ep ")), "1")
    fields |= {"llm.ep": experts, "colocated": "true", "zero": zero, **recompute}
    return ",".join(f"{name}={value}" for name, value in fields.items())


def rehearsed(
    folder: Path, plan: dict[str, Any], best: dict[str, Any], arm: str, steps: int
) -> dict[str, Any]:
    """What `dflop rehearse --json` says of one layout; `failed` where it ended early."""
    path = folder / "one.json"
    path.write_text(json.dumps({**plan, "best": best, "runners_up": []}))
    config = f"{arm}.yaml"
    (folder / config).write_text(
        (folder / "dflop.yaml").read_text().replace("schedule: aware", f"schedule: {arm}")
    )
    flags = ("--config", config, "--plan", path, "--steps", steps, "--out", "rehearsal", "--force", "--json")
    files = ("--data-profile", "data_profile.parquet", "--model-profile", "model_profile.json")
    try:
        return json.loads(dflop("rehearse", *flags, *files, folder=folder))
    except subprocess.CalledProcessError as error:
        return {"failed": f"exit status {error.returncode}"}


def measure(folder: Path, ranks: int, asked: argparse.Namespace) -> dict[str, Any]:
    """The table for one number of ranks."""
    text = CONFIG.format(ranks=ranks, batch=ranks * asked.samples_per_rank, schedule="aware")
    (folder / "dflop.yaml").write_text(text)
    rows = []
    for kind, only in SEARCHES.items():
        plan, found = searched(folder, only)
        rows += [
            {"kind": kind, "layout": degrees_of(best["layout"]), "recompute": best.get("recompute", "none")}
            | {"num_microbatches": best["num_microbatches"], "arm": "aware"}
            | {"simulated_ms": best["prediction"]["step_ns_mean"] / 1e6, "plan": plan, "best": best}
            for best in found
        ]
    rows.sort(key=lambda row: row["simulated_ms"])
    firsts = {kind: next((row for row in rows if row["kind"] == kind), None) for kind in SEARCHES}
    chosen = rows[: asked.first] + [row for row in firsts.values() if row and row not in rows[: asked.first]]
    for name, found in baselines(folder).items():
        if not found["is_of_others"]:
            continue
        row = {"kind": name, "layout": found["layout"], "num_microbatches": found["num_microbatches"]}
        row |= {"simulated_ms": found["step_ms"], "arm": ARMS.get(name, "its own")}
        if name in ARMS:
            plan, of_layout = searched(folder, only_of(found["layout"]))
            over = re.search(r"over (\d+) ranks", found["layout"])
            shard_ranks = int(over[1]) if over else None
            same = [one for one in of_layout if one["layout"].get("shard_ranks") == shard_ranks]
            best = same[0] | {"num_microbatches": found["num_microbatches"]} if same else None
            row |= {"plan": plan, "best": best}
        chosen.append(row)
    colocated = firsts["colocated"]
    for number, row in enumerate(chosen):
        plan, best = row.pop("plan", None), row.pop("best", None)
        row["over_colocated"] = row["simulated_ms"] / colocated["simulated_ms"] if colocated else None
        if best is not None:
            print(f"{ranks} ranks, {number + 1} of {len(chosen)}: {row['layout']}", file=sys.stderr)
            row["rehearsed"] = rehearsed(folder, plan, best, row["arm"], asked.rehearsed_steps)
    return {"ranks": ranks, "layouts": chosen}


def printed(found: dict[str, Any]) -> None:
    """The table for people."""
    print(f"\n{found['ranks']} ranks")
    print(f"{'kind':<18}{'layout':<62}{'simulated':>10}{'over colocated':>16}{'rehearsed':>11}{'error':>8}")
    for row in found["layouts"]:
        over = "" if row["over_colocated"] is None else f"{row['over_colocated']:.3f}"
        line = f"{row['kind']:<18}{row['layout']:<62}{row['simulated_ms']:>10.0f}{over:>16}"
        of_ranks = row.get("rehearsed")
        if of_ranks is None:
            print(f"{line}{'-':>11}{'-':>8}")
        elif "failed" in of_ranks:
            print(f"{line}  {of_ranks['failed']}")
        else:
            print(f"{line}{of_ranks['step_ms_median']:>11.0f}{of_ranks['error_median']:>8.1%}")


def bench(asked: argparse.Namespace) -> list[dict[str, Any]]:
    """All tables, printed as they come."""
    tables: list[dict[str, Any]] = []
    if not asked.ranks:
        return tables
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        dflop("demo-data", ".", "--samples", 256, folder=folder)
        start = time.monotonic()
        for ranks in asked.ranks:
            tables.append(measure(folder, ranks, asked))
            printed(tables[-1])
            print(f"{ranks} ranks, {time.monotonic() - start:.0f} s", file=sys.stderr)
    return tables


def numbers(text: str) -> list[int]:
    """`8,16` as numbers; none of an empty text."""
    return [int(part) for part in text.split(",") if part]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """What is asked of the rehearsals; other benchmarks that include them ask the same."""
    parser.add_argument("--ranks", type=numbers, default=[8, 16, 32], help="of rehearsals; empty: none")
    parser.add_argument("--rehearsed-steps", type=int, default=6, help="the first is not counted")
    parser.add_argument("--samples-per-rank", type=int, default=4, help="of a rehearsed global batch")
    parser.add_argument("--first", type=int, default=10, help="layouts in front that are rehearsed")


def main() -> int:
    """Measures, writes and prints.

    Returns:
        The exit status.
    """
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("out", type=Path)
    add_arguments(parser)
    asked = parser.parse_args()
    load = os.getloadavg()[0]
    result = {"bench": "rehearsed", **origin(), "load": load, "rehearsed": bench(asked)}
    asked.out.parent.mkdir(parents=True, exist_ok=True)
    asked.out.write_text(json.dumps(result, indent=1) + "\n")
    print(f"wrote {asked.out}", file=sys.stderr)
    return 0


if __name__ == "__main__":
    sys.exit(main())
