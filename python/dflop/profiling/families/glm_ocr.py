"""GLM-OCR: the pieces of GLM-4.1V."""

from __future__ import annotations

from typing import TYPE_CHECKING

from dflop.models.families.glm_ocr import GlmOcr
from dflop.profiling.families.qwen3_vl import pieces_of

if TYPE_CHECKING:
    from pathlib import Path

    from dflop.profiling.pieces import Piece


def pieces(model_dir: Path) -> list[Piece]:
    """The pieces of a GLM-OCR model.

    Args:
        model_dir: folder with `config.json`.

    Returns:
        Six pieces.

    Raises:
        ProfileError: the configuration asks for what is not built here; the message names the field.
    """
    return pieces_of(GlmOcr(model_dir))
