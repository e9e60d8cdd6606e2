"""Gemma 4: pictures in patches of their own shape; the LLM is measured in a run with both kinds of layers.

    encoder_embedding   patches_NC -> hidden_NV      also rotary angles, computed once a call
    encoder_layer       hidden_NV  -> hidden_NV      attention within a picture
    projector           hidden_NV  -> features_ED    means of squares, scale, norm, product
    llm_layer           hidden_TD  -> hidden_TD      the mean of layers that see a window and of the others

A sample that is measured has pictures, so attention is that of training with pictures. Shape letters: N
patches (encoder tokens), C values of a patch, E features, V and D widths of encoder and backbone.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from torch import nn

from dflop.models.families.gemma4 import Gemma4, bounds_of, embed, positions_of, project, run_layer
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
from dflop.profiling.pieces import AttentionKind

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    import torch

    from dflop.models.patches import Bounds
    from dflop.profiling.pieces import Piece, PieceSettings

Pictures = list[tuple[int, int, int]]
"""Of each picture 1, and rows and columns of patches."""


class _Embedding(nn.Module):
    """Patches to hidden states, and the angles of their positions, which a call computes once."""

    def __init__(self, tower: Any) -> None:
        super().__init__()
        self.patch_embedder, self.rotary = tower.patch_embedder, tower.encoder.rotary_emb

    def forward(self, patches_NC: torch.Tensor, pictures: Pictures) -> torch.Tensor:
        """Hidden states before the first layer: hidden_NV."""
        positions = positions_of(pictures, patches_NC.device)
        hidden_NV = embed(self, patches_NC, positions)
        bounds_of(self.rotary, pictures, positions, hidden_NV)
        return hidden_NV


class _Layers(nn.Module):
    """A run of encoder layers."""

    def __init__(self, tower: Any) -> None:
        super().__init__()
        self.layers, self.rotary = tower.encoder.layers, tower.encoder.rotary_emb

    def forward(self, hidden_NV: torch.Tensor, bounds: Bounds, positions_1N2: torch.Tensor) -> torch.Tensor:
        """Hidden states after the layers: hidden_NV."""
        for layer in self.layers:
            hidden_NV = run_layer(layer, hidden_NV, bounds, positions_1N2)
        return hidden_NV


class _Tower(nn.Module):
    """What the last step reads of the tower: two numbers of each column that do not train."""

    def __init__(self, tower: Any) -> None:
        super().__init__()
        self.config = tower.config
        if self.config.standardize:
            self.std_bias, self.std_scale = tower.std_bias, tower.std_scale


class _Projector(nn.Module):
    """Hidden states to features."""

    def __init__(self, whole: Any, pool: int) -> None:
        super().__init__()
        self.vision_tower, self.pool = _Tower(whole.model.vision_tower), pool
        self.embed_vision = whole.model.embed_vision

    def forward(self, hidden_NV: torch.Tensor, pictures: Pictures) -> torch.Tensor:
        """Features of all pictures: features_ED."""
        return project(self, hidden_NV, pictures, self.pool)


def pieces(model_dir: Path) -> list[Piece]:
    """The pieces of a Gemma 4 model.

    Args:
        model_dir: folder with `config.json`.

    Returns:
        Six pieces.

    Raises:
        ProfileError: the configuration asks for what is not built here; the message names the field.
    """
    # The adapter of training checks the configuration, and gives the geometry.
    family = Gemma4(model_dir)
    source = Source(
        model_dir,
        family.config_class,
        family.model_class,
        set_hidden_layers,
        PACKED,
        encoders=("vision_config",),
    )
    vision, plan, cell = source.encoder, family.encoder_plan(), family.geometry.feature_patches
    pool: int = family.geometry.merge

    def tower_of(whole: Any) -> Any:
        """The vision tower. Its buffers are real; all else is on the meta device."""
        tower = whole.model.vision_tower
        tower.encoder.rotary_emb = type(tower.encoder.rotary_emb)(vision)
        if vision.standardize:
            tower.std_bias = tower.std_bias.new_zeros(vision.hidden_size, device="cpu")
            tower.std_scale = tower.std_scale.new_ones(vision.hidden_size, device="cpu")
        return tower

    def pictures(segments: Sequence[int]) -> Pictures:
        return [family.geometry.square(tokens) for tokens in segments]

    def take_layers(whole: Any, settings: PieceSettings) -> nn.Module:
        tower = tower_of(whole)
        for layer in tower.encoder.layers:
            cut_layer(layer, plan, settings.tensor_parallel_degree)
        return _Layers(tower)

    def take_projector(whole: Any, settings: PieceSettings) -> nn.Module:
        del settings
        tower_of(whole)
        return _Projector(whole, pool)

    def feed_patches(_: Any, segments: Sequence[int], settings: PieceSettings) -> Fed:
        return Fed(random_states(settings, sum(segments), *family.input_shape), (pictures(segments),))

    def feed_layers(module: Any, segments: Sequence[int], settings: PieceSettings) -> Fed:
        leaf = random_states(settings, sum(segments), vision.hidden_size)
        own = pictures(segments)
        positions = positions_of(own, leaf.device)
        return Fed(leaf, (bounds_of(module.rotary, own, positions, leaf), positions))

    def feed_projector(_: Any, segments: Sequence[int], settings: PieceSettings) -> Fed:
        return Fed(random_states(settings, sum(segments), vision.hidden_size), (pictures(segments),))

    def kind(settings: PieceSettings) -> AttentionKind:
        heads = vision.num_attention_heads // settings.tensor_parallel_degree
        return AttentionKind(heads, heads, vision.head_dim, is_causal=False)

    count: int = vision.num_hidden_layers
    at_once = layers_at_once(count, source.whole(1).model.vision_tower.encoder.layers[0])
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
        ModelPiece("projector", 1, source, take_projector, feed_projector, size_unit=cell),
    ]
    # Of a photograph.
    return [*encoder, *backbone_pieces(source, picture_tokens=family.example_media(1)[0].num_features)]
