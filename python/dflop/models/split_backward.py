"""The backward in two: gradients of the inputs first (I), those of the weights later (W).

    forward --> I: backward, each layer queues (input, gradient of its output) --> W: flush of the queue

Only linear maps and embeddings are split: they have nearly all weights. Norms, biases of other layers and
the like give their small gradients in I. The gradients are those of the joint backward. What the queue holds
stays in memory until the flush, and nothing else of the microbatch does: of each linear map its input, which
the forward had kept, and the gradient of its output; of an embedding its ids and that gradient.
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
        """Layers that wait."""
        return len(self._waiting)

    def add(self, work: Callable[..., None], *held: torch.Tensor) -> None:
        """Queues one layer.

        Args:
            work: computes the gradient from `held` and adds it to that of the weight.
            *held: all that it needs beside the layer; without a graph, which would hold more.
        """
        self._waiting.append((work, held))

    def held(self) -> Iterator[torch.Tensor]:
        """What waits, tensor by tensor; layers of one input hold the same tensor.

        Yields:
            Inputs and gradients of outputs.
        """
        for _, held in self._waiting:
            yield from held

    def take(self) -> WeightQueue:
        """All that waits, as a queue of its own; nothing waits here after it."""
        taken = WeightQueue()
        taken._waiting, self._waiting = self._waiting, []
        return taken

    @torch.no_grad()
    def flush(self) -> None:
        """Computes all that waits, first come first served; frees the inputs one by one."""
        waiting, self._waiting = self._waiting, []
        waiting.reverse()
        while waiting:
            work, held = waiting.pop()
            work(*held)


def _accumulate(parameter: torch.Tensor, gradient: torch.Tensor) -> None:
    if parameter.grad is None:
        # FSDP2 sums in a wider type than it computes in.
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
        # The anchor wants a gradient: without it autograd would leave out a layer whose input wants none.
        del anchor
        ctx.layer, ctx.queue = layer, queue
        weight = layer.weight
        ctx.save_for_backward(input if weight.requires_grad else None, weight)
        return F.linear(input, weight, layer.bias)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor | None, None, None, None]:
        (gradient,) = gradients
        # Once only: a checkpoint would compute them again.
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

            # Detached: the graph before it would hold what came in, and its gradient.
            ctx.queue.add(work, gradient, *([] if kept is None else [kept.detach()]))
        return (gradient.matmul(weight) if ctx.needs_input_grad[0] else None), None, None, None


class _Embedding(torch.autograd.Function):
    """`F.embedding` whose backward gives nothing and queues all."""

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
    """An empty tensor that wants a gradient."""
    return torch.empty(0, device=layer.weight.device, requires_grad=True)


def _split_forward(layer: nn.Module, queue: WeightQueue) -> Callable[[torch.Tensor], torch.Tensor] | None:
    """The forward that queues, for a layer that can be split and trains."""
    # A class of its own may do more than the map.
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

        Backward and flush may come later, outside of it; the backward of a layer that recomputes must not.
        Weights shared by two layers are right too: each adds its part. Under autocast the types of the
        forward are not followed: not for use there.

        Yields:
            The queue, always the same; `flush` it after each backward, or `take` what it then holds.
        """
        swapped: list[dict[str, Any]] = []
        try:
            for layer, forward in self._forwards:
                # Past `Module.__setattr__`: a training step comes here for each of its microbatches.
                attributes = vars(layer)
                if "forward" not in attributes:
                    attributes["forward"] = forward
                    swapped.append(attributes)
            yield self._queue
        finally:
            for attributes in swapped:
                del attributes["forward"]


def split_backward(module: nn.Module) -> AbstractContextManager[WeightQueue]:
    """Splits the backward of what `module` computes inside the context, once.

    Args:
        module: its linear maps and embeddings are swapped for the time.

    Returns:
        As `BackwardSplitter.splitting`.
    """
    return BackwardSplitter(module).splitting()
