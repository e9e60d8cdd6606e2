"""SmolVLM: the pieces of Idefics3."""

from __future__ import annotations

from typing import TYPE_CHECKING

from dflop.models.families.smolvlm import SmolVlm
from dflop.profiling.families.idefics3 import pieces_of

if TYPE_CHECKING:
    from pathlib import Path

    from dflop.profiling.pieces import Piece


def pieces(model_dir: Path) -> list[Piece]:
    """The pieces of a SmolVLM model.

    Args:
        model_dir: folder with `config.json`.

    Returns:
        Six pieces.

    Raises:
        ProfileError: the configuration asks for what is not built here; the message names the field.
    """
    return pieces_of(SmolVlm(model_dir))
