"""Bytes: what a forward keeps for its backward, the peak of both, and a heap that is touched beforehand."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from dflop.models.byte_counter import ByteCounter

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from torch import nn


@dataclass(frozen=True)
class Allocated:
    """What one piece of work did to the memory, beyond what was there before it."""

    kept_bytes: int
    """Bytes more at its end than at its start; below 0 where it freed more."""
    peak_bytes: int
    """The most bytes more than at its start, at least 0."""


def watch_allocations(work: Callable[[], Any], device: torch.device) -> tuple[Any, Allocated]:
    """Runs `work` once and watches the allocator of `device`.

    Args:
        work: its result is alive when `kept_bytes` is read.
        device: `cpu` or `cuda`.

    Returns:
        The result, and what was allocated.
    """
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    with ByteCounter(device) as counter:
        counter.phase("work")
        result = work()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
    return result, Allocated(counter.phases[0].end_bytes, counter.phases[0].peak_bytes)


@dataclass(frozen=True)
class PieceBytes:
    """What one microbatch needs on one piece of a model."""

    kept_bytes: int
    """From the forward to the backward: tensors saved for it, the piece's input among them if it is saved;
    parameters and the result are not counted (the next piece counts it as its input), unless the result is
    itself saved."""
    workspace_bytes: int
    """Beyond `kept_bytes`, for a while, in the forward or in the backward; neither the result nor its
    gradient is counted, the gradient of the input is."""


def peak_bytes(
    forward: Callable[[], torch.Tensor],
    device: torch.device,
    parameters: Iterable[torch.Tensor],
    inputs: Iterable[torch.Tensor] = (),
    backward: Callable[[torch.Tensor], object] | None = None,
) -> PieceBytes:
    """Bytes that a forward and the backward through it need, counted over one run of both.

    The parameters that train get a `.grad` first, as they have in training, where gradients are added in
    place.

    Args:
        forward: Run twice; gives what the backward starts from.
        device: Where it runs.
        parameters: Of the piece; their storages are not counted.
        inputs: Buffers of which `forward` reads a part; the parts that are kept are counted, not the buffers.
        backward: Run on the result of `forward`; by default a backward from a gradient of ones. None is run
            where the result wants no gradient.

    Returns:
        What is kept, and the peak above it.
    """
    parameters, inputs = list(parameters), list(inputs)
    for parameter in parameters:
        if parameter.requires_grad and parameter.grad is None:
            parameter.grad = torch.zeros_like(parameter)
    saved = _saved(forward, parameters, inputs)
    counter = ByteCounter(device)
    with counter:
        counter.phase("forward")
        result = forward()
        counter.phase("gradient")
        gradient = torch.ones_like(result) if backward is None else None
        counter.phase("backward")
        if result.requires_grad:
            if backward is None:
                torch.autograd.backward(result, gradient)
            else:
                backward(result)
    phases = {phase.name: phase for phase in counter.phases}
    read_bytes = saved.input_bytes
    result_bytes = 0 if saved.has_result else result.untyped_storage().nbytes()
    given_bytes = phases["gradient"].end_bytes - phases["forward"].end_bytes
    kept = phases["forward"].end_bytes + read_bytes - result_bytes if result.requires_grad else 0
    highest = max(phases["forward"].peak_bytes, phases["backward"].peak_bytes - given_bytes)
    return PieceBytes(max(kept, 0), max(highest + read_bytes - result_bytes - max(kept, 0), 0))


@dataclass(frozen=True)
class _Saved:
    total_bytes: int
    input_bytes: int
    """Of `total_bytes`, in the given buffers."""
    has_result: bool


def _saved(
    forward: Callable[[], Any], parameters: Iterable[torch.Tensor], inputs: Iterable[torch.Tensor]
) -> _Saved:
    ours = {parameter.untyped_storage().data_ptr() for parameter in parameters}
    shared = {buffer.untyped_storage().data_ptr() for buffer in inputs}
    kept: dict[int, int] = {}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        address = storage.data_ptr()
        if address not in ours:
            num_bytes = tensor.numel() * tensor.element_size() if address in shared else storage.nbytes()
            kept[address] = max(kept.get(address, 0), num_bytes)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        result = forward()
    has_result = isinstance(result, torch.Tensor) and result.untyped_storage().data_ptr() in kept
    # The graph holds the storages up to here, so no address stands for two of them.
    del result
    return _Saved(sum(kept.values()), sum(kept[a] for a in shared if a in kept), has_result)


def activation_bytes(
    forward: Callable[[], Any], parameters: Iterable[torch.Tensor], inputs: Iterable[torch.Tensor] = ()
) -> int:
    """Bytes that one forward keeps for its backward.

    Counts each storage once, whole, however many views of it are kept: that is what stays allocated.

    Args:
        forward: run once.
        parameters: their storages are not counted.
        inputs: buffers of which `forward` reads a part; the parts that are kept are counted, not the buffers.

    Returns:
        Bytes.
    """
    return _saved(forward, parameters, inputs).total_bytes


def common_bytes(
    forward: Callable[[], Any],
    parameters: Iterable[torch.Tensor],
    inputs: Iterable[torch.Tensor],
    layers: Sequence[nn.Module],
) -> int:
    """Bytes that several layers of a stack keep in common, as the angles of rotary positions.

    Divided by the number of layers, the bytes of a whole stack hold a part of them only; a stage of fewer
    layers keeps them whole all the same.

    Args:
        forward: runs the stack once.
        parameters: as for `activation_bytes`.
        inputs: likewise.
        layers: of the stack, in order.

    Returns:
        Of each storage its bytes times the layers that keep it beyond the first.
    """
    keepers: defaultdict[int, set[int]] = defaultdict(set)
    current = [-1]
    ours = {tensor.untyped_storage().data_ptr() for tensor in [*parameters, *inputs]}
    sizes: dict[int, int] = {}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        address = storage.data_ptr()
        if address not in ours:
            sizes[address] = storage.nbytes()
            keepers[address].add(current[0])
        return tensor

    def entering(index: int) -> Callable[..., None]:
        return lambda *_: current.__setitem__(0, index)

    hooks = [layer.register_forward_pre_hook(entering(index)) for index, layer in enumerate(layers)]
    try:
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            result = forward()
        # The graph holds the storages up to here, so no address stands for two of them.
        del result
    finally:
        for hook in hooks:
            hook.remove()
    return sum(sizes[address] * (len(by) - 1) for address, by in keepers.items())


def touch_heap(num_bytes: int) -> None:
    """Writes and frees `num_bytes` once, so that later allocations find their pages present.

    Helps only where the allocator keeps freed memory (`MALLOC_TRIM_THRESHOLD_`, set by the launcher).

    Args:
        num_bytes: of CPU memory.
    """
    torch.ones(num_bytes, dtype=torch.uint8)
