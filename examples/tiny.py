"""What the examples share: a tiny InternVL, and samples as mixed as real ones: text, one image, many images."""

from __future__ import annotations

import random
from typing import Any

import torch
from transformers import InternVLConfig, InternVLForConditionalGeneration

VOCABULARY, IMAGE_TOKEN, TOKENS_PER_TILE, TILE = 200, 199, 4, 56
TEXT = {"hidden_size": 48, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4,
        "num_key_value_heads": 2, "vocab_size": VOCABULARY, "max_position_embeddings": 4096}  # fmt: skip
VISION = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 64,
          "patch_size": [14, 14], "image_size": [TILE, TILE]}  # fmt: skip


def make_model() -> InternVLForConditionalGeneration:
    """Of random weights, the same on all ranks."""
    torch.manual_seed(0)
    config = InternVLConfig(
        vision_config=VISION,
        text_config={"model_type": "qwen2", "tie_word_embeddings": False, **TEXT},
        image_token_id=IMAGE_TOKEN,
        tie_word_embeddings=False,
    )
    return InternVLForConditionalGeneration(config).train()


class Samples(torch.utils.data.Dataset):
    """A third is text alone; the others have one tile to many."""

    def __init__(self, count: int = 64, seed: int = 0) -> None:
        draw = random.Random(seed)
        self.sizes = [
            (
                0 if draw.random() < 1 / 3 else 1 + int(draw.lognormvariate(1, 1)),
                8 + int(draw.lognormvariate(3, 0.7)),
            )
            for _ in range(count)
        ]  # (tiles, words)

    def __len__(self) -> int:
        return len(self.sizes)

    def __getitem__(self, index: int) -> dict[str, Any]:
        tiles, words = self.sizes[index]
        generator = torch.Generator().manual_seed(index)
        answer = torch.randint(3, IMAGE_TOKEN, (words,), generator=generator).tolist()
        image = [IMAGE_TOKEN] * (TOKENS_PER_TILE * tiles)
        pixels = torch.randn(tiles, 3, TILE, TILE, generator=generator)
        return {"input_ids": image + answer, "labels": [-100] * len(image) + answer, "pixel_values": pixels}

    @property
    def costs(self) -> list[tuple[float, float]]:
        """(encoder, LLM) work of each sample, here in tokens read times the width of the component.

        `dflop profile model` measures it for a real model.
        """
        patches = (TILE // 14) ** 2 + 1
        return [
            (tiles * patches * VISION["hidden_size"], (tiles * TOKENS_PER_TILE + words) * TEXT["hidden_size"])
            for tiles, words in self.sizes
        ]

    @property
    def llm_costs(self) -> list[tuple[float, float]]:
        """The LLM's work alone, for both lines together: the second one balances the encoder's. As `Costs.llm_alone()`."""
        return [(0, llm) for _, llm in self.costs]


def collate(rows: list[dict[str, Any]]) -> dict[str, torch.Tensor]:
    """Padded on the right; a batch of text alone has no `pixel_values`."""
    most = max(len(row["input_ids"]) for row in rows)

    def pad(name: str, value: int) -> torch.Tensor:
        return torch.tensor([row[name] + [value] * (most - len(row[name])) for row in rows])

    lengths = torch.tensor([len(row["input_ids"]) for row in rows])
    batch = {
        "input_ids": pad("input_ids", 0),
        "attention_mask": (torch.arange(most)[None] < lengths[:, None]).long(),
        "labels": pad("labels", -100),
    }
    pixels = torch.cat([torch.as_tensor(row["pixel_values"]).reshape(-1, 3, TILE, TILE) for row in rows])
    if len(pixels):
        batch["pixel_values"] = pixels
    return batch


def model_inputs(batch: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """All but the labels: the loss is ours."""
    return {name: value for name, value in batch.items() if name != "labels"}
