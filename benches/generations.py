"""Steps of TRL's `GRPOTrainer` on two CPU ranks, by who divides what was generated: seconds and ratios.

Usage: python benches/generations.py OUT.json [--rounds 6] [--prompts 24]

A small LLaVA answers prompts with one to eight pictures. Answers are drawn, of lognormal lengths, so that
every arm trains the same samples and generation takes no time. What is timed are the training steps:
microbatches computed, gradients summed, without the processor's work and the rewards.

    trl            TRL alone: microbatches of equal counts, padded to the longest answer of the generation
    tokens         divided by tokens alone over microbatches and ranks, each padded to its own longest rows
    line           `balance(trainer)`: by counted cost, told of padding
    *-unpadded     with `remove_padding`: the LLM's layers compute real tokens alone

The first is what TRL does, the second what others do for text (verl, which computes no padding either).
Ratios are over the fastest of both, which may have our `remove_padding`, with their 95 % interval.

`simulated` is of 64 ranks without padding, by costs alone: the time of steps over their work bound.
"""

from __future__ import annotations

import argparse
import json
import logging
import math
import os
import random
import statistics
import sys
import tempfile
import time
import warnings
import zlib
from pathlib import Path
from typing import Any

from forked import run_forked
from ratio import ratio_of

# What writes model directories for the tests.
sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "unit"))
from processor_dirs import write

NUM_RANKS, BATCH_SIZE, ACCUMULATION, GROUP, SEED = 2, 4, 4, 4, 11
LONGEST = 320
OTHERS, OURS = ("trl", "trl-unpadded", "tokens", "tokens-unpadded"), ("line", "line-unpadded")
TILE = 112


def draw_prompt(draw: random.Random) -> tuple[int, int]:
    """Pictures and letters of a prompt."""
    return min(8, 1 + int(draw.lognormvariate(0.3, 0.9))), 16 + int(draw.lognormvariate(3.5, 0.7))


def draw_length(draw: random.Random) -> int:
    """Tokens of an answer."""
    return min(LONGEST, 8 + int(draw.lognormvariate(3.6, 1.0)))


def make_rows(count: int) -> Any:
    """Prompts of chats with their pictures."""
    import datasets
    from PIL import Image

    draw = random.Random(SEED)
    rows = []
    for _ in range(count):
        num_pictures, num_letters = draw_prompt(draw)
        text = "".join(chr(97 + draw.randrange(26)) for _ in range(num_letters))
        pictures = [
            Image.new("RGB", (TILE, TILE), tuple(draw.randrange(256) for _ in range(3)))
            for _ in range(num_pictures)
        ]
        rows.append({"prompt": [{"role": "user", "content": text}], "images": pictures})
    return datasets.Dataset.from_list(rows)


def answer(ids: list[int], place: int) -> list[int]:
    """Tokens of an answer, a function of prompt and place in the group."""
    draw = random.Random(zlib.crc32(bytes(str((ids, place)), "ascii")))
    return [draw.randrange(1, 200) for _ in range(draw_length(draw))]


def make_model(folder: Path) -> tuple[Any, Any]:
    """Model and processor; encoder and LLM have as many layers of the same width."""
    from transformers import AutoConfig, AutoModelForImageTextToText

    part = {
        "hidden_size": 128,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "intermediate_size": 512,
    }
    vision = {
        **part,
        "model_type": "clip_vision_model",
        "image_size": TILE,
        "patch_size": 14,
        "projection_dim": 8,
    }
    text = {**part, "model_type": "llama", "num_key_value_heads": 4, "max_position_embeddings": 4096}
    processor = write(
        folder,
        "llava",
        {"vision_config": vision, "text_config": {**text, "use_cache": False}, "tie_word_embeddings": False},
        tokens=["<image>"],
        marks={"image": "<image>"},
        ids={"image_token_index": "<image>"},
        parts={
            "image_processor": {"size": {"shortest_edge": TILE}, "crop_size": {"height": TILE, "width": TILE}}
        },
        patch_size=14,
        vision_feature_select_strategy="default",
        num_additional_image_tokens=1,
    )
    import torch

    torch.manual_seed(0)
    return AutoModelForImageTextToText.from_config(AutoConfig.from_pretrained(folder)).train(), processor


def run_arm(arm: str, rows: Any, folder: Path) -> dict[str, Any]:
    """Trains one epoch on this rank: seconds of its training steps, and a sum over parameters."""
    import torch
    from transformers import PrinterCallback
    from trl.trainer.grpo_config import GRPOConfig
    from trl.trainer.grpo_trainer import GRPOTrainer

    from dflop.integrations import remove_padding
    from dflop.integrations.transformers import balance

    model, processor = make_model(folder / f"model{os.getpid()}")
    arguments = GRPOConfig(
        output_dir=str(folder),
        per_device_train_batch_size=BATCH_SIZE,
        gradient_accumulation_steps=ACCUMULATION,
        num_generations=GROUP,
        max_completion_length=LONGEST,
        num_train_epochs=1,
        learning_rate=1e-3,
        optim="sgd",
        max_grad_norm=0.0,
        report_to=[],
        save_strategy="no",
        disable_tqdm=True,
        use_cpu=True,
        ddp_backend="gloo",
        bf16=False,
        gradient_checkpointing=False,
        dataloader_pin_memory=False,
        log_multimodal=False,
        log_level="error",
        seed=SEED,
    )
    trainer: Any = GRPOTrainer(
        model,
        lambda completion_ids, **_: [float(sum(ids) % 17) for ids in completion_ids],
        args=arguments,
        train_dataset=rows,
        processing_class=processor,
    )
    trainer.remove_callback(PrinterCallback)
    trainer._generate_single_turn = lambda ids, *_, **__: (
        [answer(one, place % GROUP) for place, one in enumerate(ids)],
        None,
    )
    unpadded = remove_padding(model) if arm.endswith("-unpadded") else None
    if not arm.startswith("trl"):
        balance(trainer)
    if arm.startswith("tokens"):
        spread = trainer._prepare_inputs.spread
        spread.is_padded, spread.trained = False, lambda size: (0.0, float(size[1]))
    theirs, step_of_theirs = trainer._generate_and_score_completions, trainer.training_step
    outside = inside = 0.0

    def generate(*given: Any) -> Any:
        nonlocal outside
        start = time.perf_counter()
        found = theirs(*given)
        # What ranks wait for each other here belongs to no arm.
        torch.distributed.barrier()
        outside += time.perf_counter() - start
        return found

    def training_step(*given: Any, **named: Any) -> Any:
        nonlocal inside
        start = time.perf_counter()
        found = step_of_theirs(*given, **named)
        inside += time.perf_counter() - start
        return found

    trainer._generate_and_score_completions, trainer.training_step = generate, training_step
    trainer.train()
    start = time.perf_counter()
    torch.distributed.barrier()
    seconds = inside + time.perf_counter() - start - outside
    total = sum(float(weight.detach().double().abs().sum()) for weight in model.parameters())
    found = {"seconds": seconds, "parameters": total}
    return found if unpadded is None else {**found, "padding_ratio": unpadded.padding_ratio}


def work(rank: int, asked: argparse.Namespace, out: Path) -> None:
    """All rounds on one rank; rank 0 writes what it measured."""
    rows = make_rows(asked.prompts)
    found = []
    begin = time.perf_counter()
    for index in range(-1, asked.rounds):
        arms = [*OTHERS, *OURS]
        random.Random(SEED + index).shuffle(arms)
        for arm in arms:
            measured = run_arm(arm, rows, out.parent)
            if index >= 0 and rank == 0:
                found.append({"round": index, "arm": arm, **measured})
        if rank == 0:
            passed, done = time.perf_counter() - begin, index + 2
            left = passed / done * (asked.rounds + 1 - done)
            print(f"round {done} of {asked.rounds + 1}, {passed:.0f} s, {left:.0f} s left", file=sys.stderr)
    if rank == 0:
        out.write_text(json.dumps(found))


def simulated(folder: Path, num_ranks: int = 64, num_steps: int = 8) -> dict[str, float]:
    """Time of steps over their work bound, by who divides the samples."""
    from dflop import balance as divide
    from dflop.integrations import cost_of_parameters

    cost = cost_of_parameters(make_model(folder / "simulated")[0])
    draw = random.Random(SEED)
    found: dict[str, float] = dict.fromkeys(("trl", "tokens", "line"), 0.0)
    for _ in range(num_steps):
        loads, tokens = [], []
        for _ in range(num_ranks * BATCH_SIZE * ACCUMULATION // GROUP):
            num_pictures, num_letters = draw_prompt(draw)
            features = num_pictures * (TILE // 14) ** 2
            for _ in range(GROUP):
                tokens.append(features + num_letters + draw_length(draw))
                loads.append(round(sum(cost((features, tokens[-1])))))
        share = len(loads) // num_ranks
        ways = {
            "trl": [position // share for position in range(len(loads))],
            "tokens": divide([0] * len(loads), tokens, num_ranks).assignment,
            "line": divide([0] * len(loads), loads, num_ranks).assignment,
        }
        for way, ranks in ways.items():
            of_ranks = [0] * num_ranks
            for load, rank in zip(loads, ranks, strict=True):
                of_ranks[rank] += load
            found[way] += max(of_ranks) * num_ranks / sum(loads) / num_steps
    return found


def summarise(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """Ratios of the fastest other arm to each."""
    seconds = {arm: [row["seconds"] for row in rows if row["arm"] == arm] for arm in (*OTHERS, *OURS)}
    best = min(OTHERS, key=lambda arm: statistics.fmean(map(math.log, seconds[arm])))
    arms = []
    for arm, measured in seconds.items():
        ratio, low, high = ratio_of(seconds[best], measured)
        arms.append(
            {
                "arm": arm,
                "seconds": statistics.geometric_mean(measured),
                "best_over_it": ratio,
                "low": low,
                "high": high,
                "rounds": measured,
            }
        )
    sums = [row["parameters"] for row in rows]
    padding = {row["arm"]: row["padding_ratio"] for row in rows if "padding_ratio" in row}
    return {
        "best_other": best,
        "arms": arms,
        "parameters_difference_max": (max(sums) - min(sums)) / min(sums),
        "padding_ratios": padding,
    }


def main() -> None:
    """Measures, prints the table and writes it."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("out", type=Path, help="where the numbers go, as JSON")
    parser.add_argument("--rounds", type=int, default=6, help="times that each arm runs (default: 6)")
    parser.add_argument("--prompts", type=int, default=24, help="prompts of an epoch (default: 24)")
    asked = parser.parse_args()
    import trl.trainer.grpo_trainer  # noqa: F401

    # TRL and transformers say for each arm how they align tokens, and what will be called otherwise.
    logging.disable(logging.WARNING)
    warnings.simplefilter("ignore", FutureWarning)

    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "rows.json"
        run_forked(NUM_RANKS, lambda rank: work(rank, asked, out))
        result = summarise(json.loads(out.read_text()))
        result["simulated"] = simulated(Path(folder))
    asked.out.parent.mkdir(parents=True, exist_ok=True)
    asked.out.write_text(json.dumps(result, indent=1) + "\n")
    for row in result["arms"]:
        print(
            f"{row['arm']:15} {row['seconds']:7.2f} s  {row['best_over_it']:.3f}x of {result['best_other']} "
            f"({row['low']:.3f} to {row['high']:.3f})"
        )
    for arm, ratio in result["padding_ratios"].items():
        print(f"{arm}: {ratio:.2f} tokens for each real one, before padding is removed")
    for way, ratio in result["simulated"].items():
        print(f"simulated on 64 ranks, {way}: {ratio:.3f} of the work bound")
    print(f"parameters differ by {result['parameters_difference_max']:.1e}")


if __name__ == "__main__":
    main()
