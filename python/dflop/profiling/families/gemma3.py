"""Gemma 3: SigLIP over large squares; layers of the LLM are measured in a run that has both kinds.

    encoder_embedding   pixels_NCHW -> hidden_NPV
    encoder_layer       hidden_NPV  -> hidden_NPV     attention within a square
    projector           hidden_NPV  -> features_ED    norm, means of squares, norm, product
    llm_layer           hidden_TD   -> hidden_TD      the mean of layers that see a window and of the others

A sample that is measured has pictures, so attention is that of training with pictures. Shape letters: N
squares, P patches of one, E features, V and D widths of encoder and backbone.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from dflop.models.families.gemma3 import Gemma3
from dflop.models.towers import inner_tower
from dflop.profiling.families.backbone import backbone_pieces
from dflop.profiling.families.source import Source, set_hidden_layers
from dflop.profiling.families.tiles import Modules, TileEncoder, project_by, tile_pieces

if TYPE_CHECKING:
    from pathlib import Path

    from dflop.profiling.pieces import Piece


def _path(whole: Any) -> str:
    """Where the tower's modules are, below `.model`."""
    tower = whole.model.vision_tower
    return "vision_tower" if inner_tower(tower) is tower else "vision_tower.vision_model"


class _Embedding(Modules):
    """Pixels to hidden states. It also holds SigLIP's head, where there is one: that takes memory alone."""

    def __init__(self, whole: Any, family: Gemma3) -> None:
        tower = inner_tower(whole.model.vision_tower)
        # This is a buffer, so it is not filled along with the parameters.
        tower.embeddings.position_ids = torch.arange(tower.embeddings.num_positions).expand((1, -1))
        held = [name for name in ("embeddings", "head") if isinstance(getattr(tower, name, None), nn.Module)]
        super().__init__(whole, [f"{_path(whole)}.{name}" for name in held], family.embed)


def pieces(model_dir: Path) -> list[Piece]:
    """The pieces of a Gemma 3 model.

    Args:
        model_dir: folder with `config.json`.

    Returns:
        Six pieces.

    Raises:
        ProfileError: the configuration asks for what is not built here; the message names the field.
    """
    family = Gemma3(model_dir)
    source = Source(family.model_dir, family.config_class, family.model_class, set_hidden_layers)
    encoder = TileEncoder(
        num_layers=family.num_run_layers,
        tokens=family.encoder_tokens_per_tile,
        width=family.encoder_width,
        shape=family.input_shape,
        plan=family.encoder_plan(),
        embedding=lambda whole: _Embedding(whole, family),
        layers=lambda whole: inner_tower(whole.model.vision_tower).encoder.layers,
        projector=lambda whole: Modules(
            whole, [f"{_path(whole)}.post_layernorm", "multi_modal_projector"], project_by(family)
        ),
        # The attention mask: none.
        arguments=(None,),
    )
    return [*tile_pieces(source, encoder), *backbone_pieces(source, picture_tokens=family.features_per_tile)]
