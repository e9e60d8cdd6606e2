"""LLaVA 1.5: one CLIP or SigLIP square an image, an MLP projector; Vicuna, Llama, Mistral or Qwen2.

    pixels_NCHW --CLIP--> [N, P, V] --CLS dropped, projector--> [N, P - 1, D] --in a row--> features_ED

Shape letters: see `models/adapter.py`; V is the width of the encoder.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from transformers import LlavaConfig, LlavaForConditionalGeneration

from dflop.models.adapter import MediaGrid
from dflop.models.errors import profile_error
from dflop.models.processor_files import processor_fields, processor_file
from dflop.models.rules import Rule
from dflop.models.tiles import TileFamily, check_features, clip_plan
from dflop.models.towers import inner_tower

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    import torch
    from torch import nn

    from dflop.models.tensor import LayerPlan


class Llava(TileFamily):
    """`ModelAdapter` of LLaVA 1.5."""

    encoders: tuple[str, ...] = ("clip_vision_model", "siglip_vision_model")
    """`model_type` of the towers that the family may have here."""
    strategies: tuple[str, ...] = ("default", "full")
    """`vision_feature_select_strategy`: without the first token of a tile, or with all."""

    family = "llava"
    config_class = LlavaConfig
    model_class = LlavaForConditionalGeneration
    encoder_modules = ("vision_tower", "multi_modal_projector")

    def __init__(self, model_dir: Path) -> None:
        super().__init__(model_dir)
        vision = self.vision
        side: int = vision.image_size
        self.has_class_token = vision.model_type == "clip_vision_model"
        self.num_encoder_layers = vision.num_hidden_layers
        self.feature_layers = self.read_layers(self.config.vision_feature_layer, vision.num_hidden_layers)
        self.input_shape = (vision.num_channels, side, side)
        # The CLS token counts, as in the data profile.
        self.encoder_tokens_per_tile = (side // vision.patch_size) ** 2 + self.has_class_token
        self.num_dropped = int(self.config.vision_feature_select_strategy == "default")
        self.features_per_tile = self.encoder_tokens_per_tile - self.num_dropped

    def rules(self) -> list[Rule]:
        """See `FamilyAdapter.rules`."""
        kind, depth = self.vision.model_type, self.vision.num_hidden_layers
        layer, select = self.config.vision_feature_layer, self.config.vision_feature_select_strategy
        is_layer = isinstance(layer, int) and layer % (depth + 1) > 0 and -depth <= layer <= depth
        encoders, strategies = " or ".join(self.encoders), " or ".join(self.strategies)
        return [
            Rule("vision_config.model_type", kind, kind in self.encoders, encoders),
            Rule("vision_feature_layer", layer, is_layer, f"the index of one of {depth} layers"),
            Rule("vision_feature_select_strategy", select, select in self.strategies, strategies),
        ]

    def embed(self, model: Any, inputs_N: torch.Tensor) -> torch.Tensor:
        """See `TileFamily.embed`."""
        hidden_NPV = inputs_N
        for module in self.before_layers(model):
            hidden_NPV = module(hidden_NPV)
        return hidden_NPV

    def before_layers(self, model: Any) -> Sequence[nn.Module]:
        """See `FamilyAdapter.before_layers`."""
        tower = inner_tower(model.vision_tower)
        return [tower.embeddings, *([tower.pre_layrnorm] if self.has_class_token else [])]

    def tower_layers(self, model: Any) -> Any:
        """See `FamilyAdapter.tower_layers`."""
        return inner_tower(model.vision_tower).encoder.layers

    def encoder_plan(self) -> LayerPlan:
        """See `FamilyAdapter.encoder_plan`."""
        return clip_plan(self.vision)

    def project(self, model: Any, hidden_NPV: torch.Tensor, media: Sequence[MediaGrid]) -> torch.Tensor:
        """See `TileFamily.project`."""
        features_NQD = model.multi_modal_projector(hidden_NPV[:, self.num_dropped :])
        for grid, own_QD in zip(media, features_NQD, strict=True):
            check_features(own_QD, grid)
        return features_NQD.flatten(0, 1)

    def example_media(self, num_tiles: int) -> list[MediaGrid]:
        """Images, each of one square; see `ModelAdapter.example_media`."""
        _, height, width = self.input_shape
        return [MediaGrid("image", 1, height, width, self.features_per_tile)] * num_tiles

    def make_processor(self) -> Any:
        """See `TileFamily.make_processor`: of the class that the file names; if it names none, LLaVA's."""
        from transformers import CLIPImageProcessorPil, LlavaImageProcessorPil, SiglipImageProcessorPil

        classes = (CLIPImageProcessorPil, LlavaImageProcessorPil, SiglipImageProcessorPil)
        by_name = {made.__name__.removesuffix("Pil"): made for made in classes}
        fields = processor_fields(self.model_dir, "image_processor")
        name = str(fields.get("image_processor_type") or "LlavaImageProcessor")
        plain = name.removesuffix("Fast").removesuffix("Pil")
        if plain not in by_name:
            message = f"`{processor_file(self.model_dir)}`: `image_processor_type` is {name}, known are "
            raise profile_error(message + ", ".join(by_name))
        return by_name[plain].from_dict(fields)

    def image_tiles(self, batch: Any) -> torch.Tensor:
        """See `TileFamily.image_tiles`: of one image one tile here, several in LLaVA-NeXT."""
        return self.processor.preprocess(batch, return_tensors="pt")["pixel_values"].view(
            -1, *self.input_shape
        )


ADAPTER = Llava
"""The adapter of the family that this module is named for: `load_adapter` looks for it."""
