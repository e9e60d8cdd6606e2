"""Measured training steps of every way to schedule, on the same global batches, against what was predicted.

Usage: python benches/step.py OUT.json [--rounds 30] [--order data-aware] [--arms blind,aware,...]

The demo's data and model are profiled and planned anew on two ranks of this machine's CPU, a thread each,
with 16 microbatches of 64 samples; then `dflop train --compare` trains every global batch once with each
arm, in another order each time. A ratio is that of the geometric means of the step times, the fastest
baseline (blind or tokens, without or with running ahead) over the arm, with its 95 % confidence interval over
the rounds. No memory budget is set, for any arm: with `-ahead` all forwards are free to run.

Three errors of the step time: that of the prediction, made before the step ran; that of the same corrected by
how long the eight steps before took; and that of the simulator when it is given the durations that the step's
own actions took.

Beside them the machine's own noise, in two ways, before and after the run. Equal steps: one global batch is
trained again and again. How far one of its steps is from the mean of the eight before is what the corrected
error would be if each step were known from others just like it. Equal work: products and passes over memory
on as many processes, a step long, without messages, with the same addresses each time.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import platform
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections import deque
from pathlib import Path
from typing import Any

from collect import origin

METHODS = ("blind", "tokens", "balanced", "ordered", "shaped", "aware")
ARMS = [f"{method}{suffix}" for suffix in ("", "-ahead") for method in METHODS]
CAUSES = ("ramp", "imbalance", "transfer")
# As long as a step of the demo, as many as the correction needs and some more; it looks at eight steps.
NOISE_SECONDS, NOISE_RUNS, CORRECTION_STEPS = 1.5, 28, 8
EQUAL_STEPS, EQUAL_WARMUP = 48, 4


def dflop(*arguments: object, folder: Path) -> None:
    """Runs the command line of this environment; its talk goes to stderr."""
    command = [sys.executable, "-m", "dflop", *map(str, arguments)]
    subprocess.run(command, cwd=folder, check=True, stdout=sys.stderr)


def prepare(folder: Path, order: str, profile_seconds: float) -> None:
    """Data, profiles and plan in `folder`."""
    dflop("demo-data", folder, "--force", folder=folder)
    config = folder / "dflop.yaml"
    config.write_text(config.read_text().replace("train:\n", f"train:\n  pipeline_order: {order}\n"))
    dflop("profile", "data", folder=folder)
    # Measured anew each time, of this very hour: the demo does the same.
    flags = ("--budget-seconds", profile_seconds, "--recompute", "none", "--fresh")
    dflop("profile", "model", *flags, folder=folder)
    dflop("plan", "--only", "colocated=false", folder=folder)


def lines(path: Path) -> list[dict[str, Any]]:
    """The records of a JSONL file."""
    return [json.loads(line) for line in path.read_text().splitlines()]


def errors_of(values: list[float]) -> dict[str, float]:
    """Median and 95th percentile."""
    return {
        "median": statistics.median(values),
        "p95": statistics.quantiles(values, n=20, method="inclusive")[-1],
    }


def simulated_ns(folder: Path) -> dict[tuple[int, str], int]:
    """Makespan of each step by the simulator, fed with the durations that were measured in it."""
    from dflop._native import Schedule, StepScheduler
    from dflop._native.testing import simulate_measured

    names = ("plan.json", "data_profile.parquet", "model_profile.json")
    seed = json.loads((folder / "plan.json").read_text())["seed"]
    plan, data, model = (str(folder / name) for name in names)
    scheduler = StepScheduler(plan, data, model, seed)
    schedules = {(s["step"], s["arm"]): s["schedule"] for s in lines(folder / "run" / "schedules.jsonl")}
    found: dict[tuple[int, str], int] = {}
    for trace in lines(folder / "run" / "trace.jsonl"):
        key = (trace["step"], trace["arm"])
        schedule = Schedule.from_record(schedules[key])
        spans = [(rank, action, start, end) for rank, action, start, end in trace["spans"]]
        # The clipping makes all ranks wait for the last action of all: what comes after it is common to them.
        tail_ns = trace["makespan_ns"] - max(end for _, _, _, end in spans)
        found[key] = simulate_measured(scheduler, schedule, spans, tail_ns)
    return found


def summarise(folder: Path, arms: list[str]) -> dict[str, Any]:
    """What the run in `folder` shows, arm by arm and over all of them."""
    metrics, simulated = lines(folder / "run" / "metrics.jsonl"), simulated_ns(folder)
    summary = json.loads((folder / "summary.json").read_text())
    ratios = {row["arm"]: row for row in summary["arms"]}
    num_ranks = summary["ranks"]

    def of(rows: list[dict[str, Any]]) -> dict[str, Any]:
        def error(ns: int, row: dict[str, Any]) -> float:
            return abs(ns - row["step_ns"]) / row["step_ns"]

        idle = {
            cause: statistics.mean(r["idle_ns"][cause] / (num_ranks * r["step_ns"]) for r in rows)
            for cause in CAUSES
        }
        return {
            "prediction_error": errors_of([error(r["predicted_ns"], r) for r in rows]),
            "corrected_error": errors_of([error(r["corrected_ns"], r) for r in rows]),
            "simulated_error": errors_of([error(simulated[r["step"], r["arm"]], r) for r in rows]),
            "idle_ratio": idle,
        }

    table = []
    for arm in arms:
        rows = [r for r in metrics if r["arm"] == arm]
        ratio = ratios[arm]
        table.append(
            {
                "arm": arm,
                "is_baseline": ratio["is_baseline"],
                "step_ms": statistics.geometric_mean(r["step_ns"] / 1e6 for r in rows),
                **{key: ratio[key] for key in ("ratio", "ratio_low", "ratio_high")},
                **of(rows),
                "steps_ms": [r["step_ns"] / 1e6 for r in rows],
                "predicted_ms": [r["predicted_ns"] / 1e6 for r in rows],
                "corrected_ms": [r["corrected_ns"] / 1e6 for r in rows],
            }
        )
    waits = {key: value for key, value in summary.items() if key.startswith("schedule_wait")}
    return {**of(metrics), **waits, "best": summary["best"], "arms": table}


def errors_by_the_last(times: list[float]) -> list[float]:
    """Errors of the mean of the eight before, as a prediction of the next."""
    errors, before = [], deque(times[:1], CORRECTION_STEPS)
    for measured in times[1:]:
        errors.append(abs(statistics.fmean(before) - measured) / measured)
        before.append(measured)
    return errors


def equal_steps(folder: Path, order: str, arm: str, is_again: bool = False) -> list[float]:
    """Errors of the mean of the eight steps before, where all train the same samples in the same way."""
    equal = folder / "equal"
    if not is_again:
        shutil.rmtree(equal, ignore_errors=True)
        dflop("demo-data", equal, "--samples", 64, folder=folder)
        config = equal / "dflop.yaml"
        settings = f"train:\n  pipeline_order: {order}\n"
        text = (
            config.read_text().replace("train:\n", settings).replace("schedule: aware ", f"schedule: {arm} ")
        )
        config.write_text(text)
        dflop("profile", "data", folder=equal)
        shutil.copy(folder / "model_profile.json", equal)
        dflop("plan", "--only", "colocated=false", folder=equal)
    dflop("train", "--steps", EQUAL_STEPS + EQUAL_WARMUP, "--force", folder=equal)
    rows = lines(equal / "run" / "metrics.jsonl")[EQUAL_WARMUP:]
    return errors_by_the_last([row["step_ns"] for row in rows])


def time_equal_work(runs: int) -> list[float]:
    """Seconds that equal work takes, again and again: products within a core's cache, passes over memory."""
    import torch

    torch.set_num_threads(1)
    square, long = torch.randn(256, 256), torch.randn(1 << 20)

    def work(count: int) -> float:
        start = time.perf_counter()
        for _ in range(count):
            for _ in range(16):
                square @ square
            torch.nn.functional.gelu(long)
        return time.perf_counter() - start

    work(20)
    count = max(1, round(NOISE_SECONDS / (work(20) / 20)))
    return [work(count) for _ in range(runs)]


def noise_errors(num_processes: int) -> list[float]:
    """Errors of the mean of the eight runs before, as a prediction of the next; of all processes."""
    context = multiprocessing.get_context("spawn")
    with context.Pool(num_processes) as pool:
        found = pool.map(time_equal_work, [NOISE_RUNS] * num_processes, chunksize=1)
    return [error for seconds in found for error in errors_by_the_last(seconds)]


def hardware(folder: Path) -> dict[str, Any]:
    """What the numbers were measured on."""
    profile = json.loads((folder / "model_profile.json").read_text())
    return {
        "device": profile["device"]["name"],
        "torch": profile["device"]["torch"],
        "cores": os.cpu_count(),
        "load": os.getloadavg()[0],
        "system": platform.platform(),
    }


def show(result: dict[str, Any]) -> None:
    """The table."""

    def errors(row: dict[str, Any]) -> str:
        return "".join(
            f"{row[kind][at]:>8.2%}"
            for kind in ("prediction_error", "corrected_error", "simulated_error")
            for at in ("median", "p95")
        )

    print(
        f"{'arm':<16}{'step ms':>9}{'best baseline over it':>24}{'ramp':>7}{'imbal.':>7}{'transf.':>8}"
        f"{'predicted: median, p95':>24}{'corrected: same':>20}{'own durations: same':>20}"
    )
    for row in result["arms"]:
        interval = f"{row['ratio']:.3f} ({row['ratio_low']:.3f} to {row['ratio_high']:.3f})"
        ramp, imbalance, transfer = (row["idle_ratio"][cause] for cause in CAUSES)
        print(
            f"{row['arm']:<16}{row['step_ms']:>9.1f}{interval:>24}{ramp:>7.1%}{imbalance:>7.1%}{transfer:>8.1%}"
            f"{'':>8}{errors(row)[:16]}{'':>4}{errors(row)[16:32]}{'':>4}{errors(row)[32:]}"
        )
    print(
        f"{'all':<95}{'':>8}{errors(result)[:16]}{'':>4}{errors(result)[16:32]}{'':>4}{errors(result)[32:]}"
    )
    best = result["best"]
    print(
        f"the fastest baseline, {best['baseline']}, over the fastest of ours, {best['ours']}: "
        f"{best['ratio']:.3f} (95 % interval {best['ratio_low']:.3f} to {best['ratio_high']:.3f})"
    )
    for kind, what in (("step_noise", "equal steps"), ("machine_noise", "equal work")):
        noise, corrected = result[kind], result["corrected_error"]
        over = ", ".join(f"{corrected[at] / noise[at]:.2f}" for at in ("median", "p95"))
        print(
            f"the machine's own noise, by {what}: {noise['median']:.2%} (median), {noise['p95']:.2%} "
            f"(95th percentile); the corrected error over it: {over}"
        )
    print(
        f"{result['rounds']} rounds; schedules were waited for {result['schedule_wait_ms']:.2f} ms, "
        f"{result['schedule_wait_ratio']:.4%} of the time of the steps"
    )


def main() -> int:
    """Prepares, trains, writes and prints.

    Returns:
        The exit status.
    """
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument("--warmup", type=int, default=2, help="rounds before those that are measured")
    parser.add_argument("--order", default="data-aware", help="train.pipeline_order")
    parser.add_argument("--arms", default=",".join(ARMS), help="a baseline and one of ours among them")
    parser.add_argument("--profile-seconds", type=float, default=25.0)
    parser.add_argument("--folder", type=Path, help="where to work, kept; else a temporary folder")
    asked = parser.parse_args()
    arms = asked.arms.split(",")
    baselines = {"blind", "tokens", "blind-ahead", "tokens-ahead"}
    if asked.rounds < 2 or not (baselines & set(arms) and {"aware", "aware-ahead"} & set(arms)):
        parser.error("at least 2 rounds, of a baseline and of aware or aware-ahead at least")
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name) if asked.folder is None else asked.folder.resolve()
        folder.mkdir(parents=True, exist_ok=True)
        prepare(folder, asked.order, asked.profile_seconds)
        # Ranks get one thread each, and an allocator that keeps what it has: `dflop train` sees to both.
        flags = ("--arms", ",".join(arms), "--steps", asked.rounds, "--warmup-pairs", asked.warmup, "--force")
        profile = json.loads((folder / "model_profile.json").read_text())
        num_ranks = 1 + profile["device"]["num_neighbours"]
        arm = next(one for one in ("aware-ahead", "aware") if one in arms)
        noise, step_noise = noise_errors(num_ranks), equal_steps(folder, asked.order, arm)
        dflop("train", "--compare", *flags, folder=folder)
        step_noise += equal_steps(folder, asked.order, arm, is_again=True)
        noise += noise_errors(num_ranks)
        dflop("report", folder, folder=folder)
        result = {
            "bench": "step",
            **origin(),
            "hardware": hardware(folder),
            "order": asked.order,
            "rounds": asked.rounds,
            "machine_noise": errors_of(noise),
            "step_noise": errors_of(step_noise),
            **summarise(folder, arms),
        }
    asked.out.parent.mkdir(parents=True, exist_ok=True)
    asked.out.write_text(json.dumps(result, indent=1) + "\n")
    show(result)
    print(f"wrote {asked.out}", file=sys.stderr)
    return 0


if __name__ == "__main__":
    sys.exit(main())
