"""PaddleOCR-VL: pages at their own resolution in patches, with learnt positions; M-RoPE; no videos.

    patches_NC, row by row --linear, sorted by feature, learnt positions--> hidden_NV --layers--> hidden_NV
    hidden_NV --norm, norm, the patches of a feature side by side, MLP--> features_ED

A page is a segment, and attention stays within it. In the layers the patches of a feature follow each other,
so that the projector reads them as they lie; Hugging Face's layers have them row by row. Shape letters: see
`models/patches.py`; E features. An input is one encoder token.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, cast

import torch
from transformers import PaddleOCRVLConfig, PaddleOCRVLForConditionalGeneration
from transformers.models.paddleocr_vl.configuration_paddleocr_vl import PaddleOCRVisionConfig
from transformers.models.paddleocr_vl.modeling_paddleocr_vl import PaddleOCRVisionEmbeddings, PaddleOCRVLModel
from transformers.vision_utils import get_vision_interpolation_indices_and_weights, get_vision_position_ids

from dflop.models import media as decoding
from dflop.models.encoder import numbered
from dflop.models.patch_layout import sent
from dflop.models.patches import Bounds, PatchFamily, bounds_of_patches, run_layer
from dflop.models.rules import Rule
from dflop.models.tiles import clip_plan

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import nn

    from dflop.models.adapter import EncoderInput, MediaGrid
    from dflop.models.encoder import EncoderRun
    from dflop.models.media import MediaFile
    from dflop.models.patch_layout import Geometry
    from dflop.models.tensor import LayerPlan


@dataclass(frozen=True)
class Places:
    """Where the patches of a microbatch lie, feature by feature."""

    inputs_T: torch.Tensor
    """Which input each patch is: inputs lie row by row."""
    positions_T2: torch.Tensor
    """Row and column of each patch."""
    learnt_T4: torch.Tensor
    """The four learnt positions next to each patch."""
    shares_T4: torch.Tensor
    """How much each of them counts, float32."""
    segments: tuple[int, ...]
    """Patches of each page."""


def lay_out_pages(pages: Sequence[tuple[int, int]], geometry: Geometry, device: torch.device) -> Places:
    """Where patches lie, computed on the host by Hugging Face's functions; nothing is read from the device.

    Args:
        pages: rows and columns of patches of each.
        geometry: of the model.
        device: of the tensors.

    Returns:
        The places.
    """
    found = _lay_out(tuple(pages), geometry)
    return Places(
        sent(found.inputs_T, device),
        sent(found.positions_T2, device),
        sent(found.learnt_T4, device),
        sent(found.shares_T4, device),
        found.segments,
    )


# Cached: recomputation in a backward, and each encoder stage of a rank, need the same microbatch again.
@functools.lru_cache(maxsize=16)
def _lay_out(pages: tuple[tuple[int, int], ...], geometry: Geometry) -> Places:
    """As `lay_out_pages`, on the CPU."""
    assert geometry.grid_side is not None, "this family's positions are learnt"
    grid = torch.tensor([(1, *sides) for sides in pages])
    counts, columns = grid.prod(1), grid[:, 2]
    positions_T2 = get_vision_position_ids(grid, geometry.merge)
    before_T = (counts.cumsum(0) - counts).repeat_interleave(counts)
    inputs_T = before_T + positions_T2[:, 0] * columns.repeat_interleave(counts) + positions_T2[:, 1]
    learnt = get_vision_interpolation_indices_and_weights(
        grid, geometry.grid_side, align_corners=_meets_at_corners(), spatial_merge_size=geometry.merge
    )
    return Places(inputs_T, positions_T2, *learnt, tuple(counts.tolist()))


@functools.cache
def _meets_at_corners() -> bool:
    """Whether corners of a page and of the table are at one place, as in older releases of transformers."""
    config = PaddleOCRVisionConfig(hidden_size=8, num_attention_heads=1, image_size=14)
    return bool(PaddleOCRVisionEmbeddings(config).interpolation_align_corners)


def embed(embeddings: Any, inputs_NC: torch.Tensor, places: Places) -> torch.Tensor:
    """Hidden states before the first layer.

    Args:
        embeddings: Hugging Face's.
        inputs_NC: pixels of a patch, channel by channel; patches row by row.
        places: where they lie.

    Returns:
        hidden_NV, feature by feature.
    """
    # The convolution, whose stride is its kernel, for patches that are cut out already.
    linear = embeddings.patch_embedding
    hidden_NV = torch.nn.functional.linear(inputs_NC, linear.weight.flatten(1), linear.bias)
    learnt_NV = (embeddings.position_embedding(places.learnt_T4) * places.shares_T4[:, :, None]).sum(1)
    return hidden_NV[places.inputs_T] + learnt_NV.to(hidden_NV.dtype)


def bounds_of(rotary: Any, places: Places, like: torch.Tensor) -> Bounds:
    """What the layers must know of pages.

    Args:
        rotary: Hugging Face's rotary embedding of the tower.
        places: of the patches.
        like: hidden states; tells device and dtype.

    Returns:
        Who sees whom, with the angles of each patch.
    """
    return bounds_of_patches(places.segments, rotary(like, places.positions_T2), like.device)


def project(last_norm: Any, projector: Any, hidden_NV: torch.Tensor) -> torch.Tensor:
    """Features of all pages, one after the other.

    Args:
        last_norm: of Hugging Face's tower.
        projector: Hugging Face's.
        hidden_NV: after the last layer; the patches of a feature follow each other.

    Returns:
        features_ED.
    """
    normed_NV = projector.pre_norm(last_norm(hidden_NV))
    merged_EW = normed_NV.view(-1, projector.linear_1.in_features)
    return projector.linear_2(projector.act(projector.linear_1(merged_EW)))


class PaddleOcrVl(PatchFamily):
    """`ModelAdapter` of PaddleOCR-VL."""

    family = "paddleocr_vl"
    config_class = PaddleOCRVLConfig
    model_class = PaddleOCRVLForConditionalGeneration
    model_methods = PaddleOCRVLModel
    encoder_modules = ("visual", "projector")
    image_processor_class = "PaddleOCRVLImageProcessorPil"

    @property
    def depth(self) -> int:
        """See `PatchFamily.depth`."""
        return self.vision.num_hidden_layers

    @property
    def encoder_width(self) -> int:
        """See `PatchFamily.encoder_width`."""
        return self.vision.hidden_size

    @property
    def patch_values(self) -> int:
        """See `PatchFamily.patch_values`: of one picture."""
        return self.vision.num_channels * self.vision.patch_size**2

    @property
    def grid_side(self) -> int:
        """See `PatchFamily.grid_side`."""
        return self.vision.image_size // self.vision.patch_size

    def rules(self) -> list[Rule]:
        """See `FamilyAdapter.rules`."""
        kind, biases = self.vision.model_type, self.text.use_bias
        # Files of the hub name the whole model there; transformers before 5.23 leaves it so.
        is_known = kind in ("paddleocr_vl_vision", "paddleocr_vl")
        return [
            Rule("vision_config.model_type", kind, is_known, "paddleocr_vl_vision"),
            Rule("text_config.use_bias", biases, not biases, "false"),
        ]

    def encoder_plan(self) -> LayerPlan:
        """See `FamilyAdapter.encoder_plan`."""
        return clip_plan(self.vision)

    def before_layers(self, model: Any) -> Sequence[nn.Module]:
        """See `FamilyAdapter.before_layers`."""
        return [model.visual.vision_model.embeddings]

    def tower_layers(self, model: Any) -> Any:
        """See `FamilyAdapter.tower_layers`."""
        return model.visual.vision_model.encoder.layers

    def encode_run(
        self, model: Any, batch: EncoderInput, run: EncoderRun, incoming_RU: torch.Tensor | None
    ) -> torch.Tensor:
        """See `FamilyAdapter.encode_run`; between runs patches lie feature by feature."""
        tower = model.visual.vision_model
        device = batch.inputs_N.device if incoming_RU is None else incoming_RU.device
        pages = [cast("tuple[int, int]", grid.patches) for grid in batch.media]
        places = lay_out_pages(pages, self.geometry, device)
        hidden_NV = embed(tower.embeddings, batch.inputs_N, places) if incoming_RU is None else incoming_RU
        bounds = bounds_of(tower.encoder.rotary_pos_emb, places, hidden_NV)
        for _, layer in numbered(tower.encoder.layers):
            hidden_NV = run_layer(layer, hidden_NV, bounds)
        return project(tower.post_layernorm, model.projector, hidden_NV) if run.is_last else hidden_NV

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
        self._check(file, tuple(found["image_grid_thw"][0].tolist()), grid)
        return found["pixel_values"].flatten(1).to(torch.float32)


ADAPTER = PaddleOcrVl
