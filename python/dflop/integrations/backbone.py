"""Where the LLM backbone stands in a model of Hugging Face."""

from __future__ import annotations

from typing import Any

from torch import nn


def unwrapped(model: Any) -> Any:
    """Hugging Face's model, without DDP and peft around it.

    Args:
        model: it, wrapped or not.

    Returns:
        The model itself.
    """
    if isinstance(inner := getattr(model, "module", None), nn.Module):
        return unwrapped(inner)
    return model.get_base_model() if hasattr(model, "get_base_model") else model


def backbone_of(model: nn.Module) -> Any:
    """The LLM backbone of a model of Hugging Face.

    Args:
        model: it, with or without DDP and peft around it.

    Returns:
        The module that holds the layers, with its `config`.

    Raises:
        ValueError: `get_decoder` finds none.
    """
    whole = unwrapped(model)
    decoder = whole.get_decoder() if hasattr(whole, "get_decoder") else None
    # Llama 4 names a model with a head.
    while not hasattr(decoder, "layers") and isinstance(inner := getattr(decoder, "model", None), nn.Module):
        decoder = inner
    if getattr(decoder, "config", None) is None or not hasattr(decoder, "layers"):
        message = f"`{type(whole).__name__}` has no LLM backbone with layers that `get_decoder` finds"
        raise ValueError(message)
    return decoder
