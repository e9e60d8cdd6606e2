"""Vision towers of transformers, whatever its version."""

from __future__ import annotations

from typing import Any


def inner_tower(tower: Any) -> Any:
    """The vision tower itself: older transformers wrap it once more.

    Args:
        tower: `vision_tower` of a model.

    Returns:
        What has `embeddings` and `encoder`.
    """
    return getattr(tower, "vision_model", tower)
