"""Qwen2-VL: pictures at their own resolution in patches, frames of a video in pairs.

    encoder_embedding   patches_TC -> hidden_TV      once a call: the angles of the rotary embedding too
    encoder_layer       hidden_TV  -> hidden_TV      attention within a picture or a frame pair
    projector           hidden_TV  -> features_ED    merge^2 neighbouring patches a feature

Shape letters: T patches (encoder tokens), C values of a patch, V and D widths of encoder and backbone. What
Qwen2.5-VL adds, windows, is here too: there patches lie window by window between embedding and projector.
Only the layers are cut by tensor parallelism.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from transformers import Qwen2VLConfig, Qwen2VLForConditionalGeneration
from transformers.vision_utils import get_vision_position_ids, get_vision_window_index

from dflop.models.packing import PACKED_ENCODER
from dflop.profiling.families.backbone import backbone_pieces, backbone_rules
from dflop.profiling.families.shards import Cut, LayerPlan, cut_layer
from dflop.profiling.families.source import (
    Fed,
    ModelPiece,
    Source,
    bounds_of,
    layers_at_once,
    random_states,
)
from dflop.profiling.pieces import AttentionKind

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path

    from dflop.profiling.pieces import Piece, PieceSettings


@dataclass(frozen=True)
class Geometry:
    """How pictures are cut."""

    merge: int
    """Patches a feature, each way."""
    patch_size: int
    """Side of a patch, in pixels."""
    window_size: int | None
    """Side of a window, in pixels; None where the layers have none."""

    @property
    def feature_patches(self) -> int:
        """Patches a feature."""
        return self.merge**2

    @property
    def window_side(self) -> int:
        """Patches along a side of a whole window."""
        assert self.window_size is not None, "asked for where there are windows"
        return self.window_size // self.merge // self.patch_size * self.merge

    def square(self, tokens: int) -> tuple[int, int, int]:
        """The picture of so many patches that is nearest to a square.

        Args:
            tokens: a multiple of `feature_patches`.

        Returns:
            (1, rows, columns) in patches.
        """
        cells = tokens // self.feature_patches
        rows = next(rows for rows in range(math.isqrt(cells), 0, -1) if cells % rows == 0)
        return (1, rows * self.merge, cells // rows * self.merge)


@dataclass(frozen=True)
class Patches:
    """Where the patches of a microbatch lie."""

    positions_T2: torch.Tensor
    """Row and column of each."""
    order: torch.Tensor | None
    """Features in the order of their windows; None: as they come."""
    segments: tuple[int, ...]
    """Patches of each picture or frame pair."""
    windows: tuple[int, ...]
    """Patches of each window."""


def lay_out(pictures: Sequence[tuple[int, int, int]], geometry: Geometry, device: torch.device) -> Patches:
    """Where patches lie, by Hugging Face's own functions.

    Args:
        pictures: (frame pairs, rows, columns) each, in patches.
        geometry: of the model.
        device: of the tensors.

    Returns:
        Positions, order and segments.
    """
    grid = torch.tensor(pictures)
    positions_T2 = get_vision_position_ids(grid, geometry.merge).to(device)
    segments = tuple(rows * columns for pairs, rows, columns in pictures for _ in range(pairs))
    if geometry.window_size is None:
        return Patches(positions_T2, None, segments, ())
    order, bounds = get_vision_window_index(
        grid, geometry.merge, window_size=geometry.window_size, patch_size=geometry.patch_size
    )
    return Patches(positions_T2, order.to(device), segments, tuple(bounds.diff().tolist()))


def _reorder(rows: torch.Tensor, order: torch.Tensor, feature_patches: int) -> torch.Tensor:
    blocks = rows.reshape(rows.shape[0] // feature_patches, feature_patches, -1)
    return blocks[order].reshape(rows.shape)


class PatchEmbedding(nn.Module):
    """Patches to hidden states, window by window."""

    def __init__(self, tower: Any, geometry: Geometry) -> None:
        super().__init__()
        self.patch_embed, self.rotary, self.geometry = tower.patch_embed, tower.rotary_pos_emb, geometry

    def forward(self, patches_TC: torch.Tensor, patches: Patches) -> torch.Tensor:
        """Hidden states before the first layer.

        Args:
            patches_TC: pixels.
            patches: where they lie.

        Returns:
            hidden_TV.
        """
        hidden_TV = self.patch_embed(patches_TC)
        # Not of the layers, whose time is multiplied by their number: a call does it once.
        angles = self.rotary(hidden_TV, patches.positions_T2)
        if patches.order is None:
            return hidden_TV
        each = self.geometry.feature_patches
        for angle in angles:
            _reorder(angle, patches.order, each)
        return _reorder(hidden_TV, patches.order, each)


@dataclass(frozen=True)
class Bounds:
    """Who sees whom in a layer."""

    cu_seqlens: torch.Tensor
    """[M + 1] int32."""
    segment_tokens: tuple[int, ...]
    """Its differences."""
    angles: tuple[torch.Tensor, ...]
    """Cosine and sine of the rotary embedding."""


class EncoderLayers(nn.Module):
    """A run of encoder layers, all of them with windows or all without."""

    def __init__(self, tower: Any, geometry: Geometry, has_windows: bool) -> None:
        super().__init__()
        self.layers, self.rotary = tower.blocks, tower.rotary_pos_emb
        self.geometry, self.has_windows = geometry, has_windows

    def bounds(self, patches: Patches, like: torch.Tensor) -> Bounds:
        """What the layers must know of these patches.

        Args:
            patches: where they lie.
            like: tells device and dtype.

        Returns:
            Argument of `forward`.
        """
        angles = self.rotary(like, patches.positions_T2)
        if patches.order is not None:
            each = self.geometry.feature_patches
            angles = tuple(_reorder(angle, patches.order, each) for angle in angles)
        tokens = patches.windows if self.has_windows else patches.segments
        return Bounds(bounds_of(tokens, like.device), tokens, angles)

    def forward(self, hidden_TV: torch.Tensor, bounds: Bounds) -> torch.Tensor:
        """Hidden states after the layers.

        Args:
            hidden_TV: before.
            bounds: who sees whom.

        Returns:
            hidden_TV.
        """
        longest = max(bounds.segment_tokens)
        for layer in self.layers:
            hidden_TV = layer(
                hidden_TV,
                cu_seqlens=bounds.cu_seqlens,
                max_seqlen=longest,
                position_embeddings=bounds.angles,
                segment_tokens=bounds.segment_tokens,
            )
        return hidden_TV


class Merger(nn.Module):
    """Hidden states to features, back in their own order."""

    def __init__(self, tower: Any) -> None:
        super().__init__()
        self.merger = tower.merger

    def forward(self, hidden_TV: torch.Tensor, order: torch.Tensor | None) -> torch.Tensor:
        """Features of all pictures, one after the other.

        Args:
            hidden_TV: after the last layer.
            order: that of `Patches`.

        Returns:
            features_ED.
        """
        features_ED = self.merger(hidden_TV)
        return features_ED if order is None else features_ED[order.argsort()]


def vision_pieces(
    source: Source,
    geometry: Geometry,
    plan: LayerPlan,
    width: int,
    counts: dict[str, int],
) -> list[ModelPiece]:
    """The pieces of the encoder, for both families.

    Args:
        source: of the model.
        geometry: how pictures are cut.
        plan: how a layer is cut.
        width: of the encoder.
        counts: layers by name: `encoder_layer`, `encoder_window_layer`.

    Returns:
        Embedding, layers of each kind that the model has, projector.
    """
    vision = source.encoder
    cell = geometry.feature_patches
    channels = getattr(vision, "in_channels", 3)
    values = channels * vision.temporal_patch_size * vision.patch_size**2

    def squares(segments: Sequence[int], settings: PieceSettings) -> Patches:
        return lay_out([geometry.square(tokens) for tokens in segments], geometry, settings.device)

    def strips(segments: Sequence[int], settings: PieceSettings) -> Patches:
        """One window high: all windows are whole."""
        side = geometry.window_side
        return lay_out([(1, side, tokens // side) for tokens in segments], geometry, settings.device)

    def feed_patches(_: Any, segments: Sequence[int], settings: PieceSettings) -> Fed:
        return Fed(random_states(settings, sum(segments), values), (squares(segments, settings),))

    def feed_layers(
        lay: Callable[[Sequence[int], PieceSettings], Patches],
    ) -> Callable[[Any, Sequence[int], PieceSettings], Fed]:
        def feed(module: Any, segments: Sequence[int], settings: PieceSettings) -> Fed:
            leaf = random_states(settings, sum(segments), width)
            return Fed(leaf, (module.bounds(lay(segments, settings), leaf),))

        return feed

    def feed_merger(_: Any, segments: Sequence[int], settings: PieceSettings) -> Fed:
        leaf = random_states(settings, sum(segments), width)
        return Fed(leaf, (squares(segments, settings).order,))

    def take_layers(has_windows: bool) -> Callable[[Any, PieceSettings], nn.Module]:
        def take(whole: Any, settings: PieceSettings) -> nn.Module:
            tower = _tower(whole, vision)
            for layer in tower.blocks:
                cut_layer(layer, plan, settings.tensor_parallel_degree)
            return EncoderLayers(tower, geometry, has_windows)

        return take

    def kind(settings: PieceSettings) -> AttentionKind:
        heads = vision.num_heads // settings.tensor_parallel_degree
        return AttentionKind(heads, heads, width // vision.num_heads, is_causal=False)

    at_once = layers_at_once(vision.depth, source.whole(1).model.visual.blocks[0])
    found = [
        ModelPiece(
            "encoder_embedding",
            1,
            source,
            lambda whole, _: PatchEmbedding(_tower(whole, vision), geometry),
            feed_patches,
            wants_input_gradient=False,
            size_unit=cell,
        )
    ]
    for name, count in counts.items():
        has_windows = name == "encoder_window_layer"
        window = geometry.window_side**2 if has_windows else None
        if count > 0:
            piece = ModelPiece(
                name,
                count,
                source,
                take_layers(has_windows),
                feed_layers(strips if has_windows else squares),
                num_layers=min(at_once, count),
                segment_tokens=window,
                kind=None if has_windows else kind,
                size_unit=window or cell,
            )
            found.append(piece)
    merger = ModelPiece(
        "projector", 1, source, lambda whole, _: Merger(whole.model.visual), feed_merger, size_unit=cell
    )
    return [*found, merger]


def _tower(whole: Any, vision: Any) -> Any:
    """The vision tower, its rotary embedding real."""
    tower = whole.model.visual
    tower.rotary_pos_emb = type(tower.rotary_pos_emb)(vision)
    return tower


def layer_plan(num_heads: int, hidden: tuple[str, ...], output: str, width: tuple[str, int]) -> LayerPlan:
    """How an encoder layer is cut.

    Args:
        num_heads: of the layer.
        hidden: names of the MLP's first maps.
        output: name of its last map.
        width: of the MLP, after the name of the field that tells it.

    Returns:
        The plan.
    """
    heads = ("vision_config.num_heads", num_heads)
    return LayerPlan(
        cuts=(
            Cut("attn.qkv", *heads, num_blocks=3),
            Cut("attn.proj", *heads, by_input=True),
            *(Cut(f"mlp.{name}", *width) for name in hidden),
            Cut(f"mlp.{output}", *width, by_input=True),
        ),
        entries=("attn", "mlp"),
        counts=(("attn", "num_heads"),),
    )


def set_layers(vision: Any, count: int) -> None:
    """Sets the number of layers.

    Args:
        vision: configuration of the encoder.
        count: layers.
    """
    vision.depth = count


def pieces(model_dir: Path) -> list[Piece]:
    """The pieces of a Qwen2-VL model.

    Args:
        model_dir: folder with `config.json`.

    Returns:
        Six pieces.

    Raises:
        ProfileError: the configuration asks for what is not built here; the message names the field.
    """
    source = Source(model_dir, Qwen2VLConfig, Qwen2VLForConditionalGeneration, set_layers, PACKED_ENCODER)
    source.check(backbone_rules(source.text))
    vision = source.encoder
    # The field is a ratio: the product is what must be cut evenly.
    width = ("vision_config.embed_dim x mlp_ratio", int(vision.embed_dim * vision.mlp_ratio))
    plan = layer_plan(vision.num_heads, ("fc1",), "fc2", width)
    geometry = Geometry(vision.spatial_merge_size, vision.patch_size, None)
    counts = {"encoder_layer": vision.depth}
    return [*vision_pieces(source, geometry, plan, vision.embed_dim, counts), *backbone_pieces(source)]
