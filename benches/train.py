"""Steps of the same global batches on two CPU ranks: dflop, transformers.Trainer with DDP, FSDP2.

Usage: python benches/train.py OUT.json [--rounds 5] [--steps 8] [--batch 32] [--only CASE]

The demo's model on demo data, in float32, from the same weights. dflop trains as `dflop plan` has it; the two
others train, step by step, the samples that dflop's `schedules.jsonl` names, each rank's part packed into one
row that is filled by LLM tokens (`benches/hugging.py`). There are two cases:

    decoding   everyone decodes while it trains, by the same code: a worker of each rank reads ahead, dflop's
               own, and of the others that of torch's DataLoader
    decoded    nobody decodes: each step trains the same samples, which the warm-up has decoded

The time is the wall clock from the end of the warm-up to the end of the last timed step: waits for data and
schedules, writing of metrics and all else are in it. Two more steps come after it, so that all decode ahead
until the clock stops. Rounds are interleaved, each runs all three in another order; a ratio is that of
geometric means, the time of the other over dflop's, with its 95 % interval over the rounds. The first case
is the one of the top level's `ratio`. `loss_difference_max` is between the losses of all steps, relative.

`cpu_ms` is the CPU time of a step, all processes together: that of a round's runs (the median) without that
of a run which has no timed steps, divided by the steps. Other programs on the machine change it less than
the wall clock, by up to a fifth.

`executor_ns_per_action`: a rank with both components runs the actions of 256 microbatches whose forward and
backward do nothing, as often as in a long step: what the executor itself takes.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import random
import resource
import statistics
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import hugging
from collect import origin
from curves import tokens_of
from ratio import ratio_of
from small import dflop, lines, prepare

SEED, FRAMES = 5, 4
SETTINGS = {"learning_rate": 1e-4, "weight_decay": 0.01, "max_grad_norm": 1.0}
OTHERS = {"trainer-ddp": "ddp", "fsdp2": "fsdp2"}
ARMS = ("dflop", *OTHERS)
AHEAD = 2
"""Steps after the last timed one: the most that any arm decodes ahead."""


@dataclass(frozen=True)
class Case:
    """Who decodes."""

    name: str
    samples: int
    """Of the data."""
    warmup: int
    """Steps before the clock starts."""
    num_workers: int
    """Of the others, for each rank; 0: they decode before training."""


def children_s() -> float:
    """CPU seconds of all processes that this one has started and that have ended."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def ours(folder: Path, num_steps: int, timed: range) -> dict[str, Any]:
    """Seconds of the steps in `timed`, and all losses."""
    flags = ("--steps", num_steps, "--out", "run", "--force", "--oversubscribe")
    dflop("train", *flags, folder=folder)
    rows = lines(folder / "run/metrics.jsonl")
    ends = [row["clock_ns"]["end"] for row in rows]
    return {
        "seconds": (ends[timed.stop - 1] - ends[timed.start - 1]) / 1e9,
        "losses": [row["loss"] for row in rows],
    }


def executor_ns() -> dict[str, float]:
    """What the executor takes for an action that does nothing: nanoseconds, the least of some steps."""
    import torch

    from dflop._native import Action
    from dflop.runtime.actions import StepActions
    from dflop.runtime.boundary import Transfer
    from dflop.runtime.executor import Executor
    from dflop.runtime.messages import Messages
    from dflop.runtime.spans import SpanRecorder

    num_microbatches = 256
    names = [
        f"{s}{k}{j}" for j in range(num_microbatches) for s, k in ((0, "F"), (1, "F"), (1, "B"), (0, "B"))
    ]
    actions = [Action.parse(name) for name in names]
    rows = torch.zeros(4, 8)
    own = (Transfer(peer=0, rows=None, num_rows=4),)

    class Nothing:
        loss = 0.0

        def begin(self) -> None:
            pass

        def forward(self, *_: Any) -> torch.Tensor:
            return rows

        backward = forward

    # No message leaves the rank: nothing else of it is asked for.
    plan = SimpleNamespace(num_stages=2, encoder_stages=1, llm_stages=1)
    place: Any = SimpleNamespace(rank=0, tensor=0, device=torch.device("cpu"), plan=plan)
    stages: Any = {0: Nothing(), 1: Nothing()}
    recorder = SpanRecorder(0, place.device)
    executor = Executor(place, stages, recorder, Messages(place, [8], torch.float32))
    both = {
        0: SimpleNamespace(batch=object(), above=(), below=own, is_elsewhere=False),
        1: SimpleNamespace(batch=object(), above=own, below=(), is_elsewhere=False),
    }
    work: Any = SimpleNamespace(label_tokens=1, of=lambda action: both[action.stage])
    steps = StepActions(actions, [()] * len(actions), frozenset())
    found = []
    for _ in range(20):
        recorder.begin()
        start = time.perf_counter_ns()
        executor.run_step(work, steps)
        found.append((time.perf_counter_ns() - start) / len(actions))
    return {"least": min(found), "median": statistics.median(found)}


def measured(folder: Path, case: Case, asked: argparse.Namespace) -> dict[str, Any]:
    """All rounds of a case."""
    timed = range(case.warmup, case.warmup + asked.steps)
    fields = {"global_batch_size": asked.batch, "num_microbatches": 4, "video_max_frames": FRAMES}
    prepare(
        folder, case.samples, {**fields, **SETTINGS}, more="  workers: 1\n", is_tiny=asked.tiny,
        seconds=asked.profile_seconds, weights_seed=SEED,
    )  # fmt: skip
    first = ours(folder, timed.stop + AHEAD, timed)
    turns = [turn["samples"] for turn in lines(folder / "run/schedules.jsonl")]
    tokens, kinds = tokens_of(folder), hugging.kinds_of(folder)
    parts = [hugging.packed_by_tokens(batch, tokens, hugging.NUM_RANKS, kinds) for batch in turns]

    def run(arm: str, timed: range) -> dict[str, Any]:
        began, num_steps = children_s(), timed.stop + AHEAD
        if arm == "dflop":
            found = ours(folder, num_steps, timed)
            # Not bit for bit: measured times correct the schedules, so that sums have other orders.
            pairs = zip(found["losses"], first["losses"], strict=False)
            assert all(math.isclose(a, b, rel_tol=1e-5) for a, b in pairs), "equal data, equal losses"
        else:
            own, workers = parts[:num_steps], case.num_workers
            found = hugging.run(folder, OTHERS[arm], own, timed, SETTINGS, num_workers=workers)
        return {**found, "cpu_s": children_s() - began}

    print(f"{case.name}: each without timed steps", file=sys.stderr, flush=True)
    idle = {arm: run(arm, range(case.warmup, case.warmup))["cpu_s"] for arm in ARMS}
    rounds: list[dict[str, Any]] = []
    for index in range(asked.rounds):
        found: dict[str, Any] = {}
        for arm in random.Random(SEED + index).sample(ARMS, len(ARMS)):
            print(f"{case.name}, round {index + 1} of {asked.rounds}: {arm}", file=sys.stderr, flush=True)
            found[arm] = run(arm, timed)
        rounds.append(found)
    seconds = {arm: [found[arm]["seconds"] for found in rounds] for arm in ARMS}
    cpu_s = {arm: statistics.median(found[arm]["cpu_s"] for found in rounds) - idle[arm] for arm in ARMS}
    gap = max(
        abs(a - b) / b
        for found in rounds
        for arm in OTHERS
        for a, b in zip(found[arm]["losses"], found["dflop"]["losses"], strict=True)
    )
    best = min(OTHERS, key=lambda arm: statistics.geometric_mean(seconds[arm]))
    ratios = {arm: ratio_of(seconds[arm], seconds["dflop"]) for arm in OTHERS}
    return {
        "layout": json.loads((folder / "plan.json").read_text())["best"]["layout"],
        "samples": case.samples, "warmup": case.warmup,
        "step_ms": {arm: 1e3 * statistics.geometric_mean(s) / asked.steps for arm, s in seconds.items()},
        "cpu_ms": {arm: 1e3 * s / asked.steps for arm, s in cpu_s.items()},
        "rounds_s": seconds, "best_other": best, "ratio": ratios[best][0], "ratio_low": ratios[best][1],
        "ratio_high": ratios[best][2], "ratios": ratios, "loss_difference_max": gap,
    }  # fmt: skip


def show(name: str, found: dict[str, Any]) -> None:
    """Prints the table of a case."""
    print(f"{name}, a step" + " " * 13 + "time   CPU time, all processes")
    for arm, step_ms in found["step_ms"].items():
        note = ""
        if arm in found["ratios"]:
            ratio, low, high = found["ratios"][arm]
            note = f"   time over dflop's: {ratio:.3f} ({low:.3f} to {high:.3f})"
        print(f"  {arm:<14}{step_ms:>9.0f} ms{found['cpu_ms'][arm]:>9.0f} ms{note}")
    print(f"  losses differ by {found['loss_difference_max']:.1e} at most (relative)")


def main() -> int:
    """Measures, writes and prints.

    Returns:
        The exit status.
    """
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=8, help="timed")
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--samples", type=int, default=384, help="of the data, where everyone decodes")
    parser.add_argument("--profile-seconds", type=float, default=60.0)
    parser.add_argument("--only", choices=("decoding", "decoded"), help="one case; none: both")
    parser.add_argument("--tiny", action="store_true", help="a model of widths of 32: to try the benchmark")
    asked = parser.parse_args()
    cases = [
        Case("decoding", asked.samples, warmup=2, num_workers=1),
        # A rank decodes a sample when it first gets it: after eight steps it has had nearly all of them.
        Case("decoded", asked.batch, warmup=8, num_workers=0),
    ]
    if asked.rounds < 2 or asked.steps < 1:
        parser.error("at least 2 rounds of 1 step")
    if asked.samples < (needed := asked.batch * (cases[0].warmup + asked.steps + AHEAD)):
        parser.error(f"--samples {asked.samples}: {needed} at least, so that no sample comes twice")
    os.environ["OMP_NUM_THREADS"] = "1"
    load = os.getloadavg()[0]
    found: dict[str, Any] = {}
    for case in cases:
        if asked.only in (None, case.name):
            with tempfile.TemporaryDirectory() as name:
                found[case.name] = measured(Path(name), case, asked)
    main_case = next(iter(found.values()))
    result = {
        "bench": "train", **origin(), "load": load,
        "arguments": {key: value for key, value in vars(asked).items() if key != "out"},
        **{field: main_case[field] for field in ("best_other", "ratio", "ratio_low", "ratio_high")},
        "cases": found, "executor_ns_per_action": executor_ns(),
    }  # fmt: skip
    asked.out.parent.mkdir(parents=True, exist_ok=True)
    asked.out.write_text(json.dumps(result, indent=1) + "\n")
    for name, each in found.items():
        show(name, each)
    print(f"the executor takes {result['executor_ns_per_action']['median'] / 1e3:.1f} us an action")
    print(f"wrote {asked.out}", file=sys.stderr)
    return 0


if __name__ == "__main__":
    sys.exit(main())
