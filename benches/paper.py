"""The paper's models on 8 to 1,024 A100, simulated: speed-up over what people run today, and idle time.

Usage: python benches/paper.py OUT.json [--ranks 8,64,256,1024] [--models NAME,...] [--samples 16384]
[--dflop EXECUTABLE]

Each row is one `dflop plan --compare --explain 1 --json` of a model of the catalogue on A100 of 80 GB in
nodes of eight, with data as mixed as the paper's (`paper_mix.py`): estimated and simulated, nothing is
measured. A step has 512 samples, or four a rank where that is more. Rows that are in OUT.json already are
not made again. The table goes to stdout.

The ablation begins at the fastest way in arrival order, `megatron` or `fsdp`, each with its best search:

    layout alone    our layout in arrival order             over it
    schedule alone  the same way, its samples balanced      over it    (`megatron-balanced`, `fsdp-dflop`)
    both            the plan                                over it
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from paper_mix import FRAMES_MAX, Mix

MODELS = {
    "llava-onevision-qwen2.5-7b": "LLaVA-OneVision, Qwen2.5 7B",
    "llava-onevision-llama-3-8b": "LLaVA-OneVision, Llama-3 8B",
    "llava-onevision-qwen2.5-32b": "LLaVA-OneVision, Qwen2.5 32B",
    "llava-onevision-llama-3-70b": "LLaVA-OneVision, Llama-3 70B",
    "llava-onevision-qwen2.5-72b": "LLaVA-OneVision, Qwen2.5 72B",
    "internvl3-78b-hf": "InternVL, Qwen2.5 72B",
    "qwen2-audio-7b": "Qwen2-Audio 7B",
}
"""InternVL3 78B has the encoder and the backbone of InternVL 2.5 78B, which transformers does not read."""
BALANCED = {"megatron": "megatron-balanced", "fsdp": "fsdp-dflop"}
"""Ways in arrival order, and the same with balanced samples."""
COLUMNS = ["fsdp", "fsdp-tokens", "megatron", "megatron-balanced", "paper"]
BATCH_MIN, SAMPLES_A_RANK = 512, 4


def numbers(text: str) -> list[int]:
    """The numbers of a comma-separated list."""
    return [int(part) for part in text.split(",") if part]


def plan(dflop: str, directory: Path, model: str, mixture: Path, ranks: int) -> dict[str, Any]:
    """What `dflop plan --json` says, or with `said` why there is no plan. Profiles stay in the directory."""
    batch = max(BATCH_MIN, SAMPLES_A_RANK * ranks)
    (directory / "dflop.yaml").write_text(
        f"model: {{name: {model}}}\ndata: {{mixture: {mixture}, video_max_frames: {FRAMES_MAX}}}\n"
        f"cluster: {{device: a100-80gb, num_ranks: {ranks}}}\ntrain: {{global_batch_size: {batch}}}\n"
    )
    ran = subprocess.run(
        [dflop, "plan", "--compare", "--explain", "1", "--json", "--sampled-batches", "2"],
        cwd=directory,
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, "COLUMNS": "100"},
    )
    if ran.returncode > 1:
        sys.exit(f"{model} on {ranks}: {ran.stderr}")
    if ran.returncode == 1:
        return {"plans": [], "said": (ran.stdout + ran.stderr).strip().splitlines()[-12:]}
    return json.loads(ran.stdout)


def row(model: str, ranks: int, answer: dict[str, Any]) -> dict[str, Any]:
    """The row of one model on so many ranks: its plan, what people run today, and where time goes."""
    head = {"model": model, "num_ranks": ranks, "is_simulated": True, "fits": bool(answer["plans"])}
    if not answer["plans"]:
        return {**head, "said": answer["said"]}
    best, detail = answer["plans"][0], answer["explained"]
    ways = {name: way for name, way in answer["baselines"].items() if way["step_ms"]}
    over = {name: way["step_ms"] / best["step_ms"] for name, way in ways.items()}
    others = {name: over[name] for name, way in ways.items() if way["is_of_others"]}
    idle_ms = best["bubble_ratio"] * best["step_ms"]
    first = min((name for name in BALANCED if name in ways), key=over.__getitem__, default=None)
    blind_ns = next(one["step_ns"] for one in detail["without"] if one["way"] == "blind")
    ablation = None
    if first is not None:
        begin = over[first]
        ablation = {
            "from": first,
            "layout": begin * detail["step_ns"] / blind_ns if blind_ns else None,
            "schedule": begin / over[BALANCED[first]],
            "both": begin,
        }
    return {
        **head,
        "layout": best["layout"],
        "recompute": best["recompute"],
        "num_microbatches": best["num_microbatches"],
        "step_ms": best["step_ms"],
        "work_bound_ms": best["work_bound_ms"],
        "over_work_bound": best["step_ms"] / best["work_bound_ms"],
        "mfu": best["mfu"],
        "idle_ratio": best["bubble_ratio"],
        "time_ms": {name: ns / 1e6 for name, ns in detail["time_ns"].items()},
        "speed_up": over,
        "speed_up_over_best": min(others.values(), default=None),
        "best_of_others": min(others, key=others.__getitem__, default=None),
        "idle_saved": {
            name: 1 - idle_ms / (way["bubble_ratio"] * way["step_ms"])
            for name, way in ways.items()
            if way["is_of_others"] and way["bubble_ratio"]
        },
        "ablation": ablation,
        "baselines": answer["baselines"],
        "seconds": answer["seconds"],
    }


def words(layout: dict[str, Any]) -> str:
    """A layout in a cell of the table."""
    encoder, llm = (
        [
            f"{short} {layout[part][f'{name}_parallel_degree']}"
            for short, name in (("tp", "tensor"), ("pp", "pipeline"), ("dp", "data"))
        ]
        for part in ("encoder", "llm")
    )
    if layout.get("placement") == "colocated":
        return f"colocated {llm[0]} {llm[2]}"
    return f"encoder {' '.join(encoder)}, llm {' '.join(llm)}"


def table(rows: list[dict[str, Any]]) -> str:
    """The rows for people, in Markdown."""

    def ratio(value: float | None) -> str:
        return f"{value:.2f}" if value else "-"

    heads = ["model", "A100", "plan", "step", "of the bound", "idle", *COLUMNS]
    heads += ["layout alone", "schedule alone", "both"]
    lines = ["| " + " | ".join(heads) + " |", "|---" * len(heads) + "|"]
    for one in rows:
        cells = [MODELS.get(one["model"], one["model"]), f"{one['num_ranks']:,}"]
        if not one["fits"]:
            lines.append("| " + " | ".join([*cells, "nothing fits", *["-"] * (len(heads) - 3)]) + " |")
            continue
        cells += [words(one["layout"]), f"{one['step_ms'] / 1e3:.2f} s", ratio(one["over_work_bound"])]
        cells.append(f"{100 * one['idle_ratio']:.1f} %")
        cells += [ratio(one["speed_up"].get(name)) for name in COLUMNS]
        parts = one["ablation"] or {}
        cells += [ratio(parts.get(name)) for name in ("layout", "schedule", "both")]
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


def main() -> None:
    """Makes the rows that are missing, writes all of them after each, and prints the table."""
    parser = argparse.ArgumentParser()
    parser.add_argument("out", type=Path)
    parser.add_argument("--ranks", type=numbers, default=[8, 64, 256, 1024])
    parser.add_argument("--models", type=lambda text: text.split(","), default=list(MODELS))
    parser.add_argument("--samples", type=int, default=16_384)
    parser.add_argument("--dflop", default="dflop")
    wanted = parser.parse_args()
    # It runs in directories of its own: a path from here would lead nowhere.
    dflop = str(Path(shutil.which(wanted.dflop) or wanted.dflop).absolute())
    wanted.out.parent.mkdir(parents=True, exist_ok=True)
    rows: list[dict[str, Any]] = json.loads(wanted.out.read_text())["rows"] if wanted.out.exists() else []
    made = {(one["model"], one["num_ranks"]) for one in rows}
    with tempfile.TemporaryDirectory() as name:
        mixtures: dict[bool, Path] = {}
        for model in wanted.models:
            audio = "audio" in model
            if audio not in mixtures:
                data = Path(name) / ("sounds" if audio else "pictures")
                mixtures[audio] = Mix(data, wanted.samples, seed=0).write(audio=audio)
            directory = Path(name) / model
            directory.mkdir()
            for ranks in (ranks for ranks in wanted.ranks if (model, ranks) not in made):
                answer = plan(dflop, directory, model, mixtures[audio], ranks)
                rows.append(row(model, ranks, answer))
                rows.sort(key=lambda one: (list(MODELS).index(one["model"]), one["num_ranks"]))
                text = {"is_simulated": True, "device": "a100-80gb", "samples": wanted.samples, "rows": rows}
                wanted.out.write_text(json.dumps(text, indent=1) + "\n")
                print(f"{model} on {ranks}: {answer.get('seconds', 0):.0f} s", file=sys.stderr)
    print(table(rows))


if __name__ == "__main__":
    main()
