"""MiniCPM-V 4.6: pictures and slices at their own resolution; a merger between the layers of the encoder.

    encoder_embedding   patches_TC -> hidden_TV      also learnt positions; then the merger between the layers
    encoder_layer       hidden_TV  -> hidden_TV      the mean of layers before and behind the merger
    projector           hidden_TV  -> features_ED    with a merger between the layers of a row for a window

Sizes are those of patches in all pieces. Layers behind the merger read a row for a window of four. Shape
letters: T patches (encoder tokens), C values of a patch, E feature tokens, V and D widths of encoder and
backbone. Only the layers are cut by tensor parallelism.
"""

from __future__ import annotations

from fractions import Fraction
from typing import TYPE_CHECKING, Any

from torch import nn

from dflop.models.families.minicpmv4_6 import (
    WINDOW,
    MiniCpmV46,
    bounds_of,
    embed,
    merge_windows,
    project,
    run_layer,
)
from dflop.models.tensor import cut_layer
from dflop.profiling.families.backbone import backbone_pieces
from dflop.profiling.families.source import (
    Fed,
    ModelPiece,
    Source,
    layers_at_once,
    random_states,
    set_hidden_layers,
)
from dflop.profiling.pieces import AttentionKind

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    import torch

    from dflop.models.naflex import Sides
    from dflop.models.patches import Bounds
    from dflop.profiling.pieces import Piece, PieceSettings

# The profiler runs so many layers at once, at most.
_RUN_MAX = 8


class _Embedding(nn.Module):
    """Patches to hidden states, and what merges them later."""

    def __init__(self, tower: Any, num_merges: int) -> None:
        super().__init__()
        self.embeddings = tower.embeddings
        # Held, and not run, where nothing is merged between layers.
        setattr(self, "vit_merger" if num_merges > 1 else "unread", tower.vit_merger)
        self._num_merges = num_merges

    def forward(self, patches_TC: torch.Tensor, segments: Sequence[Sides]) -> torch.Tensor:
        """Hidden states: hidden_TV, or a row for a window."""
        hidden_TV = embed(self.embeddings, patches_TC, segments, self._num_merges)
        return hidden_TV if self._num_merges == 1 else merge_windows(self.vit_merger, hidden_TV)


class _Layers(nn.Module):
    """A run of encoder layers: some before the merger, then some behind it."""

    def __init__(self, tower: Any, num_first: int) -> None:
        super().__init__()
        self.layers = tower.encoder.layers
        self._num_first = num_first

    def forward(self, hidden_TV: torch.Tensor, bounds: Bounds, merged: Bounds) -> torch.Tensor:
        """Hidden states after the layers: hidden_TV, or a row for a window."""
        for number, layer in enumerate(self.layers):
            if number == self._num_first:
                # In place of the merger, which is measured with the embedding.
                hidden_TV = hidden_TV.view(-1, WINDOW, hidden_TV.shape[1]).mean(1)
            hidden_TV = run_layer(layer, hidden_TV, bounds if number < self._num_first else merged)
        return hidden_TV


class _Projector(nn.Module):
    """Hidden states to features."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.post_layernorm = model.vision_tower.post_layernorm
        self.merger = model.merger

    def forward(self, hidden_TV: torch.Tensor) -> torch.Tensor:
        """Features: features_ED."""
        return project(self.post_layernorm, self.merger, hidden_TV)


def run_like_all(count: int, num_first: int) -> tuple[int, int]:
    """How many layers stand for all, because they have nearly the share of all before the merger.

    Args:
        count: layers of the encoder.
        num_first: of them, before the merger.

    Returns:
        Layers to run, at most 8, and how many of them stand before it; the fewest whose share is nearest.
    """
    share = Fraction(num_first, count)
    length = min(
        range(1, min(_RUN_MAX, count) + 1),
        key=lambda n: (abs(Fraction(round(share * n), n) - share), n),
    )
    return length, round(share * length)


def pieces(model_dir: Path) -> list[Piece]:
    """The pieces of a MiniCPM-V 4.6 model.

    Args:
        model_dir: folder with `config.json`.

    Returns:
        Six pieces.

    Raises:
        ProfileError: the configuration asks for what is not built here; the message names the field.
    """
    # The adapter of training checks the configuration, and gives the geometry.
    family = MiniCpmV46(model_dir)
    source = Source(
        model_dir, family.config_class, family.model_class, set_hidden_layers, family.encoder_attention
    )
    vision, plan, cell = source.encoder, family.encoder_plan(), family.geometry.feature_patches
    count, num_first = family.num_encoder_layers, family.num_first_layers
    width, each = vision.hidden_size, WINDOW if family.is_merged_within else 1
    if num_first < count:
        at_once, first_at_once = run_like_all(count, num_first)
    else:
        at_once = layers_at_once(count, family.tower_layers(source.whole(1).model)[0])
        first_at_once = at_once

    def sides(segments: Sequence[int]) -> list[Sides]:
        return [family.geometry.square(tokens)[1:] for tokens in segments]

    def take_layers(whole: Any, settings: PieceSettings) -> nn.Module:
        tower = whole.model.vision_tower
        for layer in tower.encoder.layers:
            cut_layer(layer, plan, settings.tensor_parallel_degree)
        return _Layers(tower, first_at_once)

    def feed_patches(_: Any, segments: Sequence[int], settings: PieceSettings) -> Fed:
        return Fed(random_states(settings, sum(segments), *family.input_shape), (sides(segments),))

    def feed_layers(_: Any, segments: Sequence[int], settings: PieceSettings) -> Fed:
        leaf, pictures = random_states(settings, sum(segments), width), sides(segments)
        bounds = [bounds_of(pictures, leaf.device, is_merged=merged) for merged in (False, True)]
        return Fed(leaf, tuple(bounds))

    def feed_projector(_: Any, segments: Sequence[int], settings: PieceSettings) -> Fed:
        return Fed(random_states(settings, sum(segments) // each, width))

    def kind(settings: PieceSettings) -> AttentionKind:
        heads = vision.num_attention_heads // settings.tensor_parallel_degree
        # A quarter of the tokens, each of which sees a quarter: a 16th.
        share = (num_first + (count - num_first) / WINDOW**2) / count
        return AttentionKind(heads, heads, width // vision.num_attention_heads, False, layers_with=share)

    encoder = [
        ModelPiece(
            "encoder_embedding",
            1,
            source,
            lambda whole, _: _Embedding(whole.model.vision_tower, family.num_merges),
            feed_patches,
            wants_input_gradient=False,
            size_unit=cell,
        ),
        ModelPiece(
            "encoder_layer",
            count,
            source,
            take_layers,
            feed_layers,
            num_layers=at_once,
            kind=kind,
            size_unit=cell,
        ),
        ModelPiece(
            "projector", 1, source, lambda whole, _: _Projector(whole.model), feed_projector, size_unit=cell
        ),
    ]
    return [*encoder, *backbone_pieces(source)]
