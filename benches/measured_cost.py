"""Error of the costs that `measure_cost` finds in a model of a family without a rule, on other samples.

Usage: python benches/measured_cost.py OUT.json [--samples 40] [--device cuda]

Aya Vision at a small size, random weights; samples of 0 to 12 tiles and 20 to 1,500 words, lognormal. Sixteen
of 200 are measured by `measure_cost`; `--samples` of the others run by the same clock, in three rounds. Their
medians are held against what each way to cost a sample says:

    measured    `measure_cost`: nanoseconds
    parameters  `cost_of_parameters`: operations, in the one unit that fits the whole best
    tokens      counts, encoder and LLM weighing the same over the dataset

`error` is the mean relative error of the sum of both components, in the one unit that fits best.
`step_ratio` is what two DDP ranks need that split each eight of these samples by that way, over a perfect
split; in the time that was measured.
"""

from __future__ import annotations

import argparse
import json
import platform
import random
import statistics
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForImageTextToText

import dflop
from dflop.integrations import cost_of_parameters, measure_cost, measured_cost

NUM_ALL, NUM_ROUNDS, GROUP = 200, 3, 8
IMAGE_TOKEN, SIZE, PATCH = 5, 112, 14
VISION = {
    "model_type": "siglip_vision_model", "hidden_size": 192, "intermediate_size": 512, "num_hidden_layers": 4,
    "num_attention_heads": 4, "image_size": SIZE, "patch_size": PATCH,
}  # fmt: skip
TEXT = {
    "model_type": "cohere2", "hidden_size": 256, "intermediate_size": 768, "num_hidden_layers": 4,
    "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 2048,
}  # fmt: skip
ENCODER_TOKENS = (SIZE // PATCH) ** 2
LLM_TOKENS = ENCODER_TOKENS // 4  # the projector joins two by two


def samples() -> list[tuple[int, int]]:
    """(tiles, words) of each sample; a third is text alone."""
    draw = random.Random(0)
    tiles = [
        0 if draw.random() < 1 / 3 else min(12, 1 + int(draw.lognormvariate(0.9, 0.8)))
        for _ in range(NUM_ALL)
    ]
    return [(count, min(1500, 20 + int(draw.lognormvariate(4.6, 1.0)))) for count in tiles]


def batch_of(sample: tuple[int, int]) -> dict[str, torch.Tensor]:
    """The model's inputs of a sample alone."""
    tiles, words = sample
    ids = torch.tensor([[IMAGE_TOKEN] * (tiles * LLM_TOKENS) + [7] * words])
    batch = {"input_ids": ids, "labels": ids, "attention_mask": torch.ones_like(ids)}
    return batch | ({"pixel_values": torch.randn(tiles, 3, SIZE, SIZE)} if tiles else {})


def error_of(predicted: list[float], true: list[float]) -> float:
    """Mean relative error in the unit that fits best."""
    unit = statistics.median(t / p for t, p in zip(true, predicted, strict=True))
    return statistics.fmean(abs(unit * p / t - 1) for t, p in zip(true, predicted, strict=True))


def step_ratio(costs: list[tuple[float, float]], true: list[float]) -> float:
    """Steps of two ranks that split each eight samples by these costs, over perfect ones."""
    steps = perfect = 0.0
    for at in range(0, len(true) - GROUP + 1, GROUP):
        of_group = dflop.costs(costs[at : at + GROUP])
        split = dflop.balance(list(of_group.encoder_ns), list(of_group.llm_ns), 2, meets="step").assignment
        loads = [sum(t for t, r in zip(true[at:], split) if r == rank) for rank in (0, 1)]  # noqa: B905
        steps, perfect = steps + max(loads), perfect + sum(loads) / 2
    return steps / perfect


def main() -> None:
    """Measures, and writes what was found."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("out", type=Path)
    parser.add_argument("--samples", type=int, default=40)
    parser.add_argument("--device", default="cpu")
    options = parser.parse_args()
    torch.manual_seed(0)
    torch.set_num_threads(1)
    device = torch.device(options.device)
    config = AutoConfig.for_model(
        "aya_vision", vision_config=VISION, text_config=TEXT, image_token_id=IMAGE_TOKEN, downsample_factor=2,
        vision_feature_layer=-1, alignment_intermediate_size=512,
    )  # fmt: skip
    model = AutoModelForImageTextToText.from_config(config).to(device)
    every = samples()
    shapes = [(tiles * ENCODER_TOKENS, tiles * LLM_TOKENS + words) for tiles, words in every]
    seen: set[int] = set()

    def of_position(position: int) -> dict[str, torch.Tensor]:
        seen.add(position)
        return batch_of(every[position])

    cost = measure_cost(model, of_position, shapes)
    others = [index for index in range(NUM_ALL) if index not in seen][: options.samples]
    true = held_out(model, [every[index] for index in others], device)
    ways: dict[str, list[tuple[float, float]]] = {
        "measured": [cost(shapes[index]) for index in others],
        "parameters": [cost_of_parameters(model)(shapes[index]) for index in others],
    }
    by_tokens = dflop.costs([{"encoder_tokens": e, "llm_tokens": n} for e, n in shapes])
    ways["tokens"] = [(by_tokens.encoder_ns[index], by_tokens.llm_ns[index]) for index in others]
    found = {
        "machine": platform.processor() or platform.machine(),
        "device": options.device,
        "measured": {"encoder": cost.encoder._asdict(), "llm": cost.llm._asdict()},
        "num_held_out": len(others),
        "ways": {
            name: {"error": error_of(list(map(sum, pairs)), true), "step_ratio": step_ratio(pairs, true)}
            for name, pairs in ways.items()
        },
    }
    options.out.parent.mkdir(parents=True, exist_ok=True)
    options.out.write_text(json.dumps(found, indent=1) + "\n")
    print(json.dumps(found, indent=1))


def held_out(model: Any, chosen: list[tuple[int, int]], device: torch.device) -> list[float]:
    """Median time of each sample over rounds that run all of them."""
    model.train()
    rounds: list[list[float]] = []
    for _ in range(NUM_ROUNDS + 1):
        runs = []
        for sample in chosen:
            batch = {name: tensor.to(device) for name, tensor in batch_of(sample).items()}
            marks = measured_cost.Marks(device)
            marks.mark("start")
            model(**batch).loss.backward()
            marks.mark("end")
            model.zero_grad()
            runs.append(marks.ns("start", "end"))
        rounds.append(runs)
    return [statistics.median(times) for times in zip(*rounds[1:], strict=True)]


if __name__ == "__main__":
    main()
