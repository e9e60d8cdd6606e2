"""Mistral3: pictures at their own resolution in patches, row by row (Pixtral); no videos.

    patches_NC --linear, norm--> hidden_NV --layers--> hidden_NV --norm, merge, MLP, by picture--> features_ED

A picture is a segment, and attention stays within it. Shape letters: see `models/adapter.py`; C values of a
patch, V width of the encoder. An input is one encoder token.
"""

from __future__ import annotations

import functools
import math
from functools import cached_property
from typing import TYPE_CHECKING, Any, cast

import torch
from transformers import Mistral3Config, Mistral3ForConditionalGeneration

from dflop.models import media as decoding
from dflop.models.adapter import EXAMPLE_SIZE, MediaGrid
from dflop.models.encoder import numbered
from dflop.models.errors import profile_error
from dflop.models.family import FamilyAdapter
from dflop.models.packing import PACKED
from dflop.models.patch_layout import Geometry, sent
from dflop.models.patches import Bounds, bounds_of_patches
from dflop.models.processor_files import processor_fields
from dflop.models.rules import Rule
from dflop.models.tensor import Cut, LayerPlan

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from torch import nn

    from dflop.models.adapter import EncoderInput
    from dflop.models.encoder import EncoderRun
    from dflop.models.media import MediaFile


# Cached: recomputation in a backward, and each encoder stage of a rank, need the same microbatch again.
@functools.lru_cache(maxsize=16)
def _positions(pictures: tuple[tuple[int, int], ...]) -> torch.Tensor:
    """Row and column of each patch, [T, 2], on the CPU."""
    grids = [torch.cartesian_prod(torch.arange(rows), torch.arange(columns)) for rows, columns in pictures]
    return torch.cat(grids)


def embed(tower: Any, patches_NC: torch.Tensor) -> torch.Tensor:
    """Hidden states before the first layer: [N, V].

    Args:
        tower: Hugging Face's.
        patches_NC: pixels of a patch, channel by channel.

    Returns:
        hidden_NV.
    """
    # The convolution of the tower, whose stride is its kernel, for patches that are cut out already.
    return tower.ln_pre(torch.nn.functional.linear(patches_NC, tower.patch_conv.weight.flatten(1)))


def bounds_of(rotary: Any, pictures: Sequence[tuple[int, int]], like: torch.Tensor) -> Bounds:
    """What the layers must know of pictures.

    Args:
        rotary: Hugging Face's rotary embedding of the tower.
        pictures: rows and columns of patches of each.
        like: hidden states; tells device and dtype.

    Returns:
        Who sees whom, with the angles of each patch.
    """
    angles = rotary(like, sent(_positions(tuple(pictures)), like.device))
    return bounds_of_patches([rows * columns for rows, columns in pictures], angles, like.device)


def run_layer(layer: Any, hidden_TV: torch.Tensor, bounds: Bounds) -> torch.Tensor:
    """One layer of the encoder.

    Args:
        layer: Hugging Face's.
        hidden_TV: before it.
        bounds: of the pictures.

    Returns:
        hidden_TV after it.
    """
    found_1TV = layer(
        hidden_TV[None],
        None,
        position_embeddings=bounds.angles,
        cu_seq_lens_q=bounds.cu_seqlens,
        segment_tokens=bounds.segment_tokens,
    )
    return found_1TV[0]


class Mistral3(FamilyAdapter):
    """`ModelAdapter` of Mistral3."""

    family = "mistral3"
    config_class: Any = Mistral3Config
    model_class: Any = Mistral3ForConditionalGeneration
    encoder_modules: tuple[str, str] = ("vision_tower", "multi_modal_projector")
    """Names of the tower and of the projector."""
    encoder_attention = PACKED

    def __init__(self, model_dir: Path) -> None:
        super().__init__(model_dir)
        vision = self.vision
        self.num_encoder_layers = vision.num_hidden_layers
        self.geometry = Geometry(self.config.spatial_merge_size, vision.patch_size, None)
        self.input_shape = (vision.num_channels * vision.patch_size**2,)
        self.encoder_tokens_per_tile = self.example_media(1)[0].num_inputs

    def rules(self) -> list[Rule]:
        """See `FamilyAdapter.rules`."""
        kind, side = self.vision.model_type, self.vision.patch_size
        merge, layer = self.config.spatial_merge_size, getattr(self.config, "vision_feature_layer", -1)
        return [
            Rule("vision_config.model_type", kind, kind == "pixtral", "pixtral"),
            Rule(
                "vision_config.patch_size", side, isinstance(side, int) and side > 0, "a whole number above 0"
            ),
            Rule("spatial_merge_size", merge, merge > 0, "above 0"),
            Rule("vision_feature_layer", layer, layer == -1, "-1"),
        ]

    def tower(self, model: Any) -> Any:
        """Hugging Face's tower, of what holds `encoder_modules`.

        Args:
            model: that holds it.

        Returns:
            The tower.
        """
        return getattr(model, self.encoder_modules[0])

    def before_layers(self, model: Any) -> Sequence[nn.Module]:
        """See `FamilyAdapter.before_layers`."""
        tower = self.tower(model)
        return [tower.patch_conv, tower.ln_pre]

    def tower_layers(self, model: Any) -> Any:
        """See `FamilyAdapter.tower_layers`."""
        return self.tower(model).transformer.layers

    def encoder_plan(self) -> LayerPlan:
        """See `FamilyAdapter.encoder_plan`."""
        vision = self.vision
        heads = ("vision_config.num_attention_heads", vision.num_attention_heads)
        width = ("vision_config.intermediate_size", vision.intermediate_size)
        return LayerPlan(
            cuts=(
                *(Cut(f"attention.{name}_proj", *heads) for name in "qkv"),
                Cut("attention.o_proj", *heads, by_input=True),
                Cut("feed_forward.gate_proj", *width),
                Cut("feed_forward.up_proj", *width),
                Cut("feed_forward.down_proj", *width, by_input=True),
            ),
            entries=("attention", "feed_forward"),
            counts=(("attention", "num_heads"),),
        )

    def encode_run(
        self, model: Any, batch: EncoderInput, run: EncoderRun, incoming_RU: torch.Tensor | None
    ) -> torch.Tensor:
        """See `FamilyAdapter.encode_run`."""
        tower = self.tower(model)
        pictures = [cast("tuple[int, int]", grid.patches) for grid in batch.media]
        hidden_NV = embed(tower, batch.inputs_N) if incoming_RU is None else incoming_RU
        bounds = bounds_of(tower.patch_positional_embedding, pictures, hidden_NV)
        for _, layer in numbered(tower.transformer.layers):
            hidden_NV = run_layer(layer, hidden_NV, bounds)
        return self.project(model, hidden_NV, pictures) if run.is_last else hidden_NV

    def project(
        self, model: Any, hidden_NV: torch.Tensor, pictures: Sequence[tuple[int, int]]
    ) -> torch.Tensor:
        """Features of all pictures, one after the other.

        Args:
            model: holds Hugging Face's projector.
            hidden_NV: after the last layer.
            pictures: rows and columns of patches of each.

        Returns:
            features_ED.
        """
        side = self.geometry.patch_size
        # In pixels, and on the host: sizes of a tensor would be read from the device.
        sizes: Any = [(rows * side, columns * side) for rows, columns in pictures]
        return getattr(model, self.encoder_modules[1])(hidden_NV, sizes)

    def example_media(self, num_tiles: int) -> list[MediaGrid]:
        """Photographs, one a tile; see `ModelAdapter.example_media`."""
        side = self.geometry.patch_size * self.geometry.merge
        rows, columns = (math.ceil(pixels / side) * self.geometry.merge for pixels in EXAMPLE_SIZE)
        features = rows * columns // self.geometry.feature_patches
        return [MediaGrid("image", 1, *EXAMPLE_SIZE, features, patches=(rows, columns))] * num_tiles

    @property
    def rounded_to(self) -> int:
        """Sides of a resized picture are multiples of it, in pixels."""
        return self.geometry.patch_size * self.geometry.merge

    @cached_property
    def image_processor(self) -> Any:
        """Hugging Face's image processor of this model, the one that needs no torchvision."""
        from transformers.models.pixtral.image_processing_pil_pixtral import PixtralImageProcessorPil

        return PixtralImageProcessorPil.from_dict(processor_fields(self.model_dir, "image_processor"))

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
        side = self.geometry.patch_size
        found = self.image_processor.preprocess(
            [decoding.decode_image(file)], patch_size=self.rounded_to, return_tensors="pt"
        )
        pixels_CHW = found["pixel_values"][0].to(torch.float32)
        channels, height, width = pixels_CHW.shape
        patches = (height // side, width // side)
        if grid is not None and grid.patches is not None and patches != tuple(grid.patches):
            message = f"`{file}` is {patches} patches (rows, columns), profiled as {tuple(grid.patches)}"
            raise profile_error(message)
        cut = pixels_CHW.reshape(channels, patches[0], side, patches[1], side)
        return cut.permute(1, 3, 0, 2, 4).reshape(math.prod(patches), -1)


ADAPTER = Mistral3
