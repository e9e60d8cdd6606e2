"""Recomputation: the forward of a layer keeps less, and its backward computes the rest again.

none        all is kept
selective   outputs of matrix products and attention are kept, the rest is computed again
selective:K the first K layers of a stage as in `selective`, its others keep all
full        the input of the layer is kept
full:K      the first K layers of a stage as in `full`, its others as in `selective`
"""

from __future__ import annotations

import functools
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence

    from torch import nn

NONE, SELECTIVE, FULL = MODES = ("none", "selective", "full")
"""The names of `Recompute` in the model profile: modes in which all layers do the same."""

# Operators whose results are kept in mode `selective`; those that a version of PyTorch lacks are left out.
_KEPT_NAMES = (
    "aten.mm",
    "aten.addmm",
    "aten.bmm",
    "aten.baddbmm",
    # Products of experts.
    "aten._grouped_mm",
    "transformers.grouped_mm_fallback",
    "aten.convolution",
    "aten._scaled_dot_product_flash_attention",
    "aten._scaled_dot_product_flash_attention_for_cpu",
    "aten._scaled_dot_product_efficient_attention",
    "aten._scaled_dot_product_cudnn_attention",
    "aten._scaled_dot_product_fused_attention_overrideable",
    "torch_attn._varlen_attn",
)


@functools.cache
def _kept_operators() -> frozenset[Any]:
    found = []
    for name in _KEPT_NAMES:
        space, _, operator = name.partition(".")
        packet = getattr(getattr(torch.ops, space), operator, None)
        if packet is not None:
            found += [getattr(packet, overload) for overload in packet.overloads()]
    return frozenset(found)


def _policy(_context: Any, operator: Any, *_: Any, **__: Any) -> CheckpointPolicy:
    is_kept = operator in _kept_operators()
    return CheckpointPolicy.MUST_SAVE if is_kept else CheckpointPolicy.PREFER_RECOMPUTE


_recomputes = False
_keeping = False
_replaying = False


def recomputes() -> bool:
    """Whether a layer runs that recomputes: its first forward, or that forward again in the backward."""
    return _recomputes


def is_keeping() -> bool:
    """Whether the first forward of a layer runs in mode `selective`: outputs of its linear maps are kept."""
    return _keeping


def is_replaying() -> bool:
    """Whether a backward runs a layer's forward again in mode `selective`: kept outputs are then reused.

    Returns:
        False everywhere else, in mode `full` too.
    """
    return _replaying


@contextmanager
def _replay(inner: Any) -> Iterator[None]:
    global _replaying
    _replaying = True
    try:
        with inner:
            yield
    finally:
        _replaying = False


@contextmanager
def _keep(inner: Any) -> Iterator[None]:
    global _keeping
    _keeping = True
    try:
        with inner:
            yield
    finally:
        _keeping = False


def _selective_contexts() -> tuple[Any, Any]:
    """The contexts of the first forward, and of the forward that the backward runs."""
    first, again = create_selective_checkpoint_contexts(_policy)
    return _keep(first), _replay(again)


def _noted(forward: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    """The same forward, for whose time `recomputes` is true."""

    def run(*args: Any, **kwargs: Any) -> torch.Tensor:
        global _recomputes
        before, _recomputes = _recomputes, True
        try:
            return forward(*args, **kwargs)
        finally:
            _recomputes = before

    return run


def modes_of(mode: str, num_layers: int) -> list[str]:
    """What each layer of a stage recomputes.

    Args:
        mode: One of `MODES`, or `selective:K` or `full:K` with a whole number K of 1 or more.
        num_layers: Of the stage; where it has fewer than K, all of them recompute so.

    Returns:
        One of `MODES` for each layer, in their order.

    Raises:
        ValueError: There is no such mode.
    """
    if mode in MODES:
        return [mode] * num_layers
    name, _, number = mode.partition(":")
    of_rest = {SELECTIVE: NONE, FULL: SELECTIVE}.get(name)
    if of_rest is None or not number.isdecimal() or int(number) < 1:
        known = ", ".join(f"`{name}`" for name in MODES)
        message = (
            f"`{mode}` is no way to recompute, known are {known}, and `selective:K` and `full:K` for K"
            " layers, 1 or more"
        )
        raise ValueError(message)
    num_first = min(int(number), num_layers)
    return [name] * num_first + [of_rest] * (num_layers - num_first)


def most_of(modes: Iterable[str]) -> str:
    """The mode that recomputes most.

    Args:
        modes: As `modes_of` has them, at least one.

    Returns:
        One of them.
    """

    def rank(mode: str) -> tuple[int, float]:
        name, _, number = mode.partition(":")
        # `full:K` lies between `selective`, of all layers, and `full`.
        return MODES.index(name), float(number or "inf")

    return max(modes, key=rank)


@contextmanager
def recomputing(layers: Sequence[nn.Module], mode: str) -> Iterator[None]:
    """Makes each of `layers` recompute in `mode` what it runs inside the context.

    The state of random numbers is not restored, so it is for layers without dropout only.

    Args:
        layers: Those of a stage in the order of its forward; modules that give one tensor.
        mode: As `modes_of` has it.

    Yields:
        Nothing; inside, the layers' forwards are wrapped.

    Raises:
        ValueError: There is no such mode.
    """
    modes = modes_of(mode, len(layers))
    # A forward that another context has set is set again at the end.
    wrapped: list[tuple[nn.Module, Any]] = []
    try:
        for layer, of_layer in zip(layers, modes, strict=True):
            if of_layer == NONE:
                continue
            options: dict[str, Any] = {"use_reentrant": False, "preserve_rng_state": False}
            if of_layer == SELECTIVE:
                options["context_fn"] = _selective_contexts
            before = vars(layer).get("forward")
            layer.forward = functools.partial(checkpoint, _noted(layer.forward), **options)
            wrapped.append((layer, before))
        yield
    finally:
        for layer, before in wrapped:
            if before is None:
                del layer.forward
            else:
                layer.forward = before
