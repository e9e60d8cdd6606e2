"""The backward in two: gradients of the inputs first (I), those of the weights later (W).

    forward --> I: backward, each layer queues (input, gradient of its output) --> W: flush of the queue

Only linear maps and embeddings are split, since they have nearly all weights. Other parameters, such as those
of norms, get their small gradients in I. All gradients are those of the joint backward.

Between I and W only what is in the queue stays in memory. For a linear map that is its input, which the
forward had kept, and the gradient of its output. For an embedding it is the ids, and the gradient of its
output.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, contextmanager
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import nn

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator


class WeightQueue:
    """Gradients of weights that are still to be computed, in the order of the backward."""

    def __init__(self) -> None:
        self._waiting: list[tuple[Callable[..., None], tuple[torch.Tensor, ...]]] = []

    def __len__(self) -> int:
        """How many layers wait for the flush."""
        return len(self._waiting)

    def add(self, work: Callable[..., None], *held: torch.Tensor) -> None:
        """Queues one layer.

        Args:
            work: computes the gradient from `held` and adds it to that of the weight.
            *held: all tensors that it needs, besides the layer. They must be detached, since an autograd
                graph would hold more memory.
        """
        self._waiting.append((work, held))

    def held(self) -> Iterator[torch.Tensor]:
        """All tensors in the queue. Layers with the same input hold the same tensor, which comes again.

        Yields:
            Inputs and gradients of outputs.
        """
        for _, held in self._waiting:
            yield from held

    def take(self) -> WeightQueue:
        """Moves all that waits into a new queue; this one is empty afterwards."""
        taken = WeightQueue()
        taken._waiting, self._waiting = self._waiting, []
        return taken

    @torch.no_grad()
    def flush(self) -> None:
        """Computes all that waits, in the order of the queue, and frees the inputs one by one."""
        waiting, self._waiting = self._waiting, []
        waiting.reverse()
        while waiting:
            work, held = waiting.pop()
            work(*held)


_splitting = False


def is_splitting() -> bool:
    """Whether a module runs whose backward is split: inside `BackwardSplitter.splitting`."""
    return _splitting


def _accumulate(parameter: torch.Tensor, gradient: torch.Tensor) -> None:
    if parameter.grad is None:
        # FSDP2 sums gradients in a wider type than it computes in, and asks for it by `grad_dtype`.
        parameter.grad = gradient.to(getattr(parameter, "grad_dtype", None) or gradient.dtype)
    else:
        parameter.grad += gradient


class _Linear(torch.autograd.Function):
    """`F.linear` whose backward gives the gradient of the input alone."""

    @staticmethod
    def forward(
        ctx: Any,
        input: torch.Tensor,
        anchor: torch.Tensor,
        layer: nn.Linear,
        queue: WeightQueue,
    ) -> torch.Tensor:
        # The anchor is an empty tensor that requires a gradient. Without it autograd would skip the backward
        # of a layer whose input requires none.
        del anchor
        ctx.layer, ctx.queue = layer, queue
        weight = layer.weight
        ctx.save_for_backward(input if weight.requires_grad else None, weight)
        return F.linear(input, weight, layer.bias)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor | None, None, None, None]:
        (gradient,) = gradients
        # `saved_tensors` is read only once: under recomputation each reading would compute the layer again.
        kept, weight = ctx.saved_tensors
        layer: nn.Linear = ctx.layer
        trains_bias = layer.bias is not None and layer.bias.requires_grad
        if kept is not None or trains_bias:

            def work(gradient: torch.Tensor, *kept: torch.Tensor) -> None:
                rows = gradient.reshape(-1, gradient.shape[-1])
                for input in kept:
                    _accumulate(layer.weight, rows.t().mm(input.reshape(-1, input.shape[-1])))
                if trains_bias:
                    _accumulate(layer.bias, rows.sum(0))

            # Detached: otherwise its graph would keep what came into the stage, with its gradient.
            ctx.queue.add(work, gradient, *([] if kept is None else [kept.detach()]))
        return (gradient.matmul(weight) if ctx.needs_input_grad[0] else None), None, None, None


class _Embedding(torch.autograd.Function):
    """`F.embedding` whose backward computes nothing and queues the gradient of the weight."""

    @staticmethod
    def forward(
        ctx: Any,
        ids: torch.Tensor,
        anchor: torch.Tensor,
        layer: nn.Embedding,
        queue: WeightQueue,
    ) -> torch.Tensor:
        del anchor
        ctx.layer, ctx.queue = layer, queue
        ctx.save_for_backward(ids)
        return F.embedding(ids, layer.weight)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[None, None, None, None]:
        (gradient,) = gradients
        (ids,) = ctx.saved_tensors
        layer: nn.Embedding = ctx.layer

        def work(gradient: torch.Tensor, ids: torch.Tensor) -> None:
            padding = -1 if layer.padding_idx is None else layer.padding_idx
            _accumulate(
                layer.weight,
                torch.ops.aten.embedding_dense_backward(
                    gradient, ids, layer.num_embeddings, padding, layer.scale_grad_by_freq
                ),
            )

        ctx.queue.add(work, gradient, ids)
        return None, None, None, None


def _anchor(layer: nn.Linear | nn.Embedding) -> torch.Tensor:
    """An empty tensor that requires a gradient; see `_Linear.forward`."""
    return torch.empty(0, device=layer.weight.device, requires_grad=True)


def _split_forward(layer: nn.Module, queue: WeightQueue) -> Callable[[torch.Tensor], torch.Tensor] | None:
    """The forward to use instead, which queues; none for a layer that cannot be split or does not train."""
    # A subclass with a forward of its own may do more than the linear map, so it is not split.
    forward = type(layer).forward
    if isinstance(layer, nn.Linear) and forward is nn.Linear.forward and _trains(layer):
        anchor = _anchor(layer)
        return lambda input: _Linear.apply(input, anchor, layer, queue)
    if isinstance(layer, nn.Embedding) and forward is nn.Embedding.forward and _is_plain(layer):
        anchor = _anchor(layer)
        return lambda ids: _Embedding.apply(ids, anchor, layer, queue)
    return None


def _trains(layer: nn.Linear) -> bool:
    return any(parameter.requires_grad for parameter in layer.parameters())


def _is_plain(layer: nn.Embedding) -> bool:
    return layer.weight.requires_grad and not layer.sparse and layer.max_norm is None


class BackwardSplitter:
    """The layers of a module whose backward can be split, found once for many backwards."""

    def __init__(self, module: nn.Module) -> None:
        """Nothing is split yet.

        Args:
            module: its linear maps and embeddings.
        """
        self._queue = WeightQueue()
        forwards = ((layer, _split_forward(layer, self._queue)) for layer in module.modules())
        self._forwards = [(layer, forward) for layer, forward in forwards if forward is not None]

    @contextmanager
    def splitting(self) -> Iterator[WeightQueue]:
        """Splits the backward of what the module computes inside the context.

        Backward and flush may come later, outside of the context; but the backward of a layer that recomputes
        must run inside. A weight that two layers share is right, too: each layer adds its part. Not for use
        under autocast, whose types it does not follow.

        Yields:
            The queue, always the same; `flush` it after each backward, or `take` what it then holds.
        """
        global _splitting
        before, _splitting = _splitting, True
        swapped: list[dict[str, Any]] = []
        try:
            for layer, forward in self._forwards:
                # Set without `Module.__setattr__`, which is slow: this runs for each microbatch of a step.
                attributes = vars(layer)
                if "forward" not in attributes:
                    attributes["forward"] = forward
                    swapped.append(attributes)
            yield self._queue
        finally:
            _splitting = before
            for attributes in swapped:
                del attributes["forward"]


def split_backward(module: nn.Module) -> AbstractContextManager[WeightQueue]:
    """Splits the backward of what `module` computes inside the context, once.

    Args:
        module: its linear maps and embeddings get another forward inside the context.

    Returns:
        As `BackwardSplitter.splitting`.
    """
    return BackwardSplitter(module).splitting()
