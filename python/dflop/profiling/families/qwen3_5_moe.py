"""Qwen3.5 with experts: the pieces of Qwen3.5; an `llm_layer` has a router, all experts and the shared one.

Values are random, so each expert gets about as many rows as any other. What a trained router deals out less
evenly is not measured.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from dflop.models.families.qwen3_5_moe import Qwen35Moe
from dflop.profiling.families.qwen3_vl import pieces_of

if TYPE_CHECKING:
    from pathlib import Path

    from dflop.profiling.pieces import Piece


def pieces(model_dir: Path) -> list[Piece]:
    """The pieces of a Qwen3.5 model with experts.

    Args:
        model_dir: folder with `config.json`.

    Returns:
        Six pieces.

    Raises:
        ProfileError: the configuration asks for what is not built here; the message names the field.
    """
    return pieces_of(Qwen35Moe(model_dir))
