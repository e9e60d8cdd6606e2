"""Steps of the same global batches on two CPU ranks: dflop, transformers.Trainer with DDP, FSDP2.

Usage: python benches/train.py OUT.json [--rounds 5] [--steps 8] [--batch 32]

The demo's model on demo data, in float32, from the same weights. dflop trains as `dflop plan` has it; the two
others train, step by step, the samples that dflop's `schedules.jsonl` names, each rank's part packed into one
row that is filled by LLM tokens (`benches/hugging.py`), decoded before the clock starts. Of dflop the time is
the wall clock from the end of the warm-up to the end of the last step: waits for data and schedules, writing
of metrics and all else are in it. Rounds are interleaved, each runs all three in another order; a ratio is
that of geometric means, the time of the other over dflop's, with its 95 % interval over the rounds.
`loss_difference_max` is between the losses of all steps, relative.

`executor_ns_per_action`: a rank with both components runs the actions of 256 microbatches whose forward and
backward do nothing, as often as in a long step: what the executor itself takes.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import random
import statistics
import sys
import tempfile
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import hugging
from adopt import ratio_of
from collect import origin
from curves import tokens_of
from small import dflop, lines, prepare

SEED, FRAMES, WARMUP = 5, 4, 2
SETTINGS = {"learning_rate": 1e-4, "weight_decay": 0.01, "max_grad_norm": 1.0}
OTHERS = {"trainer-ddp": "ddp", "fsdp2": "fsdp2"}


def ours(folder: Path, num_steps: int) -> dict[str, Any]:
    """Seconds of the steps after the warm-up, and all losses."""
    flags = ("--steps", num_steps, "--out", "run", "--force", "--oversubscribe")
    dflop("train", *flags, folder=folder)
    rows = lines(folder / "run/metrics.jsonl")
    seconds = (rows[-1]["clock_ns"]["end"] - rows[WARMUP - 1]["clock_ns"]["end"]) / 1e9
    return {"seconds": seconds, "losses": [row["loss"] for row in rows]}


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


def main() -> int:
    """Measures, writes and prints.

    Returns:
        The exit status.
    """
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=8, help="measured, after a warm-up of 2")
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--samples", type=int, default=320)
    parser.add_argument("--profile-seconds", type=float, default=60.0)
    parser.add_argument("--tiny", action="store_true", help="a model of widths of 32: to try the benchmark")
    asked = parser.parse_args()
    if asked.rounds < 2 or asked.steps < 1:
        parser.error("at least 2 rounds of 1 step")
    os.environ["OMP_NUM_THREADS"] = "1"
    load, num_steps = os.getloadavg()[0], asked.steps + WARMUP
    rounds: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        fields = {"global_batch_size": asked.batch, "num_microbatches": 4, "video_max_frames": FRAMES}
        prepare(
            folder, asked.samples, {**fields, **SETTINGS}, is_tiny=asked.tiny, seconds=asked.profile_seconds,
            weights_seed=SEED,
        )  # fmt: skip
        layout = json.loads((folder / "plan.json").read_text())["best"]["layout"]
        first = ours(folder, num_steps)
        turns = [turn["samples"] for turn in lines(folder / "run/schedules.jsonl")]
        tokens = tokens_of(folder)
        kinds = hugging.kinds_of(folder)
        parts = [hugging.packed_by_tokens(batch, tokens, hugging.NUM_RANKS, kinds) for batch in turns]
        for index in range(asked.rounds):
            found: dict[str, Any] = {}
            for arm in random.Random(SEED + index).sample(["dflop", *OTHERS], 1 + len(OTHERS)):
                print(f"round {index + 1} of {asked.rounds}: {arm}", file=sys.stderr, flush=True)
                if arm == "dflop":
                    found[arm] = ours(folder, num_steps)
                    # Not bit for bit: measured times correct the schedules, so that sums have other orders.
                    pairs = zip(found[arm]["losses"], first["losses"], strict=True)
                    assert all(math.isclose(a, b, rel_tol=1e-5) for a, b in pairs), "equal data, equal losses"
                else:
                    found[arm] = hugging.run(folder, OTHERS[arm], parts, WARMUP, SETTINGS)
            rounds.append(found)
    seconds = {arm: [found[arm]["seconds"] for found in rounds] for arm in ("dflop", *OTHERS)}
    gap = max(
        abs(a - b) / b
        for found in rounds
        for arm in OTHERS
        for a, b in zip(found[arm]["losses"], found["dflop"]["losses"], strict=True)
    )
    best = min(OTHERS, key=lambda arm: statistics.geometric_mean(seconds[arm]))
    ratios = {arm: ratio_of(seconds[arm], seconds["dflop"]) for arm in OTHERS}
    result = {
        "bench": "train", **origin(), "load": load, "layout": layout,
        "arguments": {key: value for key, value in vars(asked).items() if key != "out"},
        "step_ms": {arm: 1e3 * statistics.geometric_mean(s) / asked.steps for arm, s in seconds.items()},
        "rounds_s": seconds, "best_other": best, "ratio": ratios[best][0], "ratio_low": ratios[best][1],
        "ratio_high": ratios[best][2], "ratios": ratios, "loss_difference_max": gap,
        "executor_ns_per_action": executor_ns(),
    }  # fmt: skip
    asked.out.parent.mkdir(parents=True, exist_ok=True)
    asked.out.write_text(json.dumps(result, indent=1) + "\n")
    for arm, step_ms in result["step_ms"].items():
        note = ""
        if arm in ratios:
            ratio, low, high = ratios[arm]
            note = f"   over dflop's: {ratio:.3f} ({low:.3f} to {high:.3f})"
        print(f"{arm:<14}{step_ms:>9.0f} ms a step{note}")
    print(
        f"losses differ by {gap:.1e} at most (relative); the executor takes "
        f"{result['executor_ns_per_action']['median'] / 1e3:.1f} us an action"
    )
    print(f"wrote {asked.out}", file=sys.stderr)
    return 0


if __name__ == "__main__":
    sys.exit(main())
