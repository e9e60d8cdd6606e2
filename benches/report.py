"""The report of a long run on many ranks: bytes, seconds and memory.

Usage: python benches/report.py OUT.json [--steps 1000] [--ranks 64] [--batch 256] [--microbatches 8]
       [--only colocated=false,llm.tp=1,llm.pp=4] [--keep DIR]

The run directory is made by the parts that make one in training, but for the ranks: demo data, estimated
times of H100, a plan, the run's scheduler for each global batch, and the writer of its journals. Only the
spans are made up: those that are predicted, each action up to a tenth shorter in a step that is a few percent
longer; from the middle of the run on rank 5 is slow, and one step in a hundred takes half as long again. Then
`dflop report` makes the page. --keep leaves the directory, so that the page can be looked at.

page_bytes           size of report.html
seconds, peak_bytes  wall clock of `dflop report`, and its memory at its fullest moment
run_bytes            of the journals that it reads
steps_held           steps whose spans are in the page, and `parts`, how finely their times are rounded
"""

from __future__ import annotations

import argparse
import hashlib
import json
import math
import random
import re
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

from collect import origin

from dflop._native import Dataset, GlobalBatches, Plan, StepScheduler
from dflop.runtime.adaptation import Adaptation
from dflop.runtime.journal import Journal
from dflop.runtime.losses import SampleLoss, grouped
from dflop.runtime.records import step_metrics
from dflop.runtime.spans import RankSpans, align
from dflop.runtime.turns import Turn

if TYPE_CHECKING:
    from dflop._native import Schedule

CONFIG = """\
model: {{name: llava-onevision-qwen2-7b}}
data: {{mixture: data/mixture.yaml, video_max_frames: 16}}
cluster: {{device: h100, num_ranks: {ranks}}}
train: {{global_batch_size: {batch}, num_microbatches: {microbatches}, steps: {steps}}}
"""
FILES = {"plan": "plan.json", "data_profile": "data_profile.parquet", "model_profile": "model_profile.json"}
MEASURED = """\
import json, resource, subprocess, sys, time
start = time.monotonic()
subprocess.run(sys.argv[1:], check=True, stdout=sys.stderr)
print(json.dumps([time.monotonic() - start, resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss * 1024]))
"""
"""Run by a small process: to the system, a process needs at least what the one that started it has."""
SLOW_RANK, SLOWER = 5, 1.25
"""A rank that is slow in the second half of the run."""


def dflop(*arguments: object, folder: Path) -> None:
    """Runs the command line of this environment; its talk goes to stderr."""
    command = [sys.executable, "-m", "dflop", *map(str, arguments)]
    subprocess.run(command, cwd=folder, check=True, stdout=sys.stderr)


def hash_of(artifact: Path) -> str:
    """The hash that a run names a plan by: of its length and its text."""
    text = artifact.read_bytes()
    return f"sha256:{hashlib.sha256(len(text).to_bytes(8, 'little') + text).hexdigest()}"


def measured(
    scheduler: StepScheduler, schedule: Schedule, is_second_half: bool, drawn: random.Random
) -> list[RankSpans]:
    """Spans as ranks would report them of a step: no rank is busy twice, none reads what is not there yet."""
    predicted, tails, _ = scheduler.predicted_spans(schedule)
    stretch = drawn.uniform(1.02, 1.08) * (1.5 if drawn.random() < 0.01 else 1.0)
    if is_second_half:
        stretch *= SLOWER
    by_rank: dict[int, list[tuple[str, int, int]]] = {rank: [] for rank in range(len(tails))}
    for rank, action, start, end in predicted:
        own = drawn.uniform(0.9, 1.0) * stretch
        if is_second_half and rank != SLOW_RANK:
            own /= SLOWER
        begin = round(start * stretch)
        by_rank[rank].append((action, begin, begin + round((end - start) * own)))
    last = max(end for spans in by_rank.values() for _, _, end in spans)
    return [
        RankSpans(rank, "made up", 0, tuple(spans), (last, last + tails[rank]))
        for rank, spans in by_rank.items()
    ]


def write_run(folder: Path, steps: int) -> None:
    """Writes a run of `steps` steps into `folder`/run, with the scheduler and the journal of training.

    Args:
        folder: With configuration, profiles and plan.
        steps: How many.
    """
    paths = {name: str(folder / file) for name, file in FILES.items()}
    dataset = Dataset(str(folder / "dflop.yaml"), paths["data_profile"])
    plan, seed = Plan.read(paths["plan"]), 0
    of_plan = json.loads(Path(paths["plan"]).read_text())["made_from"]
    scheduler = StepScheduler(paths["plan"], paths["data_profile"], paths["model_profile"], seed)
    batches = GlobalBatches(len(dataset), plan.global_batch_size, seed)
    made_from = {"plan": hash_of(Path(paths["plan"])), "data_profile": of_plan["data_profile"]}
    adaptation, drawn = Adaptation("auto"), random.Random(seed)
    journal = Journal(folder / "run", steps, verb="write")
    arm = "aware"
    for step in range(steps):
        samples = batches.batch(step)
        is_corrected, is_compared = adaptation.asks()
        scheduler.submit(step, samples, arm, corrected=is_corrected, compared=is_compared)
        schedule, waited_ns, correction, compared_ns = scheduler.take(step, arm)
        turn = Turn(step, arm, None, True, samples, schedule, waited_ns, [], correction, compared_ns)  # type: ignore[arg-type]
        spans, tails, step_ns = align(measured(scheduler, schedule, step >= steps // 2, drawn))
        metrics, events = step_metrics(
            scheduler, dataset, turn, spans, step_ns, len(tails), drawn.randrange(1_000_000), adaptation
        )
        level = 2 + 8 * math.exp(-step / 200)
        losses = [
            SampleLoss(one, dataset.kind(one), dataset.shape(one)[2] * drawn.gauss(level, 0.3))
            for one in samples
        ]
        total = sum(dataset.shape(one)[2] for one in samples)
        metrics |= {
            "epoch": batches.epoch(step),
            "loss": sum(one.loss for one in losses) / max(1, total),
            "loss_by": grouped(losses, dataset),
            "grad_norm": drawn.uniform(0.5, 2.0),
        }
        journal.events(step, events)
        key: dict[str, Any] = {"step": step, "arm": arm}
        place = {
            "pair": None,
            "is_recorded": True,
            "made_from": made_from,
            "deferred": [],
            "correction": correction,
        }
        journal.schedule({**key, **place, "samples": samples, "schedule": schedule.record()})
        journal.write(metrics, {**key, "makespan_ns": step_ns, "spans": spans, "tails": tails})
        journal.progress(metrics, True)
    journal.close()


def reported(folder: Path) -> dict[str, Any]:
    """What `dflop report` took, and what its page holds."""
    command = [sys.executable, "-c", MEASURED, sys.executable, "-m", "dflop", "report", "."]
    said = subprocess.run(command, cwd=folder, check=True, stdout=subprocess.PIPE, text=True).stdout
    seconds, peak_bytes = json.loads(said)
    page = (folder / "report.html").read_text(encoding="utf-8")
    (data,) = re.findall(r'<script type="application/json" id="viewer-data">(.*?)</script>', page)
    viewer = json.loads(data)
    return {
        "page_bytes": len(page.encode()),
        "seconds": seconds,
        "peak_bytes": peak_bytes,
        "run_bytes": sum(path.stat().st_size for path in (folder / "run").glob("*.jsonl")),
        "steps_held": len(viewer["steps"]),
        "parts": viewer["parts"],
    }


def main() -> int:
    """Makes the run, its report, and says what they took.

    Returns:
        The exit status.
    """
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("--steps", type=int, default=1000)
    parser.add_argument("--ranks", type=int, default=64)
    parser.add_argument("--batch", type=int, default=256)
    parser.add_argument("--microbatches", type=int, default=8)
    parser.add_argument("--only", default="colocated=false,llm.tp=1,llm.pp=4")
    parser.add_argument("--keep", type=Path)
    asked = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = (asked.keep or Path(name)).resolve()
        dflop("demo-data", folder, "--samples", 2048, "--force", folder=Path.cwd())
        sizes = {name: getattr(asked, name) for name in ("ranks", "batch", "microbatches", "steps")}
        config = CONFIG.format(**sizes)
        (folder / "dflop.yaml").write_text(config)
        dflop("plan", "--only", asked.only, folder=folder)
        write_run(folder, asked.steps)
        answer = {"steps": asked.steps, "ranks": asked.ranks, **reported(folder)}
        print(json.dumps(answer))
    asked.out.parent.mkdir(parents=True, exist_ok=True)
    asked.out.write_text(json.dumps({"bench": "report", **origin(), **answer}, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
