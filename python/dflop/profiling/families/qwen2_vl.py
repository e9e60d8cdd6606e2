"""Qwen2-VL: pictures at their own resolution in patches, frames of a video in pairs.

    encoder_embedding   patches_TC -> hidden_TV      also rotary angles, computed once a call
    encoder_layer       hidden_TV  -> hidden_TV      attention within a picture or a frame pair
    projector           hidden_TV  -> features_ED    merge^2 neighbouring patches a feature

Shape letters: T patches (encoder tokens), C values of a patch, E feature tokens, V and D widths of encoder
and backbone. Only the layers are cut by tensor parallelism. `vision_pieces` serves
the other families of this kind too.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from transformers import Qwen2VLConfig, Qwen2VLForConditionalGeneration

from dflop.models.families.qwen2_vl import Qwen2Vl
from dflop.models.packing import PACKED_ENCODER
from dflop.models.patch_layout import Patches, lay_out
from dflop.models.tensor import cut_layer
from dflop.profiling.families.backbone import backbone_pieces
from dflop.profiling.families.qwen_vision import EncoderLayers, Merger, PatchEmbedding
from dflop.profiling.families.source import (
    Fed,
    ModelPiece,
    Source,
    layers_at_once,
    random_states,
)
from dflop.profiling.pieces import AttentionKind

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path

    from torch import nn

    from dflop.models.patches import PatchFamily
    from dflop.profiling.pieces import Piece, PieceSettings


def vision_pieces(source: Source, family: PatchFamily, counts: dict[str, int]) -> list[ModelPiece]:
    """The pieces of the encoder, for all families of the Qwen-VL kind.

    Args:
        source: of the model.
        family: the adapter of training, which says how pictures and layers are cut.
        counts: number of layers by name: `encoder_layer`, `encoder_window_layer`.

    Returns:
        Embedding, layers of each kind that the model has, projector.
    """
    vision, geometry, width = source.encoder, family.geometry, family.encoder_width
    plan = family.encoder_plan()
    cell = geometry.feature_patches
    channels = getattr(vision, "in_channels", 3)
    values = channels * vision.temporal_patch_size * vision.patch_size**2

    def squares(segments: Sequence[int], settings: PieceSettings) -> Patches:
        return lay_out([geometry.square(tokens) for tokens in segments], geometry, settings.device)

    def strips(segments: Sequence[int], settings: PieceSettings) -> Patches:
        """Pictures that are one window high, so that all windows are full."""
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
            tower = _with_tower(whole, vision).model.visual
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
            lambda whole, _: PatchEmbedding(_with_tower(whole, vision), family),
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
        "projector", 1, source, lambda whole, _: Merger(whole, family), feed_merger, size_unit=cell
    )
    return [*found, merger]


def _with_tower(whole: Any, vision: Any) -> Any:
    """The model with a vision tower whose rotary embedding is real; all else is on the meta device."""
    tower = whole.model.visual
    tower.rotary_pos_emb = type(tower.rotary_pos_emb)(vision)
    return whole


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
    # The adapter of training checks the configuration, and gives the geometry.
    family = Qwen2Vl(model_dir)
    source = Source(model_dir, Qwen2VLConfig, Qwen2VLForConditionalGeneration, set_layers, PACKED_ENCODER)
    counts = {"encoder_layer": source.encoder.depth}
    return [*vision_pieces(source, family, counts), *backbone_pieces(source)]
