"""500 steps in float32, in bfloat16, and by `transformers.Trainer` on the same global batches: loss curves.

Usage: python benches/curves.py OUT.json FIGURE.svg [--steps 500]

A tiny LLaVA-OneVision on demo data, from the same weights, on two CPU ranks. `dflop train` draws and
schedules the global batches, in float32 and then in bfloat16 (over float32 weights, moments and sums); the
Trainer trains the samples that `schedules.jsonl` names, step by step, in float32 with DDP. What is compared
is the loss of each step, over the label tokens of its global batch: the largest and the mean distance to the
float32 run, and that of means over 20 steps, which a person sees in the figure.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import tempfile
import time
from pathlib import Path

import hugging
from collect import origin
from small import dflop, lines, prepare

SETTINGS = {"learning_rate": 1e-3, "weight_decay": 0.01, "max_grad_norm": 1.0}
BATCH, MICROBATCHES, FRAMES = 8, 2, 4
WINDOW = 20
"""Steps of a mean in the figure."""
COLORS = {"float32": "#1a1a1a", "bfloat16": "#c2410c", "transformers.Trainer": "#2563eb"}


def means(losses: list[float]) -> list[float]:
    """Means over `WINDOW` steps, each ending in its own."""
    return [statistics.fmean(losses[max(0, i + 1 - WINDOW) : i + 1]) for i in range(len(losses))]


def differences(losses: list[float], of: list[float]) -> dict[str, float]:
    """How far a curve is from another, relative to its values."""
    gaps = [abs(a - b) / b for a, b in zip(losses, of, strict=True)]
    smooth = [abs(a - b) / b for a, b in zip(means(losses), means(of), strict=True)]
    return {"mean": statistics.fmean(gaps), "max": max(gaps), "max_of_means": max(smooth)}


def figure(curves: dict[str, list[float]]) -> str:
    """An SVG of means over some steps, a line a curve."""
    width, height, left, bottom, top = 720, 360, 56, 40, 16
    smooth = {name: means(losses) for name, losses in curves.items()}
    num_steps = max(map(len, smooth.values()))
    low = min(min(values) for values in smooth.values())
    high = max(max(values) for values in smooth.values())

    def at(step: int, loss: float) -> str:
        x = left + (width - left - 16) * step / max(1, num_steps - 1)
        y = top + (height - top - bottom) * (high - loss) / max(1e-9, high - low)
        return f"{x:.1f},{y:.1f}"

    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}"',
        ' font-family="sans-serif" font-size="12">',
        f'<rect width="{width}" height="{height}" fill="white"/>',
    ]
    for part in range(5):
        loss = low + (high - low) * part / 4
        y = at(0, loss).split(",")[1]
        parts.append(f'<line x1="{left}" x2="{width - 16}" y1="{y}" y2="{y}" stroke="#ddd"/>')
        parts.append(f'<text x="{left - 6}" y="{y}" text-anchor="end" dy="4">{loss:.2f}</text>')
        step = (num_steps - 1) * part // 4
        x = at(step, low).split(",")[0]
        parts.append(f'<text x="{x}" y="{height - bottom + 18}" text-anchor="middle">{step}</text>')
    # The widest first, so that what lies below shows at both sides.
    for row, (name, values) in enumerate(smooth.items()):
        points = " ".join(at(step, loss) for step, loss in enumerate(values))
        color, thick = COLORS[name], 4.5 - 1.5 * row
        parts.append(
            f'<polyline points="{points}" fill="none" stroke="{color}" stroke-width="{thick}" opacity="0.8"/>'
        )
        y = top + 14 + 18 * row
        ends = f'x1="{width - 210}" x2="{width - 186}" y1="{y}" y2="{y}"'
        parts.append(f'<line {ends} stroke="{color}" stroke-width="3"/>')
        parts.append(f'<text x="{width - 178}" y="{y}" dy="4">{name}</text>')
    label = f"loss by step, means over {WINDOW} steps"
    parts.append(f'<text x="{left}" y="{height - 6}">{label}</text></svg>')
    return "\n".join(parts) + "\n"


def main() -> int:
    """Trains, writes and prints.

    Returns:
        The exit status.
    """
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("figure", type=Path)
    parser.add_argument("--steps", type=int, default=500)
    parser.add_argument("--samples", type=int, default=200)
    asked = parser.parse_args()
    os.environ["OMP_NUM_THREADS"] = "1"
    curves: dict[str, list[float]] = {}
    seconds: dict[str, float] = {}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        fields = {"global_batch_size": BATCH, "num_microbatches": MICROBATCHES, "video_max_frames": FRAMES}
        rates = {key: SETTINGS[key] for key in ("learning_rate", "weight_decay", "max_grad_norm")}
        prepare(folder, asked.samples, {**fields, **rates}, only=["colocated=false"], weights_seed=7)
        steps = ("--steps", asked.steps, "--other-device", "--oversubscribe", "--force")
        for dtype in ("float32", "bfloat16"):
            start = time.monotonic()
            if dtype == "bfloat16":
                config = folder / "dflop.yaml"
                config.write_text(config.read_text().replace("dtype: float32", "dtype: bfloat16"))
                flags = ("--budget-seconds", 10, "--recompute", "none", "--fresh")
                dflop("profile", "model", *flags, folder=folder)
                dflop("plan", "--only", "colocated=false", folder=folder)
            dflop("train", *steps, "--out", dtype, folder=folder)
            curves[dtype] = [row["loss"] for row in lines(folder / dtype / "metrics.jsonl")]
            seconds[dtype] = time.monotonic() - start
        turns, others = (
            [turn["samples"] for turn in lines(folder / dtype / "schedules.jsonl")]
            for dtype in ("float32", "bfloat16")
        )
        assert turns == others, "seed and data decide the global batches"
        tokens = tokens_of(folder)
        kinds = hugging.kinds_of(folder)
        parts = [hugging.packed_by_tokens(batch, tokens, hugging.NUM_RANKS, kinds) for batch in turns]
        start = time.monotonic()
        print(f"{asked.steps} steps of transformers.Trainer", file=sys.stderr, flush=True)
        trained = hugging.run(folder, "ddp", parts, range(1, len(parts)), SETTINGS)
        curves["transformers.Trainer"] = trained["losses"]
        seconds["transformers.Trainer"] = time.monotonic() - start
    found = {name: differences(curves[name], curves["float32"]) for name in list(curves)[1:]}
    result = {
        "bench": "curves", **origin(), "steps": asked.steps, "settings": SETTINGS, "seconds": seconds,
        "first_loss": curves["float32"][0], "last_loss_mean": means(curves["float32"])[-1],
        "relative_difference_to_float32": found, "losses": curves,
    }  # fmt: skip
    for path, text in ((asked.out, json.dumps(result, indent=1) + "\n"), (asked.figure, figure(curves))):
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    print(
        f"loss {result['first_loss']:.4f} -> {result['last_loss_mean']:.4f} in {asked.steps} steps (float32)"
    )
    for name, gap in found.items():
        print(
            f"{name:<22} against float32: mean {gap['mean']:.2e}, most {gap['max']:.2e} of a step's loss; "
            f"means over {WINDOW} steps {gap['max_of_means']:.2e}"
        )
    print(f"wrote {asked.out}, {asked.figure}", file=sys.stderr)
    return 0


def tokens_of(folder: Path) -> list[int]:
    """LLM tokens of each sample."""
    from dflop._native import profile_shapes

    shapes, _ = profile_shapes(str(folder / "data_profile.parquet"))
    return [llm_tokens for *_, llm_tokens in shapes]


if __name__ == "__main__":
    sys.exit(main())
