"""Idefics3: tiles of a SigLIP without a CLS, pixel shuffle, a linear projector; no videos.

    pixels_NCHW --SigLIP--> [N, P, V] --norm, shuffle, projector--> features_ED

Shape letters: see `models/adapter.py`; V is the width of the encoder. SmolVLM is built alike (`smolvlm.py`).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from transformers import Idefics3Config, Idefics3ForConditionalGeneration

from dflop.models.adapter import MediaGrid
from dflop.models.processor_files import processor_fields
from dflop.models.rules import Rule
from dflop.models.tiles import TileFamily, check_features, clip_plan

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from torch import nn

    from dflop.models.tensor import LayerPlan


class Idefics3(TileFamily):
    """`ModelAdapter` of Idefics3."""

    family = "idefics3"
    config_class = Idefics3Config
    model_class = Idefics3ForConditionalGeneration
    encoder_modules = ("vision_model", "connector")

    def __init__(self, model_dir: Path) -> None:
        super().__init__(model_dir)
        vision = self.vision
        side = vision.image_size // vision.patch_size
        self.num_encoder_layers = vision.num_hidden_layers
        self.feature_layers = (vision.num_hidden_layers,)
        self.input_shape = (vision.num_channels, vision.image_size, vision.image_size)
        self.encoder_tokens_per_tile = side**2
        self.features_per_tile = (side // self.config.scale_factor) ** 2

    def rules(self) -> list[Rule]:
        """See `FamilyAdapter.rules`."""
        vision, scale = self.vision, self.config.scale_factor
        sides = {name: getattr(vision, name) for name in ("image_size", "patch_size")}
        rules = [
            Rule(f"vision_config.{name}", side, isinstance(side, int) and side > 0, "a whole number above 0")
            for name, side in sides.items()
        ]
        if all(rule.holds for rule in rules):
            patches = sides["image_size"] // sides["patch_size"]
            divides = scale > 0 and patches % scale == 0
            rules.append(
                Rule("scale_factor", scale, divides, f"a divisor of the {patches} patches of a tile's side")
            )
        return rules

    def embed(self, model: Any, inputs_N: torch.Tensor) -> torch.Tensor:
        """See `TileFamily.embed`."""
        side = self.vision.image_size // self.vision.patch_size
        # Tiles are whole: none of their patches is padding.
        is_seen_NHW = torch.ones(inputs_N.shape[0], side, side, dtype=torch.bool, device=inputs_N.device)
        return model.vision_model.embeddings(pixel_values=inputs_N, patch_attention_mask=is_seen_NHW)

    def before_layers(self, model: Any) -> Sequence[nn.Module]:
        """See `FamilyAdapter.before_layers`."""
        return [model.vision_model.embeddings]

    def tower_layers(self, model: Any) -> Any:
        """See `FamilyAdapter.tower_layers`."""
        return model.vision_model.encoder.layers

    def encoder_plan(self) -> LayerPlan:
        """See `FamilyAdapter.encoder_plan`."""
        return clip_plan(self.vision)

    def project(self, model: Any, hidden_NPV: torch.Tensor, media: Sequence[MediaGrid]) -> torch.Tensor:
        """See `TileFamily.project`."""
        features_NQD = model.connector(model.vision_model.post_layernorm(hidden_NPV))
        for grid, own in zip(media, features_NQD.split([g.num_tiles for g in media]), strict=True):
            check_features(own.flatten(0, 1), grid)
        return features_NQD.flatten(0, 1)

    def example_media(self, num_tiles: int) -> list[MediaGrid]:
        """Images of one tile each; see `ModelAdapter.example_media`."""
        _, height, width = self.input_shape
        return [MediaGrid("image", 1, height, width, self.features_per_tile)] * num_tiles

    def make_processor(self) -> Any:
        """See `TileFamily.make_processor`."""
        from transformers.models.idefics3.image_processing_pil_idefics3 import Idefics3ImageProcessorPil

        return Idefics3ImageProcessorPil.from_dict(processor_fields(self.model_dir, "image_processor"))


ADAPTER = Idefics3
