"""Qwen3-VL: as Qwen2-VL, with learnt positions, and features of several layers (DeepStack).

    encoder_embedding   patches_TC -> hidden_TV      with learnt positions, and rotary angles
    encoder_layer       hidden_TV  -> hidden_TV      attention within a picture or a frame pair
    projector           hidden_TV  -> features_EW    all mergers: W is D times their number
    llm_embedding       features_EW -> hidden_TW     features in their places; layers add the rest later

What a layer adds to its result (one sum over the tokens of a pack) is not measured.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from dflop.models.families.qwen3_vl import Qwen3Vl
from dflop.models.packing import PACKED_ENCODER
from dflop.profiling.families.backbone import backbone_pieces
from dflop.profiling.families.qwen2_vl import set_layers, vision_pieces
from dflop.profiling.families.source import Source

if TYPE_CHECKING:
    from pathlib import Path

    from dflop.models.patches import PatchFamily
    from dflop.profiling.pieces import Piece


def pieces(model_dir: Path) -> list[Piece]:
    """The pieces of a Qwen3-VL model.

    Args:
        model_dir: folder with `config.json`.

    Returns:
        Six pieces.

    Raises:
        ProfileError: the configuration asks for what is not built here; the message names the field.
    """
    return pieces_of(Qwen3Vl(model_dir))


def pieces_of(family: PatchFamily) -> list[Piece]:
    """The pieces of a model whose encoder has one kind of layers, as Qwen3-VL, Qwen3.5 and GLM-4.1V.

    Args:
        family: the adapter of training, which has checked the configuration and gives the geometry.

    Returns:
        Six pieces.
    """
    source = Source(family.model_dir, family.config_class, family.model_class, set_layers, PACKED_ENCODER)
    counts = {"encoder_layer": source.encoder.depth}
    return [
        *vision_pieces(source, family, counts),
        *backbone_pieces(source, family.feature_width),
    ]
