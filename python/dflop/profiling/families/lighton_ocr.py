"""LightOnOCR: the pieces of Mistral3."""

from __future__ import annotations

from typing import TYPE_CHECKING

from dflop.models.families.lighton_ocr import LightOnOcr
from dflop.profiling.families.mistral3 import pieces_of

if TYPE_CHECKING:
    from pathlib import Path

    from dflop.profiling.pieces import Piece


def pieces(model_dir: Path) -> list[Piece]:
    """The pieces of a LightOnOCR model.

    Args:
        model_dir: folder with `config.json`.

    Returns:
        Six pieces.

    Raises:
        ProfileError: the configuration asks for what is not built here; the message names the field.
    """
    return pieces_of(LightOnOcr(model_dir))
