"""What padding costs a training step on one device, and what `remove_padding` gives back.

Usage: python benches/unpadded.py OUT.json [--device cuda] [--rounds 5] [--samples 64] [--batch 2]

InternVL3-1B (random weights, bfloat16) trains on mixed samples, a third of them text alone, tiles and words
lognormal, in padded rows: forward, backward and AdamW of each batch. Arms:

    arrival     batches in the order of the data, transformers' own attention (sdpa)
    grouped     the same samples sorted by LLM tokens, so that rows of a batch are about equally long
    unpadded    the batches of `arrival`, after `remove_padding(model)`
    both        the batches of `grouped`, after `remove_padding(model)`

A round runs all arms in another order. The ratio divides the time of `arrival` or `grouped`, whichever is
faster, by that of `unpadded`, with a 95 % interval; the batches of `unpadded` stay random. On a CPU the model
is a tiny one, to try the program.
"""

from __future__ import annotations

import argparse
import json
import math
import random
import statistics
import sys
import time
from pathlib import Path
from typing import Any

from adopt import draw_sizes
from collect import origin
from ratio import ratio_of

ARMS = ("arrival", "grouped", "unpadded", "both")
TOKENS_PER_TILE, SEED = 256, 11


def make_model(device: Any, dtype: Any) -> Any:
    """InternVL3-1B; on a CPU a tiny one of the same form."""
    import torch
    from transformers import InternVLConfig, InternVLForConditionalGeneration

    is_tiny = device.type == "cpu"
    vision = {
        "hidden_size": 1024,
        "num_hidden_layers": 24,
        "num_attention_heads": 16,
        "intermediate_size": 4096,
    }
    text = {
        "hidden_size": 896, "intermediate_size": 4864, "num_hidden_layers": 24, "num_attention_heads": 14,
        "num_key_value_heads": 2, "vocab_size": 151_674,
    }  # fmt: skip
    if is_tiny:
        vision |= {
            "hidden_size": 32,
            "num_hidden_layers": 1,
            "num_attention_heads": 2,
            "intermediate_size": 64,
        }
        text |= {"hidden_size": 56, "intermediate_size": 64, "num_hidden_layers": 2, "vocab_size": 1_000}
    config = InternVLConfig(
        vision_config={**vision, "image_size": [448, 448], "patch_size": [14, 14]},
        text_config={
            **text,
            "model_type": "qwen2",
            "max_position_embeddings": 32_768,
            "tie_word_embeddings": True,
            "use_cache": False,
        },
        image_token_id=text["vocab_size"] - 1,
        tie_word_embeddings=True,
    )
    torch.manual_seed(0)
    with device:
        return InternVLForConditionalGeneration(config).to(dtype).train()


def make_batch(sizes: list[tuple[int, int]], vocabulary: int, device: Any, dtype: Any) -> dict[str, Any]:
    """Padded rows of samples of (tiles, words)."""
    import torch
    from torch.nn.utils.rnn import pad_sequence

    rows = []
    for tiles, words in sizes:
        image = torch.full((tiles * TOKENS_PER_TILE,), vocabulary - 1)
        rows.append((image, torch.randint(3, vocabulary - 1, (words,))))
    ids = [torch.cat(row) for row in rows]
    labels = [torch.cat([torch.full_like(image, -100), words]) for image, words in rows]
    batch = {
        "input_ids": pad_sequence(ids, batch_first=True),
        "labels": pad_sequence(labels, batch_first=True, padding_value=-100),
        "attention_mask": pad_sequence([torch.ones_like(row) for row in ids], batch_first=True),
    }
    moved: dict[str, Any] = {name: value.to(device) for name, value in batch.items()}
    if tiles := sum(tiles for tiles, _ in sizes):
        moved["pixel_values"] = torch.randn(tiles, 3, 448, 448, device=device, dtype=dtype)
    return moved


def measure(asked: argparse.Namespace) -> dict[str, Any]:
    """Seconds of each arm and round, and the losses of arms that train the same batches."""
    import torch

    from dflop.integrations import remove_padding

    device = torch.device(asked.device)
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    model = make_model(device, dtype)
    vocabulary = model.config.text_config.vocab_size
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-6, fused=True)
    sizes = draw_sizes(asked.samples, SEED)
    grouped = sorted(sizes, key=lambda size: size[0] * TOKENS_PER_TILE + size[1])
    batches = {
        name: [
            make_batch(order[start : start + asked.batch], vocabulary, device, dtype)
            for start in range(0, len(order), asked.batch)
        ]
        for name, order in (("arrival", sizes), ("grouped", grouped))
    }
    of_arm = {"arrival": "arrival", "grouped": "grouped", "unpadded": "arrival", "both": "grouped"}

    def wait() -> None:
        if device.type == "cuda":
            torch.cuda.synchronize()

    def epoch(arm: str) -> tuple[float, list[float], float]:
        handle = remove_padding(model) if arm in ("unpadded", "both") else None
        losses = []
        wait()
        start = time.perf_counter()
        for batch in batches[of_arm[arm]]:
            loss = model(**batch).loss
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.detach())
        wait()
        seconds = time.perf_counter() - start
        if handle is not None:
            handle.remove()
        return seconds, [float(loss) for loss in losses], 0.0 if handle is None else handle.padding_ratio

    seconds: dict[str, list[float]] = {arm: [] for arm in ARMS}
    padding: dict[str, float] = {}
    peaks: dict[str, int] = {}
    gap = 0.0
    for round_ in range(-1, asked.rounds):
        losses = {}
        for arm in random.Random(SEED + round_).sample(ARMS, len(ARMS)):
            if device.type == "cuda":
                torch.cuda.reset_peak_memory_stats()
            # From the same weights, so that losses can be compared.
            state = (
                {name: value.clone() for name, value in model.state_dict().items()} if round_ < 0 else None
            )
            took, losses[arm], ratio = epoch(arm)
            if state is not None:
                model.load_state_dict(state)
                optimizer.state.clear()
            if device.type == "cuda":
                peaks[arm] = torch.cuda.max_memory_allocated()
            if ratio:
                padding[of_arm[arm]] = ratio
            if round_ >= 0:
                seconds[arm].append(took)
            print(f"round {round_ + 1}: {arm} {took:.2f} s", file=sys.stderr)
        if round_ < 0:
            gap = max(abs(a - b) for a, b in zip(losses["arrival"], losses["unpadded"], strict=True))
    best = min(("arrival", "grouped"), key=lambda arm: statistics.fmean(map(math.log, seconds[arm])))
    ratio, low, high = ratio_of(seconds[best], seconds["unpadded"])
    return {
        "device": torch.cuda.get_device_name() if device.type == "cuda" else "cpu",
        "torch": torch.__version__,
        "padding_ratio": padding,
        "seconds": seconds,
        "peak_bytes": peaks,
        "loss_difference_max": gap,
        "best_other": best,
        "ratio": ratio,
        "low": low,
        "high": high,
        "over_arrival": ratio_of(seconds["arrival"], seconds["unpadded"]),
        "both_over_grouped": ratio_of(seconds["grouped"], seconds["both"]),
    }


def main() -> int:
    """Measures, writes and prints.

    Returns:
        The exit status.
    """
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("--device", default="cuda", choices=["cpu", "cuda"])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--samples", type=int, default=64)
    parser.add_argument("--batch", type=int, default=2, help="samples; 4 need more than 80 GB")
    asked = parser.parse_args()
    found = {"bench": "unpadded", **origin(), "batch": asked.batch, **measure(asked)}
    asked.out.parent.mkdir(parents=True, exist_ok=True)
    asked.out.write_text(json.dumps(found, indent=1) + "\n")
    for arm in ARMS:
        print(f"{arm:<10}{statistics.geometric_mean(found['seconds'][arm]):>8.3f} s an epoch")
    print(
        f"{found['best_other']} over unpadded: {found['ratio']:.3f} "
        f"({found['low']:.3f} to {found['high']:.3f}); padding {found['padding_ratio']}"
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
