"""LFM2-VL: pictures, tiles and thumbnails at their own resolution; layers with a short convolution.

    encoder_embedding   patches_TC -> hidden_TV      also the table of positions, scaled to the size of each
    encoder_layer       hidden_TV  -> hidden_TV      attention within a tile
    projector           hidden_TV  -> features_ED    factor^2 neighbouring patches a feature
    llm_layer           hidden_TD  -> hidden_TD      the mean of layers with a convolution and with attention

Shape letters: T patches (encoder tokens), C values of a patch, E feature tokens, V and D widths of encoder
and backbone. Only the layers are cut by tensor parallelism.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from torch import nn

from dflop.models.families.lfm2_vl import Lfm2Vl
from dflop.models.naflex import bounds_of, embed, project, run_layer
from dflop.models.tensor import cut_layer
from dflop.models.towers import inner_tower
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


class _Embedding(nn.Module):
    """Patches to hidden states."""

    def __init__(self, tower: Any) -> None:
        super().__init__()
        self.embeddings = tower.embeddings

    def forward(self, patches_TC: torch.Tensor, segments: Sequence[Sides]) -> torch.Tensor:
        """Hidden states before the first layer: hidden_TV."""
        return embed(self.embeddings, patches_TC, segments)


class _Layers(nn.Module):
    """A run of encoder layers."""

    def __init__(self, tower: Any) -> None:
        super().__init__()
        self.layers = tower.encoder.layers

    def forward(self, hidden_TV: torch.Tensor, bounds: Bounds) -> torch.Tensor:
        """Hidden states after the layers: hidden_TV."""
        for layer in self.layers:
            hidden_TV = run_layer(layer, hidden_TV, bounds)
        return hidden_TV


class _Projector(nn.Module):
    """Hidden states to features."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.post_layernorm = inner_tower(model.vision_tower).post_layernorm
        self.multi_modal_projector = model.multi_modal_projector

    def forward(self, hidden_TV: torch.Tensor, segments: Sequence[Sides]) -> torch.Tensor:
        """Features: features_ED."""
        return project(self.post_layernorm, self.multi_modal_projector, hidden_TV, segments)


def pieces(model_dir: Path) -> list[Piece]:
    """The pieces of an LFM2-VL model.

    Args:
        model_dir: folder with `config.json`.

    Returns:
        Six pieces.

    Raises:
        ProfileError: the configuration asks for what is not built here; the message names the field.
    """
    # The adapter of training checks the configuration, and gives the geometry.
    family = Lfm2Vl(model_dir)
    source = Source(
        model_dir, family.config_class, family.model_class, set_hidden_layers, family.encoder_attention
    )
    vision, plan, cell = source.encoder, family.encoder_plan(), family.geometry.feature_patches

    def sides(segments: Sequence[int]) -> list[Sides]:
        return [family.geometry.square(tokens)[1:] for tokens in segments]

    def take_layers(whole: Any, settings: PieceSettings) -> nn.Module:
        tower = inner_tower(whole.model.vision_tower)
        for layer in tower.encoder.layers:
            cut_layer(layer, plan, settings.tensor_parallel_degree)
        return _Layers(tower)

    def feed_patches(_: Any, segments: Sequence[int], settings: PieceSettings) -> Fed:
        return Fed(random_states(settings, sum(segments), *family.input_shape), (sides(segments),))

    def feed_layers(_: Any, segments: Sequence[int], settings: PieceSettings) -> Fed:
        leaf = random_states(settings, sum(segments), vision.hidden_size)
        return Fed(leaf, (bounds_of(sides(segments), leaf.device),))

    def feed_projector(_: Any, segments: Sequence[int], settings: PieceSettings) -> Fed:
        return Fed(random_states(settings, sum(segments), vision.hidden_size), (sides(segments),))

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
            lambda whole, _: _Embedding(inner_tower(whole.model.vision_tower)),
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
