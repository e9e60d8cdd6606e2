"""Modules of transformers' models that go by several names."""

from __future__ import annotations

from typing import Any

BACKBONES = ("language_model", "text_model")
"""Names of the LLM backbone, below `.model`."""
FINAL_NORMS = ("norm", "embedding_norm")
"""What the norm behind the layers of a backbone is called. LFM2 has the second name."""


def inner_tower(tower: Any) -> Any:
    """The vision tower itself, which older versions of transformers wrap in another module.

    Args:
        tower: `vision_tower` of a model.

    Returns:
        The module that has `embeddings` and `encoder`.
    """
    return getattr(tower, "vision_model", tower)


def backbone_name(whole: Any) -> str:
    """The name that the model's family has for the LLM backbone.

    Args:
        whole: Hugging Face's model, or a part of it that has `.model`.

    Returns:
        One of `BACKBONES`.
    """
    return next(name for name in BACKBONES if hasattr(whole.model, name))


def backbone_of(whole: Any) -> Any:
    """The LLM backbone: embedding, layers, norm, rotary embedding.

    Args:
        whole: as in `backbone_name`.

    Returns:
        The module of that name.
    """
    return getattr(whole.model, backbone_name(whole))


def final_norm_name(backbone: Any) -> str:
    """The name of the norm behind the layers of the LLM backbone.

    Args:
        backbone: as `backbone_of` gives it.

    Returns:
        One of `FINAL_NORMS`.
    """
    return next(name for name in FINAL_NORMS if hasattr(backbone, name))
