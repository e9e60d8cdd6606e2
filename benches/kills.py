"""Kills random ranks of `dflop train` at random moments, then counts the samples that were trained.

    python benches/kills.py demo --steps 200 --kills 10

`demo` is a directory with a configuration, profiles and a plan. Each time a rank is killed (`kill -9`), the
same command goes on from the newest checkpoint. In the end `schedules.jsonl` must hold the global batches of
all steps, each once and in order. The moments are drawn from a seed in steps and milliseconds, so that kills
come within actions, reductions, saves and between steps.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

from dflop._native import Dataset, GlobalBatches
from dflop._native.testing import load_config


def main() -> int:
    """Runs to the end; 0 if every sample was trained exactly once an epoch."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("directory", type=Path)
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--kills", type=int, default=10)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    out = arguments.directory / "run-of-kills"
    if out.exists():
        parser.error(f"`{out}` exists, remove it")
    draw = random.Random(arguments.seed)
    moments = sorted(draw.randrange(arguments.steps) for _ in range(arguments.kills))
    command = [
        sys.executable, "-m", "dflop", "train", "--other-device", "--resume", "auto",
        "--steps", str(arguments.steps), "--out", out.name,
    ]  # fmt: skip
    for step in moments:
        with subprocess.Popen(command, cwd=arguments.directory) as run:
            # A step that was trained before: as soon as there are ranks, while they start or load.
            while run.poll() is None and (num_lines(out / "metrics.jsonl") < step or not ranks_of(run.pid)):
                time.sleep(0.05)
            time.sleep(draw.random() / 2)
            ranks = ranks_of(run.pid)
            if ranks:
                victim = draw.choice(ranks)
                print(f"killing process {victim} after {num_lines(out / 'metrics.jsonl')} steps")
                os.kill(victim, signal.SIGKILL)
    subprocess.run(command, cwd=arguments.directory, check=True)
    return check(arguments.directory, out, arguments.steps)


def num_lines(path: Path) -> int:
    """Whole lines of a journal that may not be there yet."""
    return path.read_bytes().count(b"\n") if path.exists() else 0


def ranks_of(process: int) -> list[int]:
    """The ranks below `dflop train`: children of its one child, torchrun's agent."""
    found = [child for agent in children(process) for child in children(agent)]
    return [child for child in found if b"dflop.runtime.worker" in command_of(child)]


def children(process: int) -> list[int]:
    """Processes that this one has started."""
    try:
        tasks = Path(f"/proc/{process}/task").iterdir()
        return [int(child) for task in tasks for child in (task / "children").read_text().split()]
    except OSError:
        return []


def command_of(process: int) -> bytes:
    """Its command line."""
    try:
        return Path(f"/proc/{process}/cmdline").read_bytes()
    except OSError:
        return b""


def check(directory: Path, out: Path, num_steps: int) -> int:
    """Holds the log against the global batches that seed and data decide."""
    config = json.loads(load_config(str(directory / "dflop.yaml")))
    data = Dataset(str(directory / "dflop.yaml"), str(directory / "data_profile.parquet"))
    train = config["train"]
    batches = GlobalBatches(len(data), train["global_batch_size"], train["seed"])
    turns = [json.loads(line) for line in (out / "schedules.jsonl").read_text().splitlines()]
    is_right = [t["step"] for t in turns] == list(range(num_steps))
    is_right &= all(t["samples"] == batches.batch(t["step"]) for t in turns)
    num_undone = num_lines(out / "schedules.undone.jsonl")
    print(f"{len(turns)} steps, each once: {is_right}; {num_undone} were lost by kills and trained again")
    return 0 if is_right else 1


if __name__ == "__main__":
    sys.exit(main())
