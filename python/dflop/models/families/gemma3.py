"""Gemma 3: SigLIP over a large square, means of its patches as features; most LLM layers see a window.

    pixels_NCHW --SigLIP--> [N, P, V] --norm, means of squares, norm, product--> [N, Q, D] --> features_ED

A long picture may be several squares: the whole and its crops (pan and scan), each with text around it. The
tokens of a square see all of it, also those behind them: see `models/sight.py`. Shape letters: see
`models/adapter.py`; V is the width of the encoder,
Q features of a square.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from transformers import Gemma3Config, Gemma3ForConditionalGeneration

from dflop.models.adapter import MediaGrid
from dflop.models.parameters import fill_parameter
from dflop.models.processor_files import processor_fields
from dflop.models.rules import Rule
from dflop.models.tiles import TileFamily, check_features, clip_plan
from dflop.models.towers import inner_tower

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from torch import nn

    from dflop.models.tensor import LayerPlan

# What the processor takes for crops where its file does not say it.
_SCAN = {
    "pan_and_scan_min_crop_size": 256,
    "pan_and_scan_max_num_crops": 4,
    "pan_and_scan_min_ratio_to_activate": 1.2,
}


class Gemma3(TileFamily):
    """`ModelAdapter` of Gemma 3."""

    family = "gemma3"
    config_class = Gemma3Config
    model_class = Gemma3ForConditionalGeneration
    encoder_modules = ("vision_tower", "multi_modal_projector")

    def __init__(self, model_dir: Path) -> None:
        super().__init__(model_dir)
        vision = self.vision
        side: int = vision.image_size
        self.num_encoder_layers = vision.num_hidden_layers
        self.feature_layers = (vision.num_hidden_layers,)
        self.input_shape = (vision.num_channels, side, side)
        self.encoder_tokens_per_tile = (side // vision.patch_size) ** 2
        self.features_per_tile: int = self.config.mm_tokens_per_image

    def rules(self) -> list[Rule]:
        """See `FamilyAdapter.rules`."""
        vision, features = self.vision, self.config.mm_tokens_per_image
        per_side, side = vision.image_size // vision.patch_size, int(features**0.5)
        return [
            Rule(
                "vision_config.model_type",
                vision.model_type,
                vision.model_type == "siglip_vision_model",
                "siglip_vision_model",
            ),
            Rule(
                "mm_tokens_per_image",
                features,
                side > 0 and side * side == features and per_side % side == 0,
                f"the square of a number that divides {per_side} patches of a side",
            ),
        ]

    def embed(self, model: Any, inputs_N: torch.Tensor) -> torch.Tensor:
        """See `TileFamily.embed`."""
        return inner_tower(model.vision_tower).embeddings(inputs_N)

    def before_layers(self, model: Any) -> Sequence[nn.Module]:
        """See `FamilyAdapter.before_layers`."""
        return [inner_tower(model.vision_tower).embeddings]

    def tower_layers(self, model: Any) -> Any:
        """See `FamilyAdapter.tower_layers`."""
        return inner_tower(model.vision_tower).encoder.layers

    def encoder_plan(self) -> LayerPlan:
        """See `FamilyAdapter.encoder_plan`."""
        return clip_plan(self.vision)

    def project(self, model: Any, hidden_NPV: torch.Tensor, media: Sequence[MediaGrid]) -> torch.Tensor:
        """See `TileFamily.project`."""
        normed_NPV = inner_tower(model.vision_tower).post_layernorm(hidden_NPV)
        features_NQD = model.multi_modal_projector(normed_NPV)
        for grid, own in zip(media, features_NQD.split([g.num_tiles for g in media]), strict=True):
            check_features(own.flatten(0, 1), grid)
        return features_NQD.flatten(0, 1)

    @torch.no_grad()
    def fill(self, parameter: torch.Tensor, name: str, seed: int, std: float) -> None:
        """See `FamilyAdapter.fill`; norms outside the tower scale by one more than their weight."""
        parts = name.split(".")
        if "vision_tower" not in parts and parts[-1] == "weight" and "norm" in parts[-2]:
            parameter.zero_()
        else:
            fill_parameter(parameter, name, seed, std)

    def example_media(self, num_tiles: int) -> list[MediaGrid]:
        """Images of one square each; see `ModelAdapter.example_media`."""
        _, height, width = self.input_shape
        return [MediaGrid("image", 1, height, width, self.features_per_tile)] * num_tiles

    def make_processor(self) -> Any:
        """See `TileFamily.make_processor`."""
        from transformers.models.gemma3.image_processing_pil_gemma3 import Gemma3ImageProcessorPil

        fields = processor_fields(self.model_dir, "image_processor")
        missing = {name: value for name, value in _SCAN.items() if fields.get(name) is None}
        return Gemma3ImageProcessorPil.from_dict({**fields, **missing})

    def image_tiles(self, batch: Any) -> torch.Tensor:
        """See `TileFamily.image_tiles`: the whole picture, then its crops."""
        return self.processor.preprocess(batch, return_tensors="pt")["pixel_values"].view(
            -1, *self.input_shape
        )


ADAPTER = Gemma3
