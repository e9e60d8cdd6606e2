"""Qwen3.5: the pieces of Qwen3-VL without DeepStack; layers of the LLM are measured a whole period at once.

    llm_layer   hidden_TD -> hidden_TD     the mean of three layers with linear attention and one with full

Attention is timed alone, as for other backbones, and counts for the layers that have it. Linear attention is
part of the linear time: it takes a pack's tokens in chunks of 64 a sample.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from dflop.models.families.qwen3_5 import Qwen35
from dflop.profiling.families.qwen3_vl import pieces_of

if TYPE_CHECKING:
    from pathlib import Path

    from dflop.profiling.pieces import Piece


def pieces(model_dir: Path) -> list[Piece]:
    """The pieces of a Qwen3.5 model.

    Args:
        model_dir: folder with `config.json`.

    Returns:
        Six pieces.

    Raises:
        ProfileError: the configuration asks for what is not built here; the message names the field.
    """
    return pieces_of(Qwen35(model_dir))
