"""Kills random ranks of `dflop train` at random moments, then counts the samples that were trained.

    python benches/kills.py bench/out/kills.json --steps 200 --kills 10

A small model trains on two CPU ranks, with a checkpoint every 5 steps, and `--max-restarts`: torchrun's agent
starts the ranks again and they go on from the newest checkpoint, by themselves. The moments are drawn from a
seed, in steps and milliseconds, so that kills (`kill -9`) come within actions, reductions, saves, between
steps, and while the ranks start. In the end `schedules.jsonl` must hold the global batches of all steps, each
once and in order, as seed and data decide them. The exit status is 1 where it does not.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from collect import origin
from small import prepare

from dflop._native import Dataset, GlobalBatches
from dflop._native.testing import load_config

if TYPE_CHECKING:
    from collections.abc import Sequence

SIZES = {"global_batch_size": 8, "num_microbatches": 4, "video_max_frames": 3}


def main() -> int:
    """Runs to the end, writes and prints.

    Returns:
        The exit status.
    """
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--kills", type=int, default=10)
    parser.add_argument("--samples", type=int, default=60)
    parser.add_argument("--every", type=int, default=5, help="steps from one checkpoint to the next")
    parser.add_argument("--seed", type=int, default=0)
    asked = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        checkpoints = f"checkpoint:\n  every: {asked.every}\n"
        prepare(folder, asked.samples, SIZES, more=checkpoints, only=["colocated=false"])
        start = time.monotonic()
        kills = train_and_kill(folder, asked.steps, asked.kills, asked.seed)
        seconds = time.monotonic() - start
        found = check(folder, asked.steps)
    arguments = {key: value for key, value in vars(asked).items() if key != "out"}
    result = {
        "bench": "kills",
        **origin(),
        "arguments": arguments,
        "kills": kills,
        **found,
        "seconds": seconds,
    }
    asked.out.parent.mkdir(parents=True, exist_ok=True)
    asked.out.write_text(json.dumps(result, indent=1) + "\n")
    print(
        f"{len(kills)} kills in {found['steps']} steps ({seconds:.0f} s): each global batch once and in "
        f"order: {found['is_right']}; {found['steps_undone']} steps were lost and trained again"
    )
    return 0 if found["is_right"] and len(kills) == asked.kills else 1


def train_and_kill(
    folder: Path, num_steps: int, num_kills: int, seed: int, flags: Sequence[str] = ()
) -> list[dict[str, Any]]:
    """Trains in `folder/run`; what was killed when.

    Raises:
        subprocess.CalledProcessError: The run did not end well.
    """
    draw = random.Random(seed)
    moments = sorted(draw.randrange(num_steps) for _ in range(num_kills))
    # Several kills may come before the next checkpoint.
    command = [sys.executable, "-m", "dflop", "train", "--steps", str(num_steps), "--out", "run"]
    command += ["--max-restarts", str(num_kills), "--oversubscribe", *flags]
    kills: list[dict[str, Any]] = []
    with subprocess.Popen(command, cwd=folder) as run:
        seen: set[int] = set()
        for step in moments:
            # A step that was trained before: as soon as there are new ranks, while they start or load.
            while run.poll() is None and not (
                num_lines(folder / "run/metrics.jsonl") >= step and (ranks := set(ranks_of(run.pid)) - seen)
            ):
                time.sleep(0.02)
            time.sleep(draw.random() / 2)
            ranks = sorted(set(ranks_of(run.pid)) - seen)
            if ranks:
                victim = draw.choice(ranks)
                kills.append({"process": victim, "steps_written": num_lines(folder / "run/metrics.jsonl")})
                print(f"killing process {victim}: {kills[-1]}", file=sys.stderr, flush=True)
                seen |= set(ranks)
                os.kill(victim, signal.SIGKILL)
        status = run.wait()
    if status:
        raise subprocess.CalledProcessError(status, command)
    return kills


def num_lines(path: Path) -> int:
    """Whole lines of a journal that may not be there yet."""
    return path.read_bytes().count(b"\n") if path.exists() else 0


def ranks_of(process: int) -> list[int]:
    """The ranks below `dflop train` on CPUs: forks of the one child of its one child, torchrun's agent."""
    forkers = [child for agent in children(process) for child in children(agent)]
    return [child for forker in forkers for child in children(forker)]


def children(process: int) -> list[int]:
    """Processes that this one has started."""
    try:
        tasks = Path(f"/proc/{process}/task").iterdir()
        return [int(child) for task in tasks for child in (task / "children").read_text().split()]
    except OSError:
        return []


def check(folder: Path, num_steps: int) -> dict[str, Any]:
    """Holds the log against the global batches that seed and data decide."""
    config = load_config(str(folder / "dflop.yaml"))
    data = Dataset(str(folder / "dflop.yaml"), str(folder / "data_profile.parquet"))
    train = config["train"]
    batches = GlobalBatches(len(data), train["global_batch_size"], train["seed"])
    turns = [json.loads(line) for line in (folder / "run/schedules.jsonl").read_text().splitlines()]
    is_right = [t["step"] for t in turns] == list(range(num_steps))
    for t in turns:
        placed = [s for row in t["schedule"]["llm"] for replica in row for s in replica]
        is_right &= t["samples"] == batches.batch(t["step"]) and sorted(placed) == sorted(t["samples"])
    is_right &= num_lines(folder / "run/metrics.jsonl") == num_steps
    undone = num_lines(folder / "run/schedules.undone.jsonl")
    return {"steps": len(turns), "samples": len(data), "is_right": is_right, "steps_undone": undone}


if __name__ == "__main__":
    sys.exit(main())
