"""Batches in page-locked memory, from which a copy to a GPU does not hold up the process."""

from __future__ import annotations

from dataclasses import fields, replace
from typing import TypeVar

import torch

from dflop.models.adapter import EncoderInput, LlmInput

Batch = TypeVar("Batch", EncoderInput, LlmInput)


def pinned(batch: Batch) -> Batch:
    """The batch with its tensors page-locked; PyTorch keeps such memory and gives it out again.

    Args:
        batch: On the CPU; tensors on the meta device stay there.

    Returns:
        A copy.
    """
    moved = {
        field.name: value.pin_memory()
        for field in fields(batch)
        if isinstance(value := getattr(batch, field.name), torch.Tensor) and not value.is_meta
    }
    return replace(batch, **moved)
