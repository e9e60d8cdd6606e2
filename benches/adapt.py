"""How much time correction wins back when steps differ from the profile, and what it costs.

Usage: python benches/adapt.py OUT.json [--example EXECUTABLE] [--worlds simulated,rehearsed,slept,...]
       [--shares 0.01,0.03,0.05] [--times 0.25,0.5,1,2] [--slept 0.03:1,0.03:2] [--speed 0.05] [--rounds 64]

The same anomaly in three worlds: 1, 3 and 5 % of the samples, of neighbouring sizes, add 25, 50, 100 and
200 % of the largest stage's mean time to each action that holds one (`SlowShapes` of `crates/step`). All
twelve are simulated and rehearsed, two are slept: --shares, --times and --slept choose others. What is done,
which part of all it is and how long it has taken is said on stderr. Ctrl-C ends all of it, and nothing is
written.

simulated  `crates/plan/examples/adapt.rs`: a made-up cluster of 32 H100; slow ranks, and 1,000 quiet steps
rehearsed  `dflop rehearse --slow-shapes`: eight real processes that sleep as predicted; a slow rank too
slept      a training run on two ranks of this machine's CPU, whose actions with slow samples sleep longer
monitored  such a run again: every batch with and without all that is measured and written of a step
predicted  such a run again: after each step an equal one, of one batch, which tells the machine's noise

recovered_ratio             median over slow shapes: the part of the time lost that correction wins back,
                            simulated;
recovered_rehearsed_ratio   rehearsed, and
recovered_slept_ratio       in the training run
recovered_knowing_ratio     of schedules that know the slow sizes from the first step on, simulated
recovered_of_waits_ratio    without the work that the anomaly adds, which somebody has to do
slow_rank_steps             the most steps until the slow rank was named
slow_rank_recovered_ratio   the least part of a slow rank's loss that came back
monitoring_ratio            what all monitoring adds to a training step, switched off and on in turns; and
monitoring_ratio_low, _high   its 95 % interval; and
monitoring_counted_ratio    the same counted: the leader's time within it, as a part of the step
learning_ratio              the most time that learning took on the leader, as a part of the step, simulated
false_alarms                in all quiet steps
corrected_error_over_noise  median error of the corrected prediction over that of one that knows all but
                            the noise, in the median over all anomalies, simulated; and
corrected_error_over_noise_p95  the same of the 95th percentiles
trained_error_over_noise, _p95  the error of corrected predictions over what equal steps in between are off
                            from the mean of the eight before them, in the training run; with _low and _high
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import random
import re
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from collect import origin
from step import errors_by_the_last

if TYPE_CHECKING:
    from collections.abc import Callable

WORLDS = ("simulated", "rehearsed", "slept", "monitored", "predicted")
Pairs = list[tuple[float, float]]
"""Shares of the samples, and how many mean times of the slowest stage they add."""
LAYOUT = "encoder.dp=2,llm.pp=2,llm.dp=3"
"""Of the rehearsal: eight ranks; LLM replicas that can take each other's work."""
STEPS, COUNTED = 32, 16
"""Steps of each anomaly, and from which on they count. After the last one correction decides on itself."""
REHEARSED = 96
"""Steps of a rehearsal with and without correction: a step has one slow sample or two, 16 say little."""
LOST_MIN = 0.01
"""Less lost than this part of the step is nothing to win back."""
MEMORY_OF_RANKS = {
    "OMP_NUM_THREADS": "1",
    "MALLOC_MMAP_MAX_": "0",
    "MALLOC_TRIM_THRESHOLD_": str(1 << 35),
    "MALLOC_TOP_PAD_": str(1 << 26),
}
"""What `dflop train` sets for ranks of a CPU; ranks of one's own torchrun do it themselves."""


def dflop(*arguments: object, folder: Path) -> None:
    """Runs the command line of this environment; its talk goes to stderr."""
    command = [sys.executable, "-m", "dflop", *map(str, arguments)]
    subprocess.run(command, cwd=folder, check=True, stdout=sys.stderr)


def lines(path: Path) -> list[dict[str, Any]]:
    """The records of a JSONL file."""
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def with_sizes(config: Path, sizes: dict[str, int]) -> str:
    """Sets numbers of a configuration, and gives its text."""
    text = config.read_text()
    for name, value in sizes.items():
        text = re.sub(rf"{name}: \d+", f"{name}: {value}", text, count=1)
    config.write_text(text)
    return text


BEGAN_S = time.monotonic()


def say(text: str) -> None:
    """Tells what is done, and how long all of it has taken so far."""
    print(f"[{(time.monotonic() - BEGAN_S) / 60:.1f} min] {text}", file=sys.stderr, flush=True)


def recovered(steps_ns: dict[str, list[int]]) -> dict[str, Any]:
    """What was lost and won back over equal batches.

    Args:
        steps_ns: Times of the same steps: `quiet` without the anomaly, `off` with it, `auto` with correction
            (in rehearsals `on`, which never rests).

    Returns:
        Parts of the quiet step that are lost; the part of it that came back, with a 95 % interval over the
        steps (bootstrap), or none where less than 1 % was lost.
    """
    quiet, off, auto = (steps_ns[way] for way in ("quiet", "off", "auto"))

    def ratio(at: list[int]) -> float | None:
        total, lost = sum(quiet[i] for i in at), sum(off[i] - quiet[i] for i in at)
        return sum(off[i] - auto[i] for i in at) / lost if lost > LOST_MIN * total else None

    every, drawn = list(range(len(quiet))), random.Random(0)
    ratios = sorted(
        found for _ in range(1000) if (found := ratio(drawn.choices(every, k=len(every)))) is not None
    )
    ends = [ratios[len(ratios) * part // 1000] for part in (25, 975)] if len(ratios) > 900 else None
    return {
        "step_ms": {way: statistics.fmean(ns) / 1e6 for way, ns in steps_ns.items()},
        "lost": sum(off) / sum(quiet) - 1,
        "lost_corrected": sum(auto) / sum(quiet) - 1,
        "recovered": ratio(every),
        "recovered_interval": ends,
    }


def decisions(events: list[dict[str, Any]]) -> dict[str, Any]:
    """When correction switched itself off, and by which numbers.

    Args:
        events: Of the run.

    Returns:
        The step after which it rested, none where it never did; and each decision.
    """
    found = [event for event in events if event.get("kind") == "correction"]
    rests = [event["step"] for event in found if event["decision"] == "rest"]
    names = ("step", "decision", "saved_ns", "cost_ns")
    told = [{name: event[name] for name in names if name in event} for event in found]
    return {"off_after_step": rests[0] if rests else None, "decisions": told}


def rehearsed(folder: Path, pairs: Pairs, speed: float) -> list[dict[str, Any]]:
    """Rehearsals of eight ranks, each anomaly without correction, with it, and where it decides on itself.

    Args:
        folder: To work in; it is empty.
        pairs: Slow shapes.
        speed: How many times faster than an H100. Below 1, what this machine is late by counts little.

    Returns:
        A row an anomaly.
    """
    dflop("demo-data", folder, "--force", "--samples", 512, folder=folder)
    config = folder / "dflop.yaml"
    text = with_sizes(config, {"num_ranks": 8, "global_batch_size": 48, "num_microbatches": 4})
    dflop("profile", "data", folder=folder)
    dflop("profile", "model", "--estimate", "--hardware", "h100", folder=folder)
    dflop("plan", "--only", LAYOUT, folder=folder)

    anomalies = [("--slow-shapes", f"{100 * share:g}%:{times:g}") for share, times in pairs]
    anomalies.append(("--slow-rank", "3:1.5"))
    numbers = itertools.count(1)

    def run(
        mode: str, flags: tuple[str, ...], steps: int = REHEARSED
    ) -> tuple[list[int], list[dict[str, Any]]]:
        place = f"rehearsal {next(numbers)} of {1 + 3 * len(anomalies)}"
        say(f"{place}, eight ranks: {' '.join(flags) or 'quiet'}, correction {mode}, {steps} steps")
        config.write_text(text.replace("train:\n", f'train:\n  correction: "{mode}"\n', 1))
        dflop("rehearse", "--steps", steps, "--speed", speed, "--force", *flags, folder=folder)
        metrics = lines(folder / "rehearsal" / "metrics.jsonl")[COUNTED:]
        return [step["step_ns"] for step in metrics], lines(folder / "rehearsal" / "events.jsonl")

    quiet, _ = run("off", ())
    rows: list[dict[str, Any]] = []
    for flags in anomalies:
        off, _ = run("off", flags)
        on, events = run("on", flags)
        row = {"anomaly": " ".join(flags), **recovered({"quiet": quiet, "off": off, "auto": on})}
        if flags[0] == "--slow-rank":
            alarms = [e for e in events if e.get("cause") == "rank" and e["words"].startswith("rank 3 ")]
            row["named_after_steps"] = alarms[0]["step"] + 1 if alarms else None
        # Only `auto` decides whether it pays.
        _, decided = run("auto", flags, STEPS)
        rows.append(row | decisions(decided))
        say(json.dumps(rows[-1]))
    return rows


def trained(folder: Path, asked: dict[str, Any], sizes: dict[str, int], num_samples: int) -> Any:
    """What the ranks of `altered_rank.py` found, two of them on this machine's CPU."""
    dflop("demo-data", folder, "--force", "--samples", num_samples, folder=folder)
    with_sizes(folder / "dflop.yaml", sizes)
    dflop("profile", "data", folder=folder)
    dflop("profile", "model", "--budget-seconds", 20, "--recompute", "none", folder=folder)
    dflop("plan", "--only", "colocated=true", folder=folder)
    request, out = folder / "altered.json", folder / "found.json"
    request.write_text(json.dumps({**asked, "out": str(out)}))
    command = [
        sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2",
        str(Path(__file__).with_name("altered_rank.py").resolve()), "train", "--steps", "10000", "--force",
    ]  # fmt: skip
    environment = {**os.environ, **MEMORY_OF_RANKS, "ALTERED": str(request)}
    subprocess.run(command, cwd=folder, check=True, stdout=sys.stderr, env=environment)
    return json.loads(out.read_text())


def slept(folder: Path, pairs: Pairs) -> list[dict[str, Any]]:
    """A training run whose actions with slow samples sleep, with and without correction, batch by batch."""
    say(f"training with real sleeps on two ranks: {len(pairs)} anomalies")
    asked = {"slow": pairs, "steps": STEPS, "counted": COUNTED}
    found = trained(folder, asked, {"global_batch_size": 16, "num_microbatches": 4}, 512)
    return [
        {
            "anomaly": f"--slow-shapes {100 * row['share']:g}%:{row['times']:g}",
            "slow_samples": row["slow_samples"],
            "added_ms": row["added_ms"],
            **recovered(row["steps_ns"]),
            **decisions(row["events"]),
        }
        for row in found
    ]


def monitored(folder: Path, num_rounds: int) -> dict[str, Any]:
    """What monitoring adds to a step: every batch is trained with and without it, in turns."""
    say("training with and without monitoring, in turns")
    found = trained(folder, {"monitored": num_rounds}, {"global_batch_size": 16, "num_microbatches": 4}, 256)
    on, off = found["steps_ns"]["on"][4:], found["steps_ns"]["off"][4:]
    ratios = [with_it / without - 1 for with_it, without in zip(on, off, strict=True)]
    drawn = random.Random(0)
    medians = sorted(statistics.median(drawn.choices(ratios, k=len(ratios))) for _ in range(1000))
    counted = [spent / step for spent, step in zip(found["monitoring_ns"][4:], on, strict=True)]
    return {
        "ratio": statistics.median(ratios),
        "ratio_low": medians[25],
        "ratio_high": medians[975],
        "counted_ratio": statistics.median(counted),
        "counted_ms": statistics.median(found["monitoring_ns"][4:]) / 1e6,
        "step_ms": {"on": statistics.median(on) / 1e6, "off": statistics.median(off) / 1e6},
        "rounds": len(ratios),
    }


def predicted(folder: Path, num_rounds: int) -> dict[str, Any]:
    """How far corrected predictions are off, over how far equal steps are off from those before them."""
    say("training with an equal step after each")
    found = trained(folder, {"equal": num_rounds}, {"global_batch_size": 16, "num_microbatches": 4}, 512)
    equal = errors_by_the_last(found["equal_ns"])
    steps = [
        abs(corrected - measured) / measured if corrected is not None else None
        for measured, corrected in found["steps"]
    ]
    # Both begin to be predicted by eight steps at the same moment.
    pairs = [(error, noise) for error, noise in zip(steps[8:], equal[7:], strict=True) if error is not None]
    drawn = random.Random(0)

    def over(part: Callable[[list[float]], float]) -> list[float]:
        """The quotient, and the ends of its 95 % interval (bootstrap over rounds)."""

        def quotient(of: list[tuple[float, float]]) -> float:
            return part([error for error, _ in of]) / part([noise for _, noise in of])

        all_drawn = sorted(quotient(drawn.choices(pairs, k=len(pairs))) for _ in range(1000))
        return [quotient(pairs), all_drawn[25], all_drawn[975]]

    def p95(values: list[float]) -> float:
        return statistics.quantiles(values, n=20, method="inclusive")[-1]

    return {
        "rounds": len(pairs),
        "corrected_error": [part([error for error, _ in pairs]) for part in (statistics.median, p95)],
        "noise": [part([noise for _, noise in pairs]) for part in (statistics.median, p95)],
        "over_noise": over(statistics.median),
        "over_noise_p95": over(p95),
        "raw": found,
    }


def of_simulated(simulated: dict[str, Any]) -> dict[str, Any]:
    """The contract's numbers that the simulation gives."""
    anomalies, slow_ranks, quiet = (simulated[name] for name in ("anomalies", "slow_ranks", "quiet"))

    def known(rows: list[dict[str, Any]], name: str) -> list[float]:
        return [row[name] for row in rows if row[name] is not None]

    def over_noise(error: str, noise: str) -> float:
        return statistics.median(row[error] / row[noise] for row in anomalies + slow_ranks)

    named = [row["named_after_steps"] for row in slow_ranks]
    return {
        "recovered_ratio": statistics.median(known(anomalies, "recovered")),
        "recovered_knowing_ratio": statistics.median(known(anomalies, "recovered_knowing")),
        "recovered_of_waits_ratio": statistics.median(known(anomalies, "recovered_of_waits")),
        "slow_rank_steps": None if None in named else max(named),
        "slow_rank_recovered_ratio": min(known(slow_ranks, "recovered")),
        "learning_ratio": max(row["monitoring"] for row in quiet),
        "false_alarms": sum(row["false_alarms"] for row in quiet),
        "corrected_error_over_noise": over_noise("corrected_error", "noise_error"),
        "corrected_error_over_noise_p95": over_noise("corrected_error_p95", "noise_error_p95"),
    }


def median_recovered(rows: list[dict[str, Any]]) -> float | None:
    """The median over slow shapes; none where none of them lost anything."""
    found = [row["recovered"] for row in rows if "--slow-shapes" in row["anomaly"]]
    found = [ratio for ratio in found if ratio is not None]
    return statistics.median(found) if found else None


def main() -> None:
    """Runs the worlds that are asked for and writes what they show."""
    parser = argparse.ArgumentParser()
    parser.add_argument("out", type=Path)
    parser.add_argument("--example", type=Path, default=Path("target/release/examples/adapt"))
    parser.add_argument("--worlds", default=",".join(WORLDS))
    parser.add_argument("--shares", default="0.01,0.03,0.05")
    parser.add_argument("--times", default="0.25,0.5,1,2")
    parser.add_argument("--slept", default="0.03:1,0.03:2", help="SHARE:TIMES of each that is slept")
    parser.add_argument(
        "--speed", type=float, default=0.05, help="of the rehearsals, as `dflop rehearse` has it"
    )
    parser.add_argument("--rounds", type=int, default=64, help="of `monitored` and `predicted`; at least 16")
    wanted = parser.parse_args()
    worlds = wanted.worlds.split(",")
    if unknown := set(worlds) - set(WORLDS):
        parser.error(f"no such world: {', '.join(sorted(unknown))}")
    if wanted.rounds < 16:
        parser.error("--rounds must be at least 16")
    shares, times = ([float(one) for one in text.split(",")] for text in (wanted.shares, wanted.times))
    pairs = [(share, of_stage) for share in shares for of_stage in times]
    slept_pairs = [
        (float(share), float(of_stage))
        for share, of_stage in (one.split(":") for one in wanted.slept.split(","))
    ]
    answer: dict[str, Any] = origin()
    sections: dict[str, Any] = {}
    if "simulated" in worlds:
        say("simulated: 32 rows, each said when it is done")
        said = subprocess.run([str(wanted.example)], check=True, stdout=subprocess.PIPE, text=True).stdout
        sections["simulated"] = json.loads(said)
        answer |= of_simulated(sections["simulated"])
    runs: dict[str, Callable[[Path], Any]] = {
        "rehearsed": lambda folder: rehearsed(folder, pairs, wanted.speed),
        "slept": lambda folder: slept(folder, slept_pairs),
        "monitored": lambda folder: monitored(folder, wanted.rounds),
        "predicted": lambda folder: predicted(folder, wanted.rounds),
    }
    for world, run in runs.items():
        if world in worlds:
            with tempfile.TemporaryDirectory() as name:
                sections[world] = run(Path(name))
    for world in ("rehearsed", "slept"):
        if world in sections:
            answer[f"recovered_{world}_ratio"] = median_recovered(sections[world])
    if "monitored" in sections:
        names = ("ratio", "ratio_low", "ratio_high", "counted_ratio")
        answer |= {f"monitoring_{name}": sections["monitored"][name] for name in names}
    if "predicted" in sections:
        for name in ("over_noise", "over_noise_p95"):
            ends = ("", "_low", "_high")
            values = zip(ends, sections["predicted"][name], strict=True)
            answer |= {f"trained_error_{name}{end}": value for end, value in values}
    wanted.out.parent.mkdir(parents=True, exist_ok=True)
    wanted.out.write_text(json.dumps(answer | sections, indent=1) + "\n")
    print(json.dumps(answer))


if __name__ == "__main__":
    try:
        main()
    except KeyboardInterrupt:
        sys.exit("interrupted: nothing was written")
