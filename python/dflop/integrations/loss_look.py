"""What the first microbatch says of a loss whose code says too little.

stand-in  -> beside the loss that the model itself has: refused where they differ
any other -> over the step's label tokens, and over twice as many: refused where it stays, a warning where
             it is not half
"""

from __future__ import annotations

import copy
import math
import random
import warnings
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch

if TYPE_CHECKING:
    from collections.abc import Iterator

_SAME = 1e-3
"""Losses that differ by less are taken for equal; twice as many label tokens halve the right one."""

_OF_SAME_LOGITS = 1e-5
"""Two losses of the same logits must agree so far: without training any two differ by some 1e-3."""

_METRICS = ("_metrics", "_total_train_tokens")
"""Where TRL's trainers count what they saw."""


def look_once(trainer: Any, *, is_known: bool, stands_in: bool) -> None:
    """Looks at the loss in the first microbatch that has one; every rank takes part, and all say the same.

    Args:
        trainer: of transformers, or made of it.
        is_known: whether the loss divides by `num_items_in_batch` for certain.
        stands_in: whether the trainer's `compute_loss_func` was put in the place of the model's own loss.
    """
    theirs = trainer.compute_loss
    is_open = {"whole": not is_known, "own": stands_in}

    def compute_loss(model: Any, inputs: Any, *given: Any, **named: Any) -> Any:
        if trainer.model.training:
            trainer.compute_loss = theirs
            num_tokens = named.get("num_items_in_batch")
            if num_tokens is None:
                raise _unlabelled_error(trainer)
            if is_open["whole"]:
                is_seen, asks_the_stand_in = _divides(trainer, model, inputs, num_tokens)
                is_open["whole"] = not is_seen
                # A `compute_loss` that asks it not has a loss of its own, which divides.
                is_open["own"] &= asks_the_stand_in or not is_seen
            if is_open["own"] and not is_open["whole"]:
                is_open["own"] = not _is_own(trainer, model, inputs, num_tokens)
            if any(is_open.values()):
                trainer.compute_loss = compute_loss
        return theirs(model, inputs, *given, **named)

    trainer.compute_loss = compute_loss


def _unlabelled_error(trainer: Any) -> ValueError:
    message = (
        f"the trainer is a `{type(trainer).__name__}` whose batches have no `labels` that it counts, so its "
        "loss is a mean of each microbatch, and balanced ones have unequal numbers of samples. Have the "
        "collation give `labels`"
    )
    return ValueError(message)


@contextmanager
def _unchanged(trainer: Any) -> Iterator[None]:
    """No gradient; buffers, random states and TRL's metrics are what they were afterwards."""
    # Packed weights of quantised models are buffers too, of whole numbers.
    counted = [one for one in trainer.model.buffers() if one.is_floating_point() or one.numel() == 1]
    buffers = [(buffer, buffer.clone()) for buffer in counted]
    metrics = {name: copy.deepcopy(getattr(trainer, name)) for name in _METRICS if hasattr(trainer, name)}
    states = random.getstate(), np.random.get_state()  # noqa: NPY002 those that models draw from
    devices = [torch.cuda.current_device()] if torch.cuda.is_initialized() else []
    try:
        with torch.no_grad(), torch.random.fork_rng(devices):
            yield
            for buffer, before in buffers:
                buffer.copy_(before)
    finally:
        random.setstate(states[0])
        np.random.set_state(states[1])  # noqa: NPY002
        for name, kept in metrics.items():
            setattr(trainer, name, kept)


def _rounding(loss: torch.Tensor) -> float:
    """By what part a loss may be off; also of one that was computed in 16 bits and has 32 now."""
    kinds = [kind for kind in (torch.bfloat16, torch.float16) if loss.to(kind).to(loss.dtype) == loss]
    return max((torch.finfo(kind).eps for kind in kinds), default=0.0)


class _Losses(NamedTuple):
    """What a rank found in its microbatch."""

    first: float
    second: float
    tolerance: float
    """By what part they may differ."""

    is_asked: float
    """Whether the stand-in was."""


def _gathered(trainer: Any, of_rank: list[float]) -> list[list[float]]:
    """The numbers of each rank; each rank calls it."""
    own = torch.tensor([of_rank], dtype=torch.float32, device=trainer.accelerator.device)
    return (own if trainer.args.world_size == 1 else trainer.accelerator.gather(own)).tolist()


def _of_ranks(
    trainer: Any, found: list[torch.Tensor], same: float, *, is_asked: bool = True
) -> list[_Losses]:
    """Two losses of each rank whose microbatch has label tokens.

    Each rank calls it. Numbers that all know decide, so that all look again or none does.
    """
    tolerance = max(same, *map(_rounding, found))
    of_all = _gathered(trainer, [*map(float, found), tolerance, float(is_asked)])
    return [_Losses(*one) for one in of_all if all(map(math.isfinite, one)) and one[0]]


def _divides(trainer: Any, model: Any, inputs: Any, num_tokens: Any) -> tuple[bool, bool]:
    """Whether the loss over twice as many label tokens was seen, and whether `compute_loss_func` was asked.

    Raises where the loss stays.
    """
    losses, asked, theirs = [], [], trainer.compute_loss_func

    def asks(*given: Any, **named: Any) -> Any:
        asked.append(True)
        return theirs(*given, **named)

    if theirs is not None:
        trainer.compute_loss_func = asks
    try:
        for factor in (1, 2):
            # The same dropout twice.
            with _unchanged(trainer):
                # `compute_loss` may take the labels out of what it is given.
                loss = trainer.compute_loss(model, copy.copy(inputs), num_items_in_batch=factor * num_tokens)
            # A graph of CUDA writes the next one into the same place.
            losses.append(loss.detach().clone())
    finally:
        trainer.compute_loss_func = theirs
    found, name = _of_ranks(trainer, losses, _SAME, is_asked=bool(asked)), type(trainer).__name__
    for one in found:
        if abs(one.first - one.second) <= _SAME * abs(one.first):
            message = (
                f"the loss of `{name}` is {one.first:.6g} whatever `num_items_in_batch` is: a mean of each "
                "microbatch, and balanced ones have unequal numbers of label tokens. Give the trainer a "
                "`compute_loss_func` (or `compute_loss`) that divides the summed loss by "
                "`num_items_in_batch`, the label tokens of the step on all ranks"
            )
            raise ValueError(message)
    parts = [one for one in found if abs(2 * one.second - one.first) > 2 * one.tolerance * abs(one.first)]
    if parts and not trainer.args.process_index:
        warnings.warn(
            f"the loss of `{name}` is {parts[0].first:.6g} over the label tokens of the step, and not half "
            f"of it over twice as many but {parts[0].second:.6g}: a part of it is not divided by "
            "`num_items_in_batch`. So the gradient depends on how samples are divided, with dflop and "
            "without. Divide each part by that number",
            stacklevel=2,
        )
    return bool(found), any(one.is_asked for one in found)


def _is_own(trainer: Any, model: Any, inputs: Any, num_tokens: Any) -> bool:
    """Whether the model's own loss is known; raises where the one that stands in for it is another."""
    seen: list[Any] = []

    def keep(_: Any, __: Any, named: dict[str, Any], outputs: Any) -> None:
        if named.get("labels") is None:
            return
        own = outputs.get("loss") if isinstance(outputs, dict) else outputs[0]
        if own is not None:
            # Before a `compute_loss` weighs it in its place.
            seen[:] = [named, outputs, own.detach().clone()]

    stand_in, takes = trainer.compute_loss_func, trainer.model_accepts_loss_kwargs
    handle = model.register_forward_hook(keep, with_kwargs=True)
    trainer.compute_loss_func, trainer.model_accepts_loss_kwargs = None, False
    try:
        with _unchanged(trainer):
            trainer.compute_loss(model, copy.copy(inputs), num_items_in_batch=num_tokens)
    finally:
        handle.remove()
        trainer.compute_loss_func, trainer.model_accepts_loss_kwargs = stand_in, takes
    has_logits = bool(seen) and isinstance(seen[1], dict) and seen[1].get("logits") is not None
    of_ranks = _gathered(trainer, [float(bool(seen)), float(has_logits)])
    if not any(is_seen for is_seen, _ in of_ranks):
        # A `compute_loss` that takes the labels out asks neither loss.
        return True
    is_fused = any(is_seen and not has for is_seen, has in of_ranks)
    if is_fused and not all(is_seen for is_seen, _ in of_ranks):
        # One more forward is for all ranks or for none.
        return False
    pair, same = [torch.full((), math.nan)] * 2, _OF_SAME_LOGITS
    if seen:
        named, outputs, own = seen
        if is_fused:
            # Kernels that fuse the loss (Liger) make no logits where labels are given.
            same = _SAME
            with _unchanged(trainer):
                outputs = model(**{name: value for name, value in named.items() if name != "labels"})
        pair = [own, stand_in(outputs, named["labels"])]
    found = _of_ranks(trainer, pair, same)
    for one in found:
        if abs(one.first - one.second) > one.tolerance * abs(one.first):
            message = (
                f"the loss of `{type(trainer.model).__name__}` is {one.first:.6g} in the first microbatch, "
                f"and the cross entropy of its next tokens {one.second:.6g}: its own takes no "
                "`num_items_in_batch`, and the other cannot stand in for it. Give the trainer a "
                "`compute_loss_func(outputs, labels, num_items_in_batch)` that sums the loss and divides it "
                "by `num_items_in_batch`"
            )
            raise ValueError(message)
    return bool(found)
