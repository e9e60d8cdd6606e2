"""Error of the costs that `measure_cost` finds in a model of a family without a rule, on other samples.

Usage: python benches/measured_cost.py OUT.json [--samples 80] [--device cuda]

Aya Vision at a small size, random weights; samples of 0 to 12 tiles and 20 to 1,500 words, lognormal. Sixteen
of 200 are measured by `measure_cost`; `--samples` of the others run by the same clock, in three rounds. Their
medians are held against what each way to cost a sample says:

    measured    `measure_cost`: nanoseconds
    parameters  `cost_of_parameters`: operations, in the one unit that fits best
    tokens      counts, encoder and LLM weighing the same over the dataset, in the one unit that fits best

`error` is the mean relative error of the time of a sample alone (with launches, where they are known).
`step_ratio` is of two DDP ranks that split each eight of these samples by that way, or four and four as they
come (`arrival`): both microbatches run, padded and with `remove_padding`, and the slower one is divided by
the mean of the two.
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
from dflop.integrations import cost_of_parameters, measure_cost, measured_cost, remove_padding

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


def batch_of(*chosen: tuple[int, int]) -> dict[str, torch.Tensor]:
    """The model's inputs of these samples, rows padded to the longest."""
    lengths = [tiles * LLM_TOKENS + words for tiles, words in chosen]
    most = max(lengths)
    ids, labels, mask = [], [], []
    for (tiles, words), length in zip(chosen, lengths, strict=True):
        row = [IMAGE_TOKEN] * (tiles * LLM_TOKENS) + [7] * words
        ids.append(row + [0] * (most - length))
        labels.append(row + [-100] * (most - length))
        mask.append([1] * length + [0] * (most - length))
    batch = {
        "input_ids": torch.tensor(ids),
        "labels": torch.tensor(labels),
        "attention_mask": torch.tensor(mask),
    }
    tiles = sum(tiles for tiles, _ in chosen)
    return batch | ({"pixel_values": torch.randn(tiles, 3, SIZE, SIZE)} if tiles else {})


def error_of(predicted: list[float], true: list[float], *, has_unit: bool) -> float:
    """Mean relative error; without a unit, in the one that fits best."""
    unit = 1.0 if has_unit else statistics.median(t / p for t, p in zip(true, predicted, strict=True))
    return statistics.fmean(abs(unit * p / t - 1) for t, p in zip(true, predicted, strict=True))


def splits(costs: list[tuple[float, float]] | None, num_samples: int) -> list[tuple[tuple[int, ...], ...]]:
    """The samples of both ranks, of each group."""
    found = []
    for at in range(0, num_samples - GROUP + 1, GROUP):
        ranks = [rank * 2 // GROUP for rank in range(GROUP)]
        if costs is not None:
            of_group = dflop.costs(costs[at : at + GROUP])
            ranks = dflop.balance(
                list(of_group.encoder_ns), list(of_group.llm_ns), 2, meets="step"
            ).assignment
        both = [tuple(at + i for i in range(GROUP) if ranks[i] == rank) for rank in (0, 1)]
        found.append(tuple(both))
    return found


def main() -> None:
    """Measures, and writes what was found."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("out", type=Path)
    parser.add_argument("--samples", type=int, default=80)
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
    chosen = [every[index] for index in others]
    true = medians(model, [(sample,) for sample in chosen], device)
    by_tokens = dflop.costs([{"encoder_tokens": e, "llm_tokens": n} for e, n in shapes])
    ways: dict[str, list[tuple[float, float]]] = {
        "measured": [cost(shapes[index]) for index in others],
        "parameters": [cost_of_parameters(model)(shapes[index]) for index in others],
        "tokens": [(by_tokens.encoder_ns[index], by_tokens.llm_ns[index]) for index in others],
    }
    launches = [cost.llm.start_ns + (cost.encoder.start_ns if tiles else 0) for tiles, _ in chosen]
    errors = {name: error_of(list(map(sum, pairs)), true, has_unit=False) for name, pairs in ways.items()}
    with_launches = [sum(pair) + launch for pair, launch in zip(ways["measured"], launches, strict=True)]
    errors["measured"] = error_of(with_launches, true, has_unit=True)

    remove_padding(model)
    split = {
        name: splits(ways.get(name), len(chosen)) for name in ("arrival", "tokens", "parameters", "measured")
    }
    buckets = sorted({bucket for groups in split.values() for group in groups for bucket in group if bucket})
    times = dict(
        zip(buckets, medians(model, [tuple(chosen[i] for i in b) for b in buckets], device), strict=True)
    )
    ratios = {}
    for name, groups in split.items():
        loads = [[times.get(bucket, 0.0) for bucket in group] for group in groups]
        ratios[name] = sum(map(max, loads)) / sum(sum(both) / 2 for both in loads)
    found = {
        "machine": platform.processor() or platform.machine(),
        "device": options.device,
        "measured": {"encoder": cost.encoder._asdict(), "llm": cost.llm._asdict()},
        "num_held_out": len(others),
        "errors": errors,
        "step_ratios": ratios,
    }
    options.out.parent.mkdir(parents=True, exist_ok=True)
    options.out.write_text(json.dumps(found, indent=1) + "\n")
    print(json.dumps(found, indent=1))


def medians(model: Any, batches: list[tuple[tuple[int, int], ...]], device: torch.device) -> list[float]:
    """Median time of forward and backward of each batch, over rounds that run all of them."""
    model.train()
    rounds: list[list[float]] = []
    for _ in range(NUM_ROUNDS + 1):
        runs = []
        for samples_of_batch in batches:
            batch = {name: tensor.to(device) for name, tensor in batch_of(*samples_of_batch).items()}
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
