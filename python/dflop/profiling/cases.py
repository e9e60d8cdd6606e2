"""What is run under the clock: one part of one piece at one size, in each way the training may run it.

    joint       forward, backward                          F, B
    split       forward, input gradients, weight gradients F, I, W
    selective   forward, backward with recomputation       F, B
    full        the same, all of a layer computed again    F, B

A backward is `torch.autograd.backward` from an incoming gradient; it adds to parameter gradients that exist
already. Where a piece says so, its attention is timed alone, over one segment, and the rest over packs of
segments.
"""

from __future__ import annotations

from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from dflop.models.packing import attend_packed, attend_segment, uses_varlen
from dflop.models.recompute import FULL, SELECTIVE, recomputing
from dflop.models.sight import picture_places, sights
from dflop.models.split_backward import split_backward
from dflop.profiling.timer import time_on_busy_cuda

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from dflop.profiling.pieces import AttentionKind, PieceSettings
    from dflop.profiling.timer import Step, Timing

LINEAR, ATTENTION = "linear", "attention"
JOINT, SPLIT = "joint", "split"
WAYS = (JOINT, SPLIT, SELECTIVE, FULL)

# A run of attention alone has about so many tokens: of short segments, it has several. A fused kernel gets as
# many as a microbatch has, since few do not fill a GPU.
_ATTENTION_RUN_TOKENS, _FUSED_RUN_TOKENS = 2048, 16384
_MAX_ATTENTION_COPIES, _MAX_FUSED_COPIES = 32, 2048


@dataclass
class Case:
    """One part of one piece at one size."""

    name: str
    """Its name in the records: the curve, the size and whatever else changes the time."""
    size: int
    """Size, in tokens."""
    copies: int
    """How often one run does the work: its number of layers, or of segments. Times are divided by it."""
    forward: Callable[[], Any]
    """Gives what `backward` starts from."""
    backward: Callable[[Any], None]
    """Runs the backward."""
    inputs: tuple[torch.Tensor, ...] = ()
    """Buffers of which the forward reads a part."""
    segments: tuple[int, ...] = ()
    """Tokens of each segment of a pack, whose attention is to be subtracted; else empty."""
    ways: tuple[str, ...] = (JOINT,)
    """Which of `WAYS` are measured."""
    module: nn.Module | None = None
    """The module with the parameters; None for attention alone."""
    layers: tuple[nn.Module, ...] = ()
    """Layers of `module`, each of which recomputes by itself."""
    reset: Callable[[], None] = field(default=lambda: None)
    """Called before each run, not timed."""
    is_launched_ahead: bool = False
    """Whether the time of launching its kernels does not count; on a GPU only."""

    @contextmanager
    def steps(self, way: str) -> Iterator[Sequence[Step]]:
        """The phases of one run.

        Args:
            way: one of `WAYS`.

        Yields:
            The phases, for a timer.
        """
        self.reset()
        two = (lambda _: self.forward(), self.backward)
        if way == JOINT:
            yield two
        elif way == SPLIT:
            assert self.module is not None, "attention alone has no weights"
            with split_backward(self.module) as queue:
                yield (*two, lambda _: queue.flush())
        else:
            with recomputing(self.layers, way):
                yield two

    def run(self, way: str, timer: Callable[[Sequence[Step]], Timing]) -> Timing:
        """Runs once under the clock.

        Args:
            way: one of `WAYS`.
            timer: from `timer_of`.

        Returns:
            The time of each phase.
        """
        while self.is_launched_ahead:
            with self.steps(way) as steps:
                timing = time_on_busy_cuda(steps)
            if timing is not None:
                return timing
        with self.steps(way) as steps:
            return timer(steps)

    def run_untimed(self, way: str = JOINT) -> None:
        """Runs once.

        Args:
            way: one of `WAYS`.
        """
        with self.steps(way) as steps:
            result: Any = None
            for step in steps:
                result = step(result)


def find_layers(module: nn.Module, num_layers: int) -> tuple[nn.Module, ...]:
    """The layers of a stack.

    Args:
        module: holds them in a list or dictionary of modules, or is the only layer itself.
        num_layers: how many there are.

    Returns:
        The layers, in order.

    Raises:
        ValueError: no list or dictionary in `module` has so many.
    """
    for child in module.modules():
        if isinstance(child, (nn.ModuleList, nn.ModuleDict)) and len(child) == num_layers:
            return tuple(child.values() if isinstance(child, nn.ModuleDict) else child)
    if num_layers == 1:
        return (module,)
    message = f"`{type(module).__name__}` has no list of {num_layers} layers"
    raise ValueError(message)


class Gradients:
    """Incoming gradients: random values, which are views of one buffer for each device and dtype."""

    def __init__(self) -> None:
        self._buffers: dict[tuple[torch.device, torch.dtype], torch.Tensor] = {}

    def like(self, result: torch.Tensor) -> torch.Tensor:
        """A gradient for `result`; for a single number, such as a loss, a small one.

        Args:
            result: only its shape, dtype and device matter.

        Returns:
            Of the same shape.
        """
        if result.dim() == 0:
            return torch.full_like(result, 1e-3)
        key, count = (result.device, result.dtype), result.numel()
        held = self._buffers.get(key)
        if held is None or held.numel() < count:
            generator = torch.Generator(result.device).manual_seed(0)
            held = torch.randn(count, generator=generator, dtype=result.dtype, device=result.device)
            self._buffers[key] = held
        return held[:count].view(result.shape)


def piece_case(
    name: str,
    forward: Callable[[], torch.Tensor],
    gradients: Gradients,
    **fields: Any,
) -> Case:
    """A case from a piece with its inputs.

    Args:
        name: of the case.
        forward: of the piece, as prepared.
        gradients: where the incoming gradient comes from.
        **fields: the other fields of `Case`.

    Returns:
        The case; its backward does nothing where the result of the forward requires no gradient.
    """
    incoming: list[torch.Tensor] = []

    def backward(result: torch.Tensor) -> None:
        if result.requires_grad:
            if not incoming:
                incoming.append(gradients.like(result))
            torch.autograd.backward(result, incoming[0])

    return Case(name, forward=forward, backward=backward, **fields)


def attention_copies(size: int, kind: AttentionKind, settings: PieceSettings) -> int:
    """How many equal segments one run of attention has, so that it is long enough to time.

    Args:
        size: tokens of a segment.
        kind: heads.
        settings: device and dtype.

    Returns:
        At least 1.
    """
    if is_fused(kind, settings):
        return max(1, min(_MAX_FUSED_COPIES, _FUSED_RUN_TOKENS // size))
    return max(1, min(_MAX_ATTENTION_COPIES, _ATTENTION_RUN_TOKENS // size))


def is_fused(kind: AttentionKind, settings: PieceSettings) -> bool:
    """Whether one kernel takes all segments of a microbatch, as in training; else each segment is a call.

    Args:
        kind: heads.
        settings: device and dtype.

    Returns:
        As `uses_varlen`.
    """
    return uses_varlen(torch.empty(0, kind.head_size, dtype=settings.dtype, device=settings.device))


def attention_case(name: str, kind: AttentionKind, size: int, settings: PieceSettings) -> Case:
    """Attention of one segment, as packed attention runs it.

    Args:
        name: of the case.
        kind: heads and mask.
        size: tokens of the segment.
        settings: device and dtype.

    Returns:
        The case, of `attention_copies` equal segments.
    """
    if kind.windows:
        return _attention_of_windows(name, kind, size, settings)
    copies = attention_copies(size, kind, settings)
    heads = (kind.num_heads, kind.num_key_value_heads, kind.num_key_value_heads)
    generator = torch.Generator().manual_seed(0)

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator).to(settings.device, settings.dtype)

    fused = is_fused(kind, settings)
    calls, tokens = (1, size * copies) if fused else (copies, size)
    inputs = [
        # In memory all heads of a token lie together, as in the output of a projection.
        [random(1, tokens, count, kind.head_size).transpose(1, 2).requires_grad_() for count in heads]
        for _ in range(calls)
    ]
    gradients = [random(1, tokens, kind.num_heads, kind.head_size) for _ in range(calls)]
    bounds = torch.arange(0, (copies + 1) * size, size, dtype=torch.int32, device=settings.device)
    scaling = kind.head_size**-0.5

    def forward() -> list[torch.Tensor]:
        if fused:
            query, key, value = inputs[0]
            return [
                attend_packed(query, key, value, bounds, [size] * copies, scaling, is_causal=kind.is_causal)
            ]
        outputs = [attend_segment(q, k, v, scaling, is_causal=kind.is_causal) for q, k, v in inputs]
        return [out_1HTd.transpose(1, 2) for out_1HTd in outputs]

    def backward(outputs: list[torch.Tensor]) -> None:
        torch.autograd.backward(outputs, gradients)

    def reset() -> None:
        # Dropped, since in a layer these gradients are passed on and not accumulated.
        for states in inputs:
            for tensor in states:
                tensor.grad = None

    # In a layer its kernels are launched while those before them run.
    return Case(name, size, copies, forward, backward, reset=reset, is_launched_ahead=fused)


def _attention_of_windows(name: str, kind: AttentionKind, size: int, settings: PieceSettings) -> Case:
    """As `attention_case`, of layers of several kinds: one run has the attention of each layer.

    Args:
        name: as there.
        kind: as there, with `windows`.
        size: as there.
        settings: as there.

    Returns:
        The case, whose copies are segments in layers.
    """
    copies = attention_copies(size, kind, settings)
    segments, device = [size] * copies, settings.device
    same = (kind.num_key_value_heads, kind.head_size)
    layers = list(zip(kind.windows, kind.heads_of_layers or [same] * len(kind.windows), strict=True))
    generator = torch.Generator().manual_seed(0)

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator).to(device, settings.dtype)

    inputs = [
        [
            random(1, size * copies, count, head_size).transpose(1, 2).requires_grad_()
            for count in (kind.num_heads, few, few)
        ]
        for _, (few, head_size) in layers
    ]
    gradients = [random(1, size * copies, kind.num_heads, head_size) for _, (_, head_size) in layers]
    bounds = torch.arange(0, (copies + 1) * size, size, dtype=torch.int32, device=device)
    places_T = picture_places(segments, kind.picture_tokens, device)
    seen = sights(kind.windows, places_T, bounds, segments, kind.picture_tokens is not None, kind.whole)

    def forward() -> list[torch.Tensor]:
        return [
            seen[window].attend(query, key, value, head_size**-0.5)
            for (window, (_, head_size)), (query, key, value) in zip(layers, inputs, strict=True)
        ]

    def backward(outputs: list[torch.Tensor]) -> None:
        torch.autograd.backward(outputs, gradients)

    def reset() -> None:
        for states in inputs:
            for tensor in states:
                tensor.grad = None

    fused = is_fused(kind, settings)
    return Case(
        name, size, copies * len(kind.windows), forward, backward, reset=reset, is_launched_ahead=fused
    )
