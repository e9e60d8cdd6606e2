"""PaddleOCR-VL: pages at their own resolution in patches.

    encoder_embedding   patches_TC -> hidden_TV      also rotary angles, computed once a call
    encoder_layer       hidden_TV  -> hidden_TV      attention within a page
    projector           hidden_TV  -> features_ED    merge^2 neighbouring patches a feature

Shape letters: T patches (encoder tokens), C values of a patch, E feature tokens, V and D widths of encoder
and backbone. Only the layers are cut by tensor parallelism.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from torch import nn

from dflop.models.families.paddleocr_vl import PaddleOcrVl, bounds_of, embed, lay_out_pages, project
from dflop.models.packing import PACKED_ENCODER
from dflop.models.patches import run_layer
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

    from dflop.models.families.paddleocr_vl import Places
    from dflop.models.patches import Bounds
    from dflop.profiling.pieces import Piece, PieceSettings


class _Embedding(nn.Module):
    """Patches to hidden states, and the angles of their positions, which a call computes once."""

    def __init__(self, tower: Any) -> None:
        super().__init__()
        # Not the buffer beside them, which no forward reads.
        self.patch_embedding = tower.embeddings.patch_embedding
        self.position_embedding = tower.embeddings.position_embedding
        self.rotary = tower.encoder.rotary_pos_emb

    def forward(self, patches_TC: torch.Tensor, places: Places) -> torch.Tensor:
        """Hidden states before the first layer: hidden_TV."""
        hidden_TV = embed(self, patches_TC, places)
        bounds_of(self.rotary, places, hidden_TV)
        return hidden_TV


class _Layers(nn.Module):
    """A run of encoder layers."""

    def __init__(self, tower: Any) -> None:
        super().__init__()
        self.layers, self.rotary = tower.encoder.layers, tower.encoder.rotary_pos_emb

    def forward(self, hidden_TV: torch.Tensor, bounds: Bounds) -> torch.Tensor:
        """Hidden states after the layers: hidden_TV."""
        for layer in self.layers:
            hidden_TV = run_layer(layer, hidden_TV, bounds)
        return hidden_TV


class _Projector(nn.Module):
    """Hidden states to features."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.post_layernorm, self.projector = model.visual.vision_model.post_layernorm, model.projector

    def forward(self, hidden_TV: torch.Tensor) -> torch.Tensor:
        """Features: features_ED."""
        return project(self.post_layernorm, self.projector, hidden_TV)


def pieces(model_dir: Path) -> list[Piece]:
    """The pieces of a PaddleOCR-VL model.

    Args:
        model_dir: folder with `config.json`.

    Returns:
        Six pieces.

    Raises:
        ProfileError: the configuration asks for what is not built here; the message names the field.
    """
    # The adapter of training checks the configuration, and gives the geometry.
    family = PaddleOcrVl(model_dir)
    source = Source(model_dir, family.config_class, family.model_class, set_hidden_layers, PACKED_ENCODER)
    vision, plan, cell = source.encoder, family.encoder_plan(), family.geometry.feature_patches

    def tower_of(whole: Any) -> Any:
        """The vision tower. Its rotary embedding is real; all else is on the meta device."""
        tower = whole.model.visual.vision_model
        tower.encoder.rotary_pos_emb = type(tower.encoder.rotary_pos_emb)(vision)
        return tower

    def places(segments: Sequence[int], settings: PieceSettings) -> Places:
        pages = [family.geometry.square(tokens)[1:] for tokens in segments]
        return lay_out_pages(pages, family.geometry, settings.device)

    def take_layers(whole: Any, settings: PieceSettings) -> nn.Module:
        tower = tower_of(whole)
        for layer in tower.encoder.layers:
            cut_layer(layer, plan, settings.tensor_parallel_degree)
        return _Layers(tower)

    def feed_patches(_: Any, segments: Sequence[int], settings: PieceSettings) -> Fed:
        patches_TC = random_states(settings, sum(segments), *family.input_shape)
        return Fed(patches_TC, (places(segments, settings),))

    def feed_layers(module: Any, segments: Sequence[int], settings: PieceSettings) -> Fed:
        leaf = random_states(settings, sum(segments), vision.hidden_size)
        return Fed(leaf, (bounds_of(module.rotary, places(segments, settings), leaf),))

    def feed_projector(_: Any, segments: Sequence[int], settings: PieceSettings) -> Fed:
        return Fed(random_states(settings, sum(segments), vision.hidden_size), ())

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
            "projector", 1, source, lambda whole, _: _Projector(whole.model), feed_projector, size_unit=cell
        ),
    ]
    return [*encoder, *backbone_pieces(source)]
