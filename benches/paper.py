"""The paper's models on 8 to 1,024 A100, simulated: speed-up over what people run today, and idle time.

Usage: python benches/paper.py OUT.json [--ranks 8,64,256] [--models NAME,...] [--samples 2048]
[--dflop EXECUTABLE]

Each row is one `dflop plan --compare --explain 1 --json` on the demo data (images, several images, videos and
texts by the percentiles of real datasets), a model of the catalogue, and A100 of 80 GB in nodes of eight:
estimated and simulated, nothing is measured. The paper (arXiv 2603.25120) reports 1.2 to 3.6 times over the
ways that it compares with, measured on A100; a row that is less stands as it is. Only rows whose plan fits
have ratios, and a way that does not fit has none.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

MODELS = [
    "llava-onevision-qwen2.5-7b",
    "llava-onevision-qwen2.5-32b",
    "llava-onevision-qwen2.5-72b",
    "llava-onevision-llama-3-8b",
    "llava-onevision-llama-3-70b",
    "qwen2-audio-7b",
]
# InternVL 2.5 72B of the paper is not in the list: no processor of its native family is known by name.


def numbers(text: str) -> list[int]:
    """The numbers of a comma-separated list."""
    return [int(part) for part in text.split(",") if part]


def run(command: list[str], directory: Path) -> subprocess.CompletedProcess[str]:
    """A command and what it says."""
    return subprocess.run(
        command,
        cwd=directory,
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, "COLUMNS": "100"},
    )


def row(dflop: str, data: Path, model: str, ranks: int) -> dict[str, Any]:
    """One model on so many ranks: its plan, what people run today, and where time goes."""
    with tempfile.TemporaryDirectory() as name:
        directory = Path(name)
        (directory / "dflop.yaml").write_text(
            f"model: {{name: {model}}}\ndata: {{mixture: {data}, video_max_frames: 16, on_bad_sample: skip, "
            "bad_samples_max_percent: 100}\n"
            f"cluster: {{device: a100-80gb, num_ranks: {ranks}}}\ntrain: {{global_batch_size: {4 * ranks}}}\n"
        )
        ran = run([dflop, "plan", "--compare", "--explain", "1", "--json"], directory)
    head = {"model": model, "num_ranks": ranks, "is_simulated": True}
    if ran.returncode != 0:
        return {**head, "fits": False, "said": (ran.stdout + ran.stderr).strip().splitlines()[-12:]}
    answer = json.loads(ran.stdout)
    best = answer["plans"][0]
    others = {
        name: way for name, way in answer["baselines"].items() if way["is_of_others"] and way["step_ms"]
    }
    over = {name: way["step_ms"] / best["step_ms"] for name, way in others.items()}
    without = {one["way"]: one["step_ns"] for one in answer["explained"]["without"]}
    blind, full = without.get("blind"), answer["explained"]["step_ns"]
    return {
        **head,
        "fits": True,
        "layout": best["layout"],
        "recompute": best["recompute"],
        "step_ms": best["step_ms"],
        "work_bound_ms": best["work_bound_ms"],
        "over_work_bound": best["step_ms"] / best["work_bound_ms"],
        "mfu": best["mfu"],
        "idle_ratio": best["bubble_ratio"],
        "speed_up": over,
        "speed_up_over_best": min(over.values()) if over else None,
        "schedule_alone": blind / full if blind else None,
        "seconds": answer["seconds"],
    }


def main() -> None:
    """Runs all rows and writes them; a line for each to stderr."""
    parser = argparse.ArgumentParser()
    parser.add_argument("out", type=Path)
    parser.add_argument("--ranks", type=numbers, default=[8, 64, 256, 1024])
    parser.add_argument("--models", type=lambda text: text.split(","), default=MODELS)
    parser.add_argument("--samples", type=int, default=2_048)
    parser.add_argument("--dflop", default="dflop")
    wanted = parser.parse_args()
    rows: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as name:
        made = run([wanted.dflop, "demo-data", "demo", "--samples", str(wanted.samples)], Path(name))
        if made.returncode != 0:
            sys.exit(made.stderr)
        data = Path(name) / "demo/data/mixture.yaml"
        for model in wanted.models:
            for ranks in wanted.ranks:
                one = row(wanted.dflop, data, model, ranks)
                rows.append(one)
                best = one.get("speed_up_over_best")
                says = (
                    f"x{best:.2f} over the best of others"
                    if best
                    else "does not fit"
                    if not one["fits"]
                    else "alone"
                )
                print(f"{model} on {ranks}: {says}", file=sys.stderr)
    wanted.out.parent.mkdir(parents=True, exist_ok=True)
    wanted.out.write_text(
        json.dumps({"is_simulated": True, "device": "a100-80gb", "rows": rows}, indent=1) + "\n"
    )


if __name__ == "__main__":
    main()
