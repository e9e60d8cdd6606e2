"""Measured steps of two CPU ranks by layout: colocated against disaggregated against FSDP2 token-packed.

Usage: python benches/layouts.py OUT.json [--rounds 6] [--steps 4] [--microbatches 1] [--ranks 8,16,32]

The demo's data and model are profiled on two ranks of this machine's CPU, a thread each. Every way trains the
same global batches of 64 samples with the same trainer; a way is a layout and how samples are placed in it:

    fsdp2 tokens    every rank holds both components, ZeRO-3, samples packed by LLM tokens: what people run
    fsdp2 blind     the same in arrival order, in equal counts
    ddp tokens      plain data parallelism, samples packed by LLM tokens
    pipeline ...    encoder and LLM on a rank each
    ... aware       placed by dflop

Rounds are interleaved: each launches every layout once, in another order, and within a launch `dflop train
--compare` runs the ways of that layout one after the other. A ratio is that of geometric means of the time of
a round, the fastest way without dflop over the way, with its 95 % interval over the rounds.

After them the ranks of larger plans are rehearsed (`rehearsed.py`), for 8, 16 and 32 GPUs that are not there.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import random
import re
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import rehearsed
from collect import origin
from ratio import ratio_of

SEED = 17
DEGREES = {"tensor_parallel_degree": 1, "pipeline_parallel_degree": 1}
COLOCATED = {"placement": "colocated", "encoder": 2, "llm": 2}
# Layout and the arms of `dflop train` that are run in it.
LAYOUTS: dict[str, tuple[dict[str, Any], list[str]]] = {
    "fsdp2": ({**COLOCATED, "zero": 3}, ["blind", "tokens", "aware"]),
    "zero2": ({**COLOCATED, "zero": 2}, ["tokens", "aware"]),
    "ddp": (COLOCATED, ["blind", "tokens", "aware"]),
    "pipeline": ({"encoder": 1, "llm": 1}, ["blind-ahead", "tokens-ahead", "aware", "aware-ahead"]),
}
OURS = ("aware", "aware-ahead")
MODEL_PROFILE = "model_profile.json"


def dflop(*arguments: object, folder: Path) -> None:
    """Runs the command line of this environment; its talk goes to stderr."""
    command = [sys.executable, "-m", "dflop", *map(str, arguments)]
    subprocess.run(command, cwd=folder, check=True, stdout=sys.stderr)


def prepare(folder: Path, num_microbatches: int, profile_seconds: float) -> None:
    """Data, profiles and a plan for each layout in `folder`."""
    dflop("demo-data", folder, "--force", folder=folder)
    dflop("profile", "data", folder=folder)
    flags = ("--budget-seconds", profile_seconds, "--recompute", "none", "--fresh")
    dflop("profile", "model", *flags, folder=folder)
    dflop("plan", "--only", "colocated=false", folder=folder)
    plan = json.loads((folder / "plan.json").read_text())
    for name, (layout, _) in LAYOUTS.items():
        degrees = {
            component: {**DEGREES, "data_parallel_degree": layout[component]}
            for component in ("encoder", "llm")
        }
        best = {**plan["best"], "layout": {**layout, **degrees}}
        config = (folder / "dflop.yaml").read_text()
        if name != "pipeline":
            # The pipeline keeps those of the demo.
            best["num_microbatches"] = num_microbatches
            config, count = re.subn(r"num_microbatches: \w+", f"num_microbatches: {num_microbatches}", config)
            assert count == 1, "the demo's configuration says how many microbatches"
        (folder / f"{name}.yaml").write_text(config)
        (folder / f"{name}.json").write_text(json.dumps({**plan, "best": best, "runners_up": []}))


def measure(folder: Path, name: str, steps: int) -> dict[str, float]:
    """Seconds of the steps of each way of one layout, after one step of warming up."""
    arms = LAYOUTS[name][1]
    flags = ("--compare", "--arms", ",".join(arms), "--warmup-pairs", 1, "--steps", steps, "--force")
    flags = ("--config", f"{name}.yaml", "--plan", f"{name}.json", "--out", "run", *flags)
    dflop("train", *flags, folder=folder)
    rows = [json.loads(line) for line in (folder / "run/metrics.jsonl").read_text().splitlines()]
    return {f"{name} {arm}": sum(row["step_ns"] for row in rows if row["arm"] == arm) / 1e9 for arm in arms}


def summarise(rounds: list[dict[str, float]], steps: int) -> dict[str, Any]:
    """Step time of each way, and the ratio of the fastest without dflop to it."""
    ways = sorted(rounds[0])
    seconds = {way: [found[way] for found in rounds] for way in ways}
    others = [way for way in ways if way.split()[-1] not in OURS]
    best = min(others, key=lambda way: statistics.fmean(map(math.log, seconds[way])))
    table = []
    for way in ways:
        ratio, low, high = ratio_of(seconds[best], seconds[way])
        step_ms = 1e3 * statistics.geometric_mean(seconds[way]) / steps
        table.append(
            {"way": way, "step_ms": step_ms, "best_over_it": ratio, "low": low, "high": high}
            | {"rounds_s": seconds[way]}
        )
    return {"best_other": best, "ways": sorted(table, key=lambda row: row["step_ms"])}


def main() -> int:
    """Measures, writes and prints.

    Returns:
        The exit status.
    """
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("--rounds", type=int, default=6)
    parser.add_argument("--steps", type=int, default=4, help="global batches a round")
    # As the planner has it: the fewest that fit, where ranks wait for nobody in between.
    parser.add_argument("--microbatches", type=int, default=1, help="of a rank, in colocated layouts")
    parser.add_argument("--profile-seconds", type=float, default=60.0, help="for measuring the model")
    rehearsed.add_arguments(parser)
    asked = parser.parse_args()
    if asked.rounds < 2 or asked.steps < 1:
        parser.error("at least 2 rounds of 1 step")
    load = os.getloadavg()[0]
    rounds: list[dict[str, float]] = []
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        prepare(folder, asked.microbatches, asked.profile_seconds)
        profile = json.loads((folder / MODEL_PROFILE).read_text())
        start = time.monotonic()
        for index in range(asked.rounds):
            found: dict[str, float] = {}
            for layout in random.Random(SEED + index).sample(sorted(LAYOUTS), len(LAYOUTS)):
                found |= measure(folder, layout, asked.steps)
            rounds.append(found)
            passed = time.monotonic() - start
            left = passed / (index + 1) * (asked.rounds - index - 1)
            print(f"round {index + 1} of {asked.rounds}, {passed:.0f} s, {left:.0f} s left", file=sys.stderr)
    result = {
        "bench": "layouts",
        **origin(),
        "load": load,
        "torch": profile["device"]["torch"],
        "arguments": {key: value for key, value in vars(asked).items() if key != "out"},
        **summarise(rounds, asked.steps),
    }
    asked.out.parent.mkdir(parents=True, exist_ok=True)
    asked.out.write_text(json.dumps(result, indent=1) + "\n")
    print(f"{'way':<24}{'step ms':>9}{'best without dflop over it':>30}")
    for row in result["ways"]:
        interval = f"{row['best_over_it']:.3f} ({row['low']:.3f} to {row['high']:.3f})"
        mark = "  <- fastest without dflop" if row["way"] == result["best_other"] else ""
        print(f"{row['way']:<24}{row['step_ms']:>9.0f}{interval:>30}{mark}")
    # The measurement stands in the file before the rehearsals, which take longer.
    result["rehearsed"] = rehearsed.bench(asked)
    asked.out.write_text(json.dumps(result, indent=1) + "\n")
    print(f"wrote {asked.out}", file=sys.stderr)
    return 0


if __name__ == "__main__":
    sys.exit(main())
