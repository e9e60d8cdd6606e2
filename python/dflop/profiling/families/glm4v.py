"""GLM-4.1V: as Qwen2-VL, with learnt positions, a convolution and a gated MLP as projector.

    encoder_embedding   patches_TC -> hidden_TV      norm and learnt positions, and rotary angles
    encoder_layer       hidden_TV  -> hidden_TV      attention within a picture or a frame pair
    projector           hidden_TV  -> features_ED    norm, convolution over merge^2 patches, MLP
    llm_layer           hidden_TD  -> hidden_TD      with norms before and after attention and MLP

They are made as those of Qwen3-VL: its encoder too has one kind of layers.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from dflop.models.families.glm4v import Glm4v
from dflop.profiling.families.qwen3_vl import pieces_of

if TYPE_CHECKING:
    from pathlib import Path

    from dflop.profiling.pieces import Piece


def pieces(model_dir: Path) -> list[Piece]:
    """The pieces of a GLM-4.1V model.

    Args:
        model_dir: folder with `config.json`.

    Returns:
        Six pieces.

    Raises:
        ProfileError: the configuration asks for what is not built here; the message names the field.
    """
    return pieces_of(Glm4v(model_dir))
