"""Global batches to measure schedulers on, drawn by seed: lognormal costs, and mixes of real shapes.

A mix joins sizes and lengths of real datasets (`crates/data/demo`). The model's own shape rule turns them
into tokens and segments, and a model profile those into nanoseconds: a measured one, or an estimated one,
which says so.
"""

from __future__ import annotations

import json
import math
import random
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from dflop._native import testing

if TYPE_CHECKING:
    from collections.abc import Callable

FIXTURES = Path(__file__).parents[1] / "fixtures"
TABLES = Path(__file__).parents[1] / "crates" / "data" / "demo" / "tables.json"
TOKENS_A_WORD, TOKENS_A_SAMPLE = 1.3, 20
"""English by the tokenizers of these models, and what a chat template adds."""
KINDS = {"text": 15, "image": 50, "multi_image": 15, "video": 20}
"""Shares of the demo data, in per cent."""
FRAME_MS, CLIP_FRAMES = 6_000, (4, 32)
"""As in the demo data: one frame in six seconds, four to 32 of a clip."""


@dataclass(frozen=True)
class Costs:
    """One global batch."""

    encoder_ns: list[int]
    llm_ns: list[int]
    tokens: list[int]
    """LLM tokens, which is all that most baselines look at."""


@dataclass(frozen=True)
class CostSet:
    """A way to draw global batches."""

    name: str
    what: str
    is_estimated: bool
    """Whether the times come from the analytic model, without a measurement."""
    draw: Callable[[int, int], Costs]
    """From (samples, seed)."""


def lognormal(
    num_samples: int,
    seed: int,
    *,
    sigma: float,
    correlation: float = 0.0,
    text_share: float = 0.0,
    is_even: bool = False,
) -> Costs:
    """Costs that are exp of a normal, about 2 ms; tokens follow the LLM's time, for want of anything else.

    The totals of independent draws differ, which leaves the lesser component slack; `is_even` takes it away.
    """
    draw = random.Random(f"{seed} {num_samples}")
    encoder, llm = [], []
    for _ in range(num_samples):
        first, second = draw.gauss(0, 1), draw.gauss(0, 1)
        second = correlation * first + math.sqrt(1 - correlation**2) * second
        is_text = draw.random() < text_share
        encoder.append(0 if is_text else int(2e6 * math.exp(sigma * first)))
        llm.append(int(2e6 * math.exp(sigma * second)))
    if is_even:
        ratio = sum(llm) / sum(encoder)
        encoder = [int(ns * ratio) for ns in encoder]
    return Costs(encoder, llm, [ns // 1_000 for ns in llm])


class Shape(NamedTuple):
    """What decides the cost of one drawn sample."""

    kind: str
    segments: list[tuple[int, int]]
    feature_tokens: int
    llm_tokens: int
    label_tokens: int


class Shapes:
    """Samples as long as real ones, in the demo's shares of text, images and videos."""

    def __init__(self, settings: Path) -> None:
        """Of the model and processor in `settings`."""
        files = json.loads(settings.read_text())
        self.files = json.dumps(files["config"]), json.dumps(files["preprocessor"]), "{}"
        self.tables = json.loads(TABLES.read_text())

    def draw(self, num_samples: int, seed: int) -> list[Shape]:
        """One global batch."""
        draw = random.Random(f"{seed} {num_samples}")
        shapes = []
        for kind in draw.choices(list(KINDS), list(KINDS.values()), k=num_samples):
            segments, feature_tokens = self.media(draw, kind)
            prompt, answer = self.words(draw, kind)
            length = feature_tokens + TOKENS_A_SAMPLE + int(TOKENS_A_WORD * (prompt + answer))
            labels = max(1, int(TOKENS_A_WORD * answer))
            shapes.append(Shape(kind, segments, feature_tokens, length, labels))
        return shapes

    def media(self, draw: random.Random, kind: str) -> tuple[list[tuple[int, int]], int]:
        """Encoder segments and feature tokens, by the family's shape rule."""
        if kind == "text":
            return [], 0
        if kind == "video":
            (duration_ms,) = self.row(draw, "activitynet_duration_ms")
            fewest, most = CLIP_FRAMES
            frames = min(max(round(duration_ms / FRAME_MS), fewest), most)
            shape = testing.media_shape(
                *self.files, "video", height=360, width=640, num_frames=frames, fps=1.0
            )
            return shape.segments, shape.feature_tokens
        (count,) = self.row(draw, "gaokao_mm_images") if kind == "multi_image" else (1,)
        segments, feature_tokens = [], 0
        for _ in range(count):
            table = "coco_width_height" if draw.random() < 0.7 else "textvqa_width_height"
            width, height = self.row(draw, table)
            shape = testing.media_shape(*self.files, "image", height=height, width=width, num_images=count)
            segments += shape.segments
            feature_tokens += shape.feature_tokens
        return segments, feature_tokens

    def words(self, draw: random.Random, kind: str) -> tuple[int, ...]:
        """Words of the prompt and of the answer."""
        if kind == "video":
            return 12, *self.row(draw, "activitynet_caption_words")
        _, user, assistant = self.row(draw, "llava_mix_turns_user_words_assistant_words")
        return user, assistant

    def row(self, draw: random.Random, table: str) -> tuple[int, ...]:
        """A draw from a table of quantiles, linear between neighbours."""
        rows = [row if isinstance(row, list) else [row] for row in self.tables[table]]
        at = draw.random() * (len(rows) - 1)
        low, part = rows[int(at)], at - int(at)
        high = rows[min(int(at) + 1, len(rows) - 1)]
        return tuple(round(a + part * (b - a)) for a, b in zip(low, high, strict=True))


class Mix:
    """Such samples with the costs that a model profile predicts for each alone."""

    def __init__(self, settings: Path, profile: Path, stage: tuple[int, bool, bool]) -> None:
        """`stage` is the LLM stage whose time counts: its layers, whether it is the first, and the last."""
        self.shapes = Shapes(settings)
        self.model = testing.CostModel.read(str(profile))
        self.stage = stage

    def draw(self, num_samples: int, seed: int) -> Costs:
        """One global batch."""
        shapes = self.shapes.draw(num_samples, seed)
        encoder = [sum(self.model.encoder(shape.segments)[:2]) for shape in shapes]
        stage_of = self.model.llm_stage
        llm = [sum(stage_of([shape.llm_tokens], shape.label_tokens, *self.stage)[:2]) for shape in shapes]
        return Costs(encoder, llm, [shape.llm_tokens for shape in shapes])


def estimate(folder: Path) -> Path:
    """Model profile of LLaVA-OneVision 7B on an H100, by the analytic model."""

    def dflop(*arguments: object) -> None:
        command = [sys.executable, "-m", "dflop", *map(str, arguments)]
        subprocess.run(command, cwd=folder, check=True, capture_output=True)

    profile = folder / "profile.json"
    dflop("demo-data", folder / "demo", "--samples", 8)
    dflop(
        "profile", "model", "-c", folder / "demo" / "dflop.yaml", "--estimate", "--hardware", "h100",
        "--model", "llava-onevision-qwen2-7b", "--dtype", "bfloat16", "-o", profile,
    )  # fmt: skip
    return profile


def cost_sets(folder: Path) -> list[CostSet]:
    """All sets; `folder` takes what has to be made for them."""

    def random_set(name: str, what: str, **settings: Any) -> CostSet:
        return CostSet(name, what, False, lambda n, seed: lognormal(n, seed, **settings))

    shapes = FIXTURES / "shapes"
    # Stages of four of the 28 layers make the LLM's stage and the encoder about equally busy.
    onevision = Mix(shapes / "real.json", estimate(folder), (4, False, False))
    demo = Mix(shapes / "tiny.json", FIXTURES / "profiles" / "demo_cpu.json", (2, False, False))
    return [
        random_set("lognormal-0.5", "sigma 0.5, independent", sigma=0.5),
        random_set("lognormal-0.8-even", "sigma 0.8, independent, equal totals", sigma=0.8, is_even=True),
        random_set(
            "lognormal-0.8-text",
            "sigma 0.8, correlation 0.8, 30 % text",
            sigma=0.8,
            correlation=0.8,
            text_share=0.3,
        ),
        CostSet(
            "onevision-7b-h100",
            "LLaVA-OneVision 7B on H100, mixed data, a stage of 4 of 28 layers; times estimated",
            True,
            onevision.draw,
        ),
        CostSet(
            "demo-cpu", "the demo's model, measured on a CPU; mixed data, 2 of 4 layers", False, demo.draw
        ),
    ]
