"""Idefics3 and SmolVLM: tiles of a SigLIP without a CLS, pixel shuffle, a linear projector.

    encoder_embedding   pixels_NCHW -> hidden_NPV       P = patches of a tile
    encoder_layer       hidden_NPV  -> hidden_NPV       attention within a tile
    projector           hidden_NPV  -> features_ED      scale_factor^2 patches a feature

Shape letters: N tiles, V and D widths of encoder and backbone. Only the layers are cut by tensor parallelism.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from dflop.models.families.idefics3 import Idefics3
from dflop.profiling.families.backbone import backbone_pieces
from dflop.profiling.families.source import Source, set_hidden_layers
from dflop.profiling.families.tiles import Modules, TileEncoder, project_by, tile_pieces

if TYPE_CHECKING:
    from pathlib import Path

    from dflop.profiling.pieces import Piece


def pieces_of(family: Idefics3) -> list[Piece]:
    """The pieces of a model of the kind.

    Args:
        family: its adapter of training.

    Returns:
        Six pieces.
    """
    source = Source(family.model_dir, family.config_class, family.model_class, set_hidden_layers)
    vision = source.encoder
    encoder = TileEncoder(
        num_layers=vision.num_hidden_layers,
        tokens=family.encoder_tokens_per_tile,
        width=vision.hidden_size,
        shape=family.input_shape,
        plan=family.encoder_plan(),
        embedding=lambda whole: Modules(whole, ("vision_model.embeddings",), family.embed),
        layers=lambda whole: whole.model.vision_model.encoder.layers,
        projector=lambda whole: Modules(
            whole, ("vision_model.post_layernorm", "connector"), project_by(family)
        ),
        # The attention mask: none.
        arguments=(None,),
    )
    return [*tile_pieces(source, encoder), *backbone_pieces(source)]


def pieces(model_dir: Path) -> list[Piece]:
    """The pieces of an Idefics3 model.

    Args:
        model_dir: folder with `config.json`.

    Returns:
        Six pieces.

    Raises:
        ProfileError: the configuration asks for what is not built here; the message names the field.
    """
    return pieces_of(Idefics3(model_dir))
