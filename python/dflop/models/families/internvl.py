"""InternVL 2.5 and 3: InternViT tiles with a CLS each, pixel shuffle, an MLP projector.

    pixels_NCHW --InternViT--> [N, P, V] --norm, CLS dropped, shuffle, projector--> features_ED

Shape letters: see `models/adapter.py`; V is the width of the encoder.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, cast

from transformers import InternVLConfig, InternVLForConditionalGeneration
from transformers.models.internvl import modeling_internvl as hf

from dflop.models.adapter import MediaGrid
from dflop.models.processor_files import processor_fields
from dflop.models.rules import Rule
from dflop.models.tiles import TileFamily, check_features, tile_plan

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    import torch
    from torch import nn

    from dflop.models.tensor import LayerPlan


class InternVl(TileFamily):
    """`ModelAdapter` of InternVL."""

    family = "internvl"
    config_class = InternVLConfig
    model_class = InternVLForConditionalGeneration
    encoder_modules = ("vision_tower", "multi_modal_projector")
    video_processor_class = "InternVLVideoProcessor"

    def __init__(self, model_dir: Path) -> None:
        super().__init__(model_dir)
        vision = self.vision
        (height, width), (patch_height, patch_width) = vision.image_size, vision.patch_size
        self.num_encoder_layers = vision.num_hidden_layers
        self.feature_layers = (vision.num_hidden_layers,)
        self.input_shape = (vision.num_channels, height, width)
        patches = (height // patch_height) * (width // patch_width)
        # The CLS token counts, as in the data profile.
        self.encoder_tokens_per_tile = patches + 1
        self.features_per_tile = round(patches * self.config.downsample_ratio**2)

    def rules(self) -> list[Rule]:
        """See `FamilyAdapter.rules`."""
        layer, select = self.config.vision_feature_layer, self.config.vision_feature_select_strategy
        return [
            Rule("vision_feature_layer", layer, layer == -1, "-1"),
            Rule("vision_feature_select_strategy", select, select == "default", "default"),
        ]

    def embed(self, model: Any, inputs_N: torch.Tensor) -> torch.Tensor:
        """See `TileFamily.embed`."""
        return model.vision_tower.embeddings(inputs_N)

    def before_layers(self, model: Any) -> Sequence[nn.Module]:
        """See `FamilyAdapter.before_layers`."""
        return [model.vision_tower.embeddings]

    def tower_layers(self, model: Any) -> Any:
        """See `FamilyAdapter.tower_layers`."""
        return model.vision_tower.encoder.layer

    def encoder_plan(self) -> LayerPlan:
        """See `FamilyAdapter.encoder_plan`."""
        vision = self.vision
        return tile_plan(
            "attention",
            "projection_layer",
            ("mlp.fc1", "mlp.fc2", "mlp"),
            ("vision_config.num_attention_heads", vision.num_attention_heads),
            ("vision_config.intermediate_size", vision.intermediate_size),
            ("num_heads", "embed_dim"),
        )

    def cut_rules(self) -> list[Rule]:
        """See `FamilyAdapter.cut_rules`."""
        # This norm is over all heads of a token, while a rank would have only some heads.
        norm = self.vision.use_qk_norm
        return [Rule("vision_config.use_qk_norm", norm, not norm, "false with tensor parallelism")]

    def layer_arguments(self, inputs_N: torch.Tensor) -> tuple[Any, ...]:
        """See `TileFamily.layer_arguments`."""
        del inputs_N
        return ()

    def project(self, model: Any, hidden_NPV: torch.Tensor, media: Sequence[MediaGrid]) -> torch.Tensor:
        """See `TileFamily.project`."""
        patches_NPV = model.vision_tower.layernorm(hidden_NPV)[:, 1:]
        tiles, patches, width = patches_NPV.shape
        side = int(patches**0.5)
        squares = patches_NPV.reshape(tiles, side, side, width)
        # This method does not use its model, so none is given.
        ratio = self.config.downsample_ratio
        shuffled = hf.InternVLModel.pixel_shuffle(cast("Any", None), squares, scale_factor=ratio)
        features_NQD = model.multi_modal_projector(shuffled.reshape(tiles, -1, shuffled.shape[-1]))
        for grid, own in zip(media, features_NQD.split([g.num_tiles for g in media]), strict=True):
            check_features(own.flatten(0, 1), grid)
        return features_NQD.flatten(0, 1)

    def example_media(self, num_tiles: int) -> list[MediaGrid]:
        """Images of one tile each; see `ModelAdapter.example_media`."""
        _, height, width = self.input_shape
        return [MediaGrid("image", 1, height, width, self.features_per_tile)] * num_tiles

    def make_processor(self) -> Any:
        """See `TileFamily.make_processor`."""
        from transformers.models.got_ocr2.image_processing_pil_got_ocr2 import GotOcr2ImageProcessorPil

        return GotOcr2ImageProcessorPil.from_dict(processor_fields(self.model_dir, "image_processor"))

    def image_tiles(self, batch: Any) -> torch.Tensor:
        """See `TileFamily.image_tiles`; InternVL always cuts tiles, whatever the processor's file says."""
        return self.processor.preprocess(batch, crop_to_patches=True, return_tensors="pt")["pixel_values"]


ADAPTER = InternVl
