"""Mistral3: pictures at their own resolution in patches (Pixtral).

    encoder_embedding   patches_TC -> hidden_TV      also rotary angles, computed once a call
    encoder_layer       hidden_TV  -> hidden_TV      attention within a picture
    projector           hidden_TV  -> features_ED    merge^2 neighbouring patches a feature

Shape letters: T patches (encoder tokens), C values of a patch, E feature tokens, V and D widths of encoder
and backbone. Only the layers are cut by tensor parallelism.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from torch import nn

from dflop.models.families.mistral3 import Mistral3, bounds_of, embed, run_layer
from dflop.models.packing import PACKED
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
from dflop.profiling.families.tiles import Modules
from dflop.profiling.pieces import AttentionKind

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    import torch

    from dflop.models.patches import Bounds
    from dflop.profiling.pieces import Piece, PieceSettings


class _Embedding(nn.Module):
    """Patches to hidden states, and the angles of their positions, which a call computes once."""

    def __init__(self, tower: Any) -> None:
        super().__init__()
        self.patch_conv, self.ln_pre = tower.patch_conv, tower.ln_pre
        self.rotary = tower.patch_positional_embedding

    def forward(self, patches_TC: torch.Tensor, pictures: Sequence[tuple[int, int]]) -> torch.Tensor:
        """Hidden states before the first layer: hidden_TV."""
        hidden_TV = embed(self, patches_TC)
        bounds_of(self.rotary, pictures, hidden_TV)
        return hidden_TV


class _Layers(nn.Module):
    """A run of encoder layers."""

    def __init__(self, tower: Any) -> None:
        super().__init__()
        self.layers, self.rotary = tower.transformer.layers, tower.patch_positional_embedding

    def forward(self, hidden_TV: torch.Tensor, bounds: Bounds) -> torch.Tensor:
        """Hidden states after the layers: hidden_TV."""
        for layer in self.layers:
            hidden_TV = run_layer(layer, hidden_TV, bounds)
        return hidden_TV


def pieces(model_dir: Path) -> list[Piece]:
    """The pieces of a Mistral3 model.

    Args:
        model_dir: folder with `config.json`.

    Returns:
        Six pieces.

    Raises:
        ProfileError: the configuration asks for what is not built here; the message names the field.
    """
    # The adapter of training checks the configuration, and gives the geometry.
    return pieces_of(Mistral3(model_dir))


def pieces_of(family: Mistral3) -> list[Piece]:
    """The pieces of a model whose encoder is Pixtral's.

    Args:
        family: its adapter.

    Returns:
        Six pieces.
    """
    source = Source(family.model_dir, family.config_class, family.model_class, set_hidden_layers, PACKED)
    vision, plan, cell = source.encoder, family.encoder_plan(), family.geometry.feature_patches

    def tower_of(whole: Any) -> Any:
        """The vision tower. Its rotary embedding is real; all else is on the meta device."""
        tower = family.tower(whole.model)
        tower.patch_positional_embedding = type(tower.patch_positional_embedding)(vision)
        return tower

    def pictures(segments: Sequence[int]) -> list[tuple[int, int]]:
        return [family.geometry.square(tokens)[1:] for tokens in segments]

    def take_layers(whole: Any, settings: PieceSettings) -> nn.Module:
        tower = tower_of(whole)
        for layer in tower.transformer.layers:
            cut_layer(layer, plan, settings.tensor_parallel_degree)
        return _Layers(tower)

    def feed_patches(_: Any, segments: Sequence[int], settings: PieceSettings) -> Fed:
        return Fed(random_states(settings, sum(segments), *family.input_shape), (pictures(segments),))

    def feed_layers(module: Any, segments: Sequence[int], settings: PieceSettings) -> Fed:
        leaf = random_states(settings, sum(segments), vision.hidden_size)
        return Fed(leaf, (bounds_of(module.rotary, pictures(segments), leaf),))

    def feed_projector(_: Any, segments: Sequence[int], settings: PieceSettings) -> Fed:
        return Fed(random_states(settings, sum(segments), vision.hidden_size), (pictures(segments),))

    def kind(settings: PieceSettings) -> AttentionKind:
        heads = vision.num_attention_heads // settings.tensor_parallel_degree
        return AttentionKind(heads, heads, vision.hidden_size // vision.num_attention_heads, is_causal=False)

    count: int = vision.num_hidden_layers
    at_once = layers_at_once(count, family.tower_layers(source.whole(1).model)[0])
    encoder = [
        ModelPiece(
            "encoder_embedding",
            1,
            source,
            lambda whole, _: _Embedding(tower_of(whole)),
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
            "projector",
            1,
            source,
            lambda whole, _: Modules(whole, family.encoder_modules[1:], family.project),
            feed_projector,
            size_unit=cell,
        ),
    ]
    return [*encoder, *backbone_pieces(source)]
