"""How much time correction wins back when steps differ from the profile, and what it costs.

Usage: python benches/adapt.py OUT.json [--example EXECUTABLE] [--steps 48] [--without-rehearsal]

Two parts. Simulated: `crates/plan/examples/adapt.rs`, a made-up cluster of 32 H100 whose truth is known: slow
shapes as in DFLOP's own table, slow ranks, and a thousand quiet steps. Rehearsed: eight real processes that
sleep, with a rank that takes longer, with `train.correction` off and on in turn. What is done is said on
stderr; Ctrl-C ends all of it, and nothing is written.

recovered_ratio             median over slow shapes: the part of the time lost that correction wins back; and
recovered_knowing_ratio     the same of schedules that know the slow sizes and their times from the first on
recovered_of_waits_ratio    of correction, without the work that the anomaly adds, which somebody has to do
slow_rank_steps             the most steps until the slow rank was named
slow_rank_recovered_ratio   the least part of a slow rank's loss that came back
monitoring_ratio            the most time that learning took on the leader, as a part of the step
false_alarms                in all quiet steps
corrected_error_over_noise  median error of the corrected prediction over that of one that knows all but
                            the noise, in the median over all anomalies; and
corrected_error_over_noise_p95  the same of the 95th percentiles
"""

from __future__ import annotations

import argparse
import json
import re
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from collect import origin

LAYOUT = "encoder.dp=2,llm.pp=2,llm.dp=3"
"""Eight ranks; LLM replicas that can take each other's work."""


def dflop(*arguments: object, folder: Path) -> None:
    """Runs the command line of this environment; its talk goes to stderr."""
    command = [sys.executable, "-m", "dflop", *map(str, arguments)]
    subprocess.run(command, cwd=folder, check=True, stdout=sys.stderr)


def lines(path: Path) -> list[dict[str, Any]]:
    """The records of a JSONL file."""
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def rehearsed(folder: Path, num_steps: int) -> list[dict[str, Any]]:
    """Rehearsals of eight ranks, each anomaly without and with correction."""
    dflop("demo-data", folder, "--force", "--samples", 512, folder=folder)
    config = folder / "dflop.yaml"
    text = config.read_text()
    sizes = {"num_ranks": 8, "global_batch_size": 48, "num_microbatches": 4}
    for name, value in sizes.items():
        text = re.sub(rf"{name}: \d+", f"{name}: {value}", text, count=1)
    config.write_text(text)
    dflop("profile", "data", folder=folder)
    dflop("profile", "model", "--estimate", "--hardware", "h100", folder=folder)
    dflop("plan", "--only", LAYOUT, folder=folder)
    rows: list[dict[str, Any]] = []
    for name, flags in (("quiet", []), ("slow rank", ["--slow-rank", "3:1.5"])):
        medians: dict[str, float] = {}
        named: int | None = None
        for mode in ("off", "on"):
            print(f"rehearsal of eight ranks: {name}, correction {mode}", file=sys.stderr, flush=True)
            config.write_text(text.replace("train:\n", f'train:\n  correction: "{mode}"\n', 1))
            # Twenty times slower than an H100: what a machine is late by counts little.
            flags_of_all = ("--steps", num_steps, "--speed", 0.05, "--force")
            dflop("rehearse", *flags_of_all, *flags, folder=folder)
            metrics = lines(folder / "rehearsal" / "metrics.jsonl")[num_steps // 2 :]
            medians[mode] = statistics.median(m["step_ns"] for m in metrics)
            alarms = [e for e in lines(folder / "rehearsal" / "events.jsonl") if e.get("cause") == "rank"]
            named = next((e["step"] + 1 for e in alarms if e["words"].startswith("rank 3 ")), named)
        rows.append({"anomaly": name, "step_ns": medians, "named_after_steps": named})
    quiet, slow = (row["step_ns"] for row in rows)
    lost = slow["off"] - quiet["off"]
    rows[1]["recovered"] = (slow["off"] - slow["on"]) / lost if lost > 0.01 * quiet["off"] else None
    return rows


def main() -> None:
    """Runs both parts and writes them."""
    parser = argparse.ArgumentParser()
    parser.add_argument("out", type=Path)
    parser.add_argument("--example", type=Path, default=Path("target/release/examples/adapt"))
    parser.add_argument("--steps", type=int, default=48)
    parser.add_argument("--without-rehearsal", action="store_true")
    wanted = parser.parse_args()
    said = subprocess.run([str(wanted.example)], check=True, stdout=subprocess.PIPE, text=True).stdout
    simulated = json.loads(said)
    anomalies, slow_ranks, quiet = (simulated[name] for name in ("anomalies", "slow_ranks", "quiet"))

    def known(rows: list[dict[str, Any]], name: str) -> list[float]:
        return [row[name] for row in rows if row[name] is not None]

    def most(numbers: list[float]) -> float | None:
        return max(numbers, default=None)

    def over_noise(error: str, noise: str) -> float:
        return statistics.median(row[error] / row[noise] for row in anomalies + slow_ranks)

    named = [row["named_after_steps"] for row in slow_ranks]
    rows: list[dict[str, Any]] = []
    if not wanted.without_rehearsal:
        with tempfile.TemporaryDirectory() as name:
            rows = rehearsed(Path(name), wanted.steps)
    answer = {
        **origin(),
        "recovered_ratio": statistics.median(known(anomalies, "recovered")),
        "recovered_knowing_ratio": statistics.median(known(anomalies, "recovered_knowing")),
        "recovered_of_waits_ratio": statistics.median(known(anomalies, "recovered_of_waits")),
        "slow_rank_steps": None if None in named else max(named),
        "slow_rank_recovered_ratio": min(known(slow_ranks, "recovered")),
        "monitoring_ratio": most([row["monitoring"] for row in quiet]),
        "false_alarms": sum(row["false_alarms"] for row in quiet),
        "corrected_error_over_noise": over_noise("corrected_error", "noise_error"),
        "corrected_error_over_noise_p95": over_noise("corrected_error_p95", "noise_error_p95"),
        "simulated": simulated,
        "rehearsed": rows,
    }
    wanted.out.parent.mkdir(parents=True, exist_ok=True)
    wanted.out.write_text(json.dumps(answer, indent=1) + "\n")
    print(json.dumps({key: value for key, value in answer.items() if not isinstance(value, list | dict)}))


if __name__ == "__main__":
    try:
        main()
    except KeyboardInterrupt:
        sys.exit("interrupted: nothing was written")
