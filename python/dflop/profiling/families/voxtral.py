"""Voxtral: the pieces of Qwen2-Audio, without a mask, with a projector of four tokens and two maps.

    encoder_embedding   mel_NBF    -> hidden_NPV      two convolutions; 3,000 mel frames give 1,500 tokens
    encoder_layer       hidden_NPV -> hidden_NPV      attention within a window, silence included
    projector           hidden_NPV -> features_ED     norm, four tokens side by side, two linear maps

A sound has as many windows as it begins; all are read whole, and the data profile counts them so. Shape
letters: see `qwen2_audio.py`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from dflop.models.families.voxtral import Voxtral
from dflop.profiling.families.qwen2_audio import pieces_of

if TYPE_CHECKING:
    from pathlib import Path

    from dflop.profiling.pieces import Piece


def pieces(model_dir: Path) -> list[Piece]:
    """The pieces of a Voxtral model.

    Args:
        model_dir: folder with `config.json`.

    Returns:
        Six pieces.

    Raises:
        ProfileError: the configuration asks for what is not built here; the message names the field.
    """
    return pieces_of(Voxtral(model_dir), pooling=(), is_masked=False)
