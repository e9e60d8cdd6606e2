"""GLM-4.5V: the pieces of GLM-4.1V; an `llm_layer` has a router, all experts and the shared one.

The first layers, which have no experts, count as layers with experts: these need more memory and mostly more
time. Values are random, so each expert gets about as many rows as any other. What a trained router deals out
less evenly is not measured.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from dflop.models.families.glm4v_moe import Glm4vMoe
from dflop.profiling.families.qwen3_vl import pieces_of

if TYPE_CHECKING:
    from pathlib import Path

    from dflop.profiling.pieces import Piece


def pieces(model_dir: Path) -> list[Piece]:
    """The pieces of a GLM-4.5V model.

    Args:
        model_dir: folder with `config.json`.

    Returns:
        Six pieces.

    Raises:
        ProfileError: the configuration asks for what is not built here; the message names the field.
    """
    return pieces_of(Glm4vMoe(model_dir))
