"""Qwen3-VL with experts: the pieces of Qwen3-VL; an `llm_layer` has a router and all its experts.

Values are random, so each expert gets about as many rows as any other. What a trained router deals out less
evenly is not measured.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from dflop.models.families.qwen3_vl_moe import Qwen3VlMoe
from dflop.profiling.families.qwen3_vl import pieces_of

if TYPE_CHECKING:
    from pathlib import Path

    from dflop.profiling.pieces import Piece


def pieces(model_dir: Path) -> list[Piece]:
    """The pieces of a Qwen3-VL model with experts.

    Args:
        model_dir: folder with `config.json`.

    Returns:
        Six pieces.

    Raises:
        ProfileError: the configuration asks for what is not built here; the message names the field.
    """
    return pieces_of(Qwen3VlMoe(model_dir))
