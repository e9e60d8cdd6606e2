"""LFM2-VL: pictures at their own resolution, large ones in tiles with a thumbnail (SigLIP 2); no videos.

    patches_NC --tower (`models/naflex.py`)--> hidden_NV --factor x factor patches a feature--> features_ED

Most layers of the backbone have a short convolution in place of attention: see `models/short_conv.py`. Shape
letters: see `models/naflex.py`.
"""

from __future__ import annotations

from functools import cached_property
from typing import TYPE_CHECKING, Any, cast

import torch
import transformers
from transformers import Lfm2VlConfig, Lfm2VlForConditionalGeneration
from transformers.models.lfm2 import modeling_lfm2

from dflop.models import media as decoding
from dflop.models.adapter import EXAMPLE_SIZE, MediaGrid
from dflop.models.delta_rule import CONVOLUTION, keep_samples_apart
from dflop.models.encoder import numbered
from dflop.models.errors import hinted, profile_error
from dflop.models.family import FamilyAdapter
from dflop.models.naflex import bounds_of, embed, project, run_layer
from dflop.models.packing import PACKED_BY_MASK
from dflop.models.patch_layout import Geometry
from dflop.models.processor_files import processor_fields
from dflop.models.rules import Rule
from dflop.models.short_conv import gets_bounds
from dflop.models.tiles import clip_plan
from dflop.models.towers import inner_tower

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from torch import nn

    from dflop.models.adapter import EncoderInput
    from dflop.models.encoder import EncoderRun
    from dflop.models.media import MediaFile
    from dflop.models.naflex import Sides
    from dflop.models.tensor import LayerPlan

keep_samples_apart(modeling_lfm2, (CONVOLUTION,))

# Features of a tile of the published models, each way.
_TILE_FEATURES = 16


def segments_of(media: Sequence[MediaGrid]) -> list[Sides]:
    """Rows and columns of patches of each segment.

    Args:
        media: that the encoder reads.

    Returns:
        Of each tile and thumbnail, in order.
    """
    return [cast("Sides", sides) for grid in media for sides in grid.tile_patches()]


class Lfm2Vl(FamilyAdapter):
    """`ModelAdapter` of LFM2-VL."""

    family = "lfm2_vl"
    config_class = Lfm2VlConfig
    model_class = Lfm2VlForConditionalGeneration
    encoder_modules = ("vision_tower", "multi_modal_projector")
    encoder_attention = PACKED_BY_MASK

    def __init__(self, model_dir: Path) -> None:
        if not gets_bounds():
            older = f"transformers is {transformers.__version__}"
            message = f"{older}, whose short convolutions would mix the samples of a pack"
            raise hinted(profile_error(message), "pip install 'transformers>=5.23'")
        super().__init__(model_dir)
        vision = self.vision
        self.num_encoder_layers = vision.num_hidden_layers
        self.geometry = Geometry(self.config.downsample_factor, vision.patch_size, None)
        self.input_shape = (vision.num_channels * vision.patch_size**2,)
        self.encoder_tokens_per_tile = self.example_media(1)[0].num_inputs

    def rules(self) -> list[Rule]:
        """See `FamilyAdapter.rules`."""
        vision, factor = self.vision, self.config.downsample_factor
        kind, side, has_head = vision.model_type, vision.patch_size, vision.vision_use_head
        whole = "a whole number above 0"
        return [
            Rule("vision_config.model_type", kind, kind == "siglip2_vision_model", "siglip2_vision_model"),
            Rule("vision_config.patch_size", side, isinstance(side, int) and side > 0, whole),
            Rule("vision_config.vision_use_head", has_head, not has_head, "false: nothing reads the head"),
            Rule("downsample_factor", factor, factor > 0, whole),
        ]

    def before_layers(self, model: Any) -> Sequence[nn.Module]:
        """See `FamilyAdapter.before_layers`."""
        return [inner_tower(model.vision_tower).embeddings]

    def tower_layers(self, model: Any) -> Any:
        """See `FamilyAdapter.tower_layers`."""
        return inner_tower(model.vision_tower).encoder.layers

    def encoder_plan(self) -> LayerPlan:
        """See `FamilyAdapter.encoder_plan`."""
        return clip_plan(self.vision)

    def encode_run(
        self, model: Any, batch: EncoderInput, run: EncoderRun, incoming_RU: torch.Tensor | None
    ) -> torch.Tensor:
        """See `FamilyAdapter.encode_run`."""
        tower, segments = inner_tower(model.vision_tower), segments_of(batch.media)
        hidden_NV = incoming_RU
        if hidden_NV is None:
            hidden_NV = embed(tower.embeddings, batch.inputs_N, segments)
        bounds = bounds_of(segments, hidden_NV.device)
        for _, layer in numbered(tower.encoder.layers):
            hidden_NV = run_layer(layer, hidden_NV, bounds)
        if not run.is_last:
            return hidden_NV
        return project(tower.post_layernorm, model.multi_modal_projector, hidden_NV, segments)

    def example_media(self, num_tiles: int) -> list[MediaGrid]:
        """Photographs that are not cut, one a tile; see `ModelAdapter.example_media`."""
        side = _TILE_FEATURES * self.geometry.merge
        return [MediaGrid("image", 1, *EXAMPLE_SIZE, _TILE_FEATURES**2, patches=(side, side))] * num_tiles

    @cached_property
    def image_processor(self) -> Any:
        """Hugging Face's image processor of this model; a `ProfileError` where torchvision is missing."""
        try:
            from transformers.models.lfm2_vl.image_processing_lfm2_vl import Lfm2VlImageProcessor
        except ImportError as error:
            message = "`Lfm2VlImageProcessor` reads pictures with torchvision, which is not installed"
            raise hinted(profile_error(message), "pip install torchvision") from error
        return Lfm2VlImageProcessor.from_dict(processor_fields(self.model_dir, "image_processor"))

    def pixels(
        self, file: MediaFile, kind: str, frame_indices: Sequence[int], grid: MediaGrid | None = None
    ) -> torch.Tensor:
        """See `ModelAdapter.pixels`."""
        del frame_indices
        if kind not in ("image", "multi_image"):
            message = (
                f"`{kind}` is no kind of media that this family reads, it reads `image` and `multi_image`"
            )
            raise ValueError(message)
        found = self.image_processor.preprocess([decoding.decode_image(file)], return_tensors="pt")
        sides = [(rows, columns) for rows, columns in found["spatial_shapes"].tolist()]
        if grid is not None and sides != segments_of([grid]):
            message = f"`{file}` is {sides} patches (rows, columns), profiled as {segments_of([grid])}"
            raise profile_error(message)
        # Filled up to the largest that there may be.
        parts = zip(found["pixel_values"], sides, strict=True)
        return torch.cat([padded[: rows * columns] for padded, (rows, columns) in parts]).to(torch.float32)


ADAPTER = Lfm2Vl
