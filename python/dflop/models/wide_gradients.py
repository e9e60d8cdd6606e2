"""Sums the gradients of a parameter in a wider type than it computes in, without a wide copy of each.

    backward --gradient, bfloat16--> sum, float32      for each microbatch

Autograd casts a gradient to the type of `.grad` before it adds the two. For a weight on a GPU that moves 20
bytes a number, and takes memory for a float32 copy: 2.2 GB for the embedding of a model of 7 billion
parameters. Adding the gradient as it is moves 12.

A weight that is used several times in one forward keeps autograd's way, which sums the gradients of the uses
in the wide type: a head that shares the embedding's matrix, a head whose loss goes in chunks.
"""

from __future__ import annotations

import weakref
from collections import Counter
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from collections.abc import Iterable

    from torch import nn

_LARGE = 1 << 20
"""Numbers from which a parameter is worth two calls of Python in each backward."""
_IN_CHUNKS = "lm_head"


def used_once(modules: Iterable[nn.Module]) -> set[torch.Tensor]:
    """Parameters that one forward uses once.

    Args:
        modules: all that this rank runs.

    Returns:
        Those that one module holds alone, but for the head's.
    """
    uses: Counter[torch.Tensor] = Counter()
    for module in modules:
        for name, child in module.named_modules():
            weight = 2 if name.rpartition(".")[2] == _IN_CHUNKS else 1
            for parameter in child.parameters(recurse=False):
                uses[parameter] += weight
    return {parameter for parameter, count in uses.items() if count == 1}


def sum_gradients(parameter: torch.Tensor, total: torch.Tensor, *, is_used_once: bool) -> None:
    """Makes `total` the gradient of a parameter: each backward adds to it, in its own type.

    Args:
        parameter: a leaf that requires a gradient.
        total: of the shape of the parameter, of its type or a wider one.
        is_used_once: whether a forward uses it once.
    """
    is_converted = parameter.dtype != total.dtype and parameter.device.type != "cpu"
    if is_converted and is_used_once and parameter.numel() >= _LARGE:
        # Any type: between the two hooks it is that of the parameter.
        parameter.grad_dtype = None
        parameter.grad = total
        add_unconverted(parameter)
    else:
        parameter.grad_dtype = total.dtype
        parameter.grad = total


def add_unconverted(parameter: torch.Tensor) -> None:
    """Lets autograd hand over each gradient of a parameter as it is, to be added to its `.grad`.

    Args:
        parameter: a leaf whose `.grad` is there, of a wider type than its own; its `grad_dtype` is None.
    """
    totals: list[torch.Tensor] = []
    # The parameter holds its hooks: were it held by them, neither would ever be freed.
    held = weakref.ref(parameter)

    def before(gradient: torch.Tensor) -> None:
        # Without a sum to add to, autograd stores the gradient itself: no copy, no cast.
        leaf = held()
        if totals and leaf is not None:
            # The backward before ended between the two hooks: by an error, or as it only asked for gradients.
            leaf.grad = totals.pop()
        if gradient is not None and leaf is not None and leaf.grad is not None:
            totals.append(leaf.grad)
            leaf.grad = None

    def after(leaf: torch.Tensor) -> None:
        if totals:
            total, gradient = totals.pop(), leaf.grad
            if gradient is not None:
                total.add_(gradient)
            leaf.grad = total

    parameter.register_hook(before)
    parameter.register_post_accumulate_grad_hook(after)
