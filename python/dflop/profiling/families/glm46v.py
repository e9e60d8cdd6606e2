"""GLM-4.6V of type `glm46v`: the pieces of GLM-4.1V."""

from __future__ import annotations

from typing import TYPE_CHECKING

from dflop.models.families.glm46v import Glm46v
from dflop.profiling.families.qwen3_vl import pieces_of

if TYPE_CHECKING:
    from pathlib import Path

    from dflop.profiling.pieces import Piece


def pieces(model_dir: Path) -> list[Piece]:
    """The pieces of a GLM-4.6V model.

    Args:
        model_dir: folder with `config.json`.

    Returns:
        Six pieces.

    Raises:
        ProfileError: the configuration asks for what is not built here; the message names the field.
    """
    return pieces_of(Glm46v(model_dir))
