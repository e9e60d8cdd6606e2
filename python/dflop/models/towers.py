"""Vision towers of transformers, which differ by its version."""

from __future__ import annotations

from typing import Any


def inner_tower(tower: Any) -> Any:
    """The vision tower itself, which older versions of transformers wrap in another module.

    Args:
        tower: `vision_tower` of a model.

    Returns:
        The module that has `embeddings` and `encoder`.
    """
    return getattr(tower, "vision_model", tower)
