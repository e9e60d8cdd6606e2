"""MiniCPM-V 4.6: pictures and slices at their own resolution; a merger between layers of the encoder.

    patches_NC --embed, first layers--> hidden_NV --`vit_merger`--> hidden_WV
    hidden_WV --last layers--> hidden_WV --norm, `merger`--> features_ED

With `downsample_mode` "16x" the layers behind `insert_layer_id` read a row for a window of 2 x 2 patches, and
`merger` makes a feature of 2 x 2 such rows. With "4x" there are no such layers, and a feature is a window.

Patches are sorted feature by feature, and in a feature window by window, from the embedding on: what a merger
puts together stands side by side. A slice, or a whole picture, is a segment, and attention stays within it.
Shape letters: see `adapter.py`; C values of a patch, V width of the encoder, W windows. An input is a patch.
"""

from __future__ import annotations

import functools
from functools import cached_property
from typing import TYPE_CHECKING, Any, cast

import torch
import torch.nn.functional as F
from transformers import MiniCPMV4_6Config, MiniCPMV4_6ForConditionalGeneration
from transformers.models.minicpmv4_6.image_processing_pil_minicpmv4_6 import (
    MiniCPMV4_6ImageProcessorPil,
)
from transformers.models.qwen3_5 import modeling_qwen3_5
from transformers.vision_utils import get_vision_nearest_position_ids

from dflop.models import media as decoding
from dflop.models.adapter import EXAMPLE_SIZE, MediaGrid
from dflop.models.delta_rule import keep_samples_apart
from dflop.models.encoder import numbered
from dflop.models.errors import profile_error
from dflop.models.families.qwen3_5 import fill_with_decays
from dflop.models.family import FamilyAdapter
from dflop.models.packing import PACKED_ENCODER
from dflop.models.patch_layout import Geometry, sent
from dflop.models.patches import bounds_of_patches
from dflop.models.processor_files import processor_fields
from dflop.models.rules import Rule
from dflop.models.tiles import tile_plan

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from torch import nn

    from dflop.models.adapter import EncoderInput
    from dflop.models.encoder import EncoderRun
    from dflop.models.media import MediaFile
    from dflop.models.naflex import Sides
    from dflop.models.patches import Bounds
    from dflop.models.tensor import LayerPlan

keep_samples_apart(modeling_qwen3_5)

WINDOW = 4
"""Patches of a window, and windows of a feature: 2 x 2."""
# Attention within windows runs over so many at once: kernels for batches have a limit of 65,535.
_WINDOWS_MAX = 1 << 15
# Patches of a picture of 448 x 448 pixels, each way.
_SIDE = 32


# Cached: recomputation in a backward needs the same microbatch again.
@functools.lru_cache(maxsize=16)
def _order_of(segments: tuple[Sides, ...], num_merges: int) -> torch.Tensor:
    """Patches of all segments, feature by feature, and in a feature window by window."""
    orders, first = [], 0
    for rows, columns in segments:
        places = torch.arange(first, first + rows * columns)
        if num_merges == 1:
            order = places.view(rows // 2, 2, columns // 2, 2).transpose(1, 2)
        else:
            order = places.view(rows // 4, 2, 2, columns // 4, 2, 2).permute(0, 3, 1, 4, 2, 5)
        orders.append(order.flatten())
        first += rows * columns
    return torch.cat(orders)


@functools.lru_cache(maxsize=16)
def _places_of(segments: tuple[Sides, ...], num_merges: int, per_side: int) -> torch.Tensor:
    """The learnt position of each patch, in the order of `_order_of`."""
    places_N = get_vision_nearest_position_ids(torch.tensor(segments), per_side)
    return places_N[_order_of(segments, num_merges)]


def embed(
    embeddings: Any, patches_NC: torch.Tensor, segments: Sequence[Sides], num_merges: int
) -> torch.Tensor:
    """Hidden states before the first layer, sorted for the mergers.

    Args:
        embeddings: Hugging Face's.
        patches_NC: pixels of a patch, channel by channel; patches row by row, segment after segment.
        segments: rows and columns of patches of each.
        num_merges: mergers behind each other: 1 or 2.

    Returns:
        hidden_NV.
    """
    # The convolution, whose stride is its kernel, for patches that are cut out already.
    linear = embeddings.patch_embedding
    hidden_NV = F.linear(patches_NC, linear.weight.flatten(1), linear.bias)
    sides, device = tuple(segments), hidden_NV.device
    places_N = _places_of(sides, num_merges, embeddings.num_patches_per_side)
    learnt_NV = embeddings.position_embedding(sent(places_N, device))
    return hidden_NV[sent(_order_of(sides, num_merges), device)] + learnt_NV


def bounds_of(segments: Sequence[Sides], device: torch.device, *, is_merged: bool = False) -> Bounds:
    """Who sees whom.

    Args:
        segments: rows and columns of patches of each.
        device: of the tensors.
        is_merged: whether layers read a row for a window.

    Returns:
        Bounds without angles.
    """
    each = WINDOW if is_merged else 1
    return bounds_of_patches([rows * columns // each for rows, columns in segments], (), device)


def run_layer(layer: Any, hidden_TV: torch.Tensor, bounds: Bounds) -> torch.Tensor:
    """One layer of the encoder.

    Args:
        layer: Hugging Face's.
        hidden_TV: before it.
        bounds: of the segments.

    Returns:
        hidden_TV after it.
    """
    return layer(
        hidden_TV[None],
        None,
        cu_seqlens=bounds.cu_seqlens,
        max_seqlen=max(bounds.segment_tokens),
        segment_tokens=bounds.segment_tokens,
    )[0]


def merge_windows(merger: Any, hidden_NV: torch.Tensor) -> torch.Tensor:
    """A row for each window: attention within it, then an MLP over its patches side by side.

    Hugging Face's function calls attention once a window; here all windows are one batch.

    Args:
        merger: Hugging Face's `vit_merger`.
        hidden_NV: the patches of a window side by side.

    Returns:
        hidden_WV.
    """
    attention, width = merger.self_attn, hidden_NV.shape[1]
    normed_NV = merger.layer_norm1(hidden_NV)
    maps = (attention.q_proj, attention.k_proj, attention.v_proj)
    states = [
        linear(normed_NV).view(-1, WINDOW, attention.num_heads, attention.head_dim).transpose(1, 2)
        for linear in maps
    ]
    parts = zip(*(state_WHTd.split(_WINDOWS_MAX) for state_WHTd in states), strict=True)
    seen = [
        F.scaled_dot_product_attention(q, k, v, scale=attention.scaling).transpose(1, 2) for q, k, v in parts
    ]
    seen_NV = (seen[0] if len(seen) == 1 else torch.cat(seen)).reshape(-1, width)
    hidden_W4V = (hidden_NV + attention.out_proj(seen_NV)).view(-1, WINDOW, width)
    inner = merger.act(merger.linear_1(merger.pre_norm(hidden_W4V.flatten(1))))
    return merger.linear_2(inner) + hidden_W4V.mean(1)


def project(last_norm: Any, merger: Any, hidden_TV: torch.Tensor) -> torch.Tensor:
    """Features of all segments, one after the other.

    Args:
        last_norm: of Hugging Face's tower.
        merger: Hugging Face's.
        hidden_TV: after the last layer, the four rows of a feature side by side.

    Returns:
        features_ED.
    """
    return merger.mlp[0](last_norm(hidden_TV).view(-1, WINDOW * hidden_TV.shape[1]))


def segments_of(media: Sequence[MediaGrid]) -> list[Sides]:
    """Rows and columns of patches of each segment.

    Args:
        media: that the encoder reads.

    Returns:
        Of each whole picture and slice, in order.
    """
    return [cast("Sides", sides) for grid in media for sides in grid.tile_patches()]


class MiniCpmV46(FamilyAdapter):
    """`ModelAdapter` of MiniCPM-V 4.6."""

    family = "minicpmv4_6"
    config_class = MiniCPMV4_6Config
    model_class = MiniCPMV4_6ForConditionalGeneration
    encoder_modules = ("vision_tower", "merger")
    encoder_attention = PACKED_ENCODER

    def __init__(self, model_dir: Path) -> None:
        super().__init__(model_dir)
        vision = self.vision
        self.num_encoder_layers = vision.num_hidden_layers
        self.geometry = Geometry(2**self.num_merges, vision.patch_size, None)
        self.input_shape = (vision.num_channels * vision.patch_size**2,)
        self.encoder_tokens_per_tile = _SIDE**2

    @property
    def is_merged_within(self) -> bool:
        """Whether a merger stands between the layers."""
        return self.config.downsample_mode == "16x"

    @property
    def num_merges(self) -> int:
        """Mergers behind each other."""
        return 1 + self.is_merged_within

    @property
    def num_first_layers(self) -> int:
        """Layers that read a row for a patch: those before the merger, or all."""
        return self.config.insert_layer_id + 1 if self.is_merged_within else self.num_encoder_layers

    def rules(self) -> list[Rule]:
        """See `FamilyAdapter.rules`."""
        vision, config = self.vision, self.config
        mode, place, side = config.downsample_mode, config.insert_layer_id, vision.patch_size
        layers = vision.num_hidden_layers
        window, kernel = list(vision.window_kernel_size), list(config.merge_kernel_size)
        kind = config.text_config.model_type
        return [
            Rule("text_config.model_type", kind, kind == "qwen3_5_text", "qwen3_5_text"),
            Rule(
                "vision_config.patch_size", side, isinstance(side, int) and side > 0, "a whole number above 0"
            ),
            Rule(
                "vision_config.attention_dropout", vision.attention_dropout, not vision.attention_dropout, "0"
            ),
            Rule("vision_config.window_kernel_size", window, window == [2, 2], "[2, 2]"),
            Rule("merge_kernel_size", kernel, kernel == [2, 2], "[2, 2]"),
            Rule("merger_times", config.merger_times, config.merger_times == 1, "1"),
            Rule("downsample_mode", mode, mode in ("4x", "16x"), '"4x" or "16x"'),
            Rule(
                "insert_layer_id",
                place,
                mode != "16x" or 0 <= place < layers,
                f"from 0 to {layers - 1}: the merger stands behind that layer",
            ),
        ]

    def row_width(self, layer: int) -> int:
        """See `FamilyAdapter.row_width`: a row is a window, before the merger its four patches."""
        width = self.vision.hidden_size
        return WINDOW * width if layer < self.num_first_layers else width

    def num_rows(self, media: Sequence[MediaGrid]) -> int:
        """See `FamilyAdapter.num_rows`: windows."""
        return super().num_rows(media) // WINDOW

    def before_layers(self, model: Any) -> Sequence[nn.Module]:
        """See `FamilyAdapter.before_layers`."""
        return [model.vision_tower.embeddings]

    def tower_layers(self, model: Any) -> Any:
        """See `FamilyAdapter.tower_layers`."""
        return model.vision_tower.encoder.layers

    def cut_to_run(self, model: Any, run: EncoderRun) -> None:
        """See `FamilyAdapter.cut_to_run`; the merger between layers goes with the layer before it."""
        modules = model.vision_tower._modules
        merger = modules.pop("vit_merger") if self.is_merged_within else None
        super().cut_to_run(model, run)
        if merger is not None and run.first_layer < self.num_first_layers <= run.end_layer:
            modules["vit_merger"] = merger

    def encoder_plan(self) -> LayerPlan:
        """See `FamilyAdapter.encoder_plan`."""
        vision = self.vision
        return tile_plan(
            "self_attn",
            "out_proj",
            ("mlp.fc1", "mlp.fc2", "mlp"),
            ("vision_config.num_attention_heads", vision.num_attention_heads),
            ("vision_config.intermediate_size", vision.intermediate_size),
            ("num_heads",),
        )

    def encode_run(
        self, model: Any, batch: EncoderInput, run: EncoderRun, incoming_RU: torch.Tensor | None
    ) -> torch.Tensor:
        """See `FamilyAdapter.encode_run`."""
        tower, segments = model.vision_tower, segments_of(batch.media)
        num_first = self.num_first_layers
        if incoming_RU is None:
            hidden_TV = embed(tower.embeddings, batch.inputs_N, segments, self.num_merges)
        else:
            hidden_TV = incoming_RU.reshape(-1, self.vision.hidden_size)
        bounds = bounds_of(segments, hidden_TV.device, is_merged=run.first_layer >= num_first)
        for number, layer in numbered(tower.encoder.layers):
            hidden_TV = run_layer(layer, hidden_TV, bounds)
            if self.is_merged_within and number == num_first - 1:
                hidden_TV = merge_windows(tower.vit_merger, hidden_TV)
                bounds = bounds_of(segments, hidden_TV.device, is_merged=True)
        if not run.is_last:
            return hidden_TV.reshape(-1, self.row_width(run.end_layer))
        return project(tower.post_layernorm, model.merger, hidden_TV)

    def fill(self, parameter: torch.Tensor, name: str, seed: int, std: float) -> None:
        """See `FamilyAdapter.fill`; the backbone is that of Qwen3.5."""
        fill_with_decays(parameter, name, seed, std)

    def example_media(self, num_tiles: int) -> list[MediaGrid]:
        """Pictures of 448 x 448 pixels, one a tile; see `ModelAdapter.example_media`."""
        features = _SIDE**2 // self.geometry.feature_patches
        return [MediaGrid("image", 1, *EXAMPLE_SIZE, features, patches=(_SIDE, _SIDE))] * num_tiles

    @cached_property
    def image_processor(self) -> Any:
        """Hugging Face's image processor of this model, the one that needs no torchvision."""
        return MiniCPMV4_6ImageProcessorPil.from_dict(processor_fields(self.model_dir, "image_processor"))

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
        sides = [(rows, columns) for rows, columns in found["target_sizes"].tolist()]
        if grid is not None and sides != segments_of([grid]):
            message = f"`{file}` is {sides} patches (rows, columns), profiled as {segments_of([grid])}"
            raise profile_error(message)
        # Patches lie side by side: [1, channels, side, side x patches].
        rows = found["pixel_values"][0].to(torch.float32)
        channels, side, _ = rows.shape
        return rows.view(channels, side, -1, side).permute(2, 0, 1, 3).flatten(1)


ADAPTER = MiniCpmV46
