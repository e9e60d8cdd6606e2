"""Counts bytes that a forward keeps for its backward, bytes that wait between I and W, and peaks."""

from __future__ import annotations

import functools
from collections import defaultdict
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from dflop.models.byte_counter import ByteCounter
from dflop.models.split_backward import split_backward

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from torch import nn

    from dflop.models.byte_counter import Phase


def watch_allocations(work: Callable[[], Any], device: torch.device) -> tuple[Any, Phase]:
    """Runs `work` once and watches the allocator of `device`.

    Args:
        work: its result still exists when the bytes at the end are read.
        device: `cpu` or `cuda`.

    Returns:
        The result, and what was allocated beyond what was there before.
    """
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    with ByteCounter(device) as counter:
        counter.phase("work")
        result = work()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
    return result, counter.phases[0]


@dataclass(frozen=True)
class Saved:
    """What one forward keeps for its backward. A storage counts once and whole, even if kept as views."""

    total_bytes: int
    """Bytes of everything that is kept, and so stays allocated."""
    input_bytes: int
    """The part of `total_bytes` that lies in the given input buffers."""
    common_bytes: int
    """Bytes of what several layers keep in common, such as the angles of rotary positions, counted once for
    each layer after the first. `total_bytes` has them once. So if it is divided by the number of layers, each
    layer gets only a part of them, while a stage of a single layer keeps all of them."""
    has_result: bool
    """Whether the result of the forward is kept, too."""


def saved_for_backward(
    forward: Callable[[], Any],
    parameters: Iterable[torch.Tensor],
    inputs: Iterable[torch.Tensor] = (),
    layers: Sequence[nn.Module] = (),
) -> Saved:
    """Bytes that one forward keeps for its backward.

    Args:
        forward: run once.
        parameters: their storages are not counted.
        inputs: buffers of which `forward` reads a part; the parts that are kept are counted, not the buffers.
        layers: layers of the stack that `forward` runs, in order; without them `common_bytes` is 0.

    Returns:
        Bytes.
    """
    ours = {parameter.untyped_storage().data_ptr() for parameter in parameters}
    given = {buffer.untyped_storage().data_ptr() for buffer in inputs}
    kept: dict[int, int] = {}
    keepers: defaultdict[int, set[int]] = defaultdict(set)
    running = -1

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        address = storage.data_ptr()
        if address not in ours:
            num_bytes = tensor.numel() * tensor.element_size() if address in given else storage.nbytes()
            kept[address] = max(kept.get(address, 0), num_bytes)
            keepers[address].add(running)
        # Keeps the storage. The tensor itself may be a result of the operator that keeps it: both would hold
        # each other, and all that came before, for ever.
        return tensor.detach()

    def entering(index: int) -> Callable[..., None]:
        def enter(*_: object) -> None:
            nonlocal running
            running = index

        return enter

    hooks = [layer.register_forward_pre_hook(entering(index)) for index, layer in enumerate(layers)]
    try:
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            result = forward()
        has_result = isinstance(result, torch.Tensor) and result.untyped_storage().data_ptr() in kept
        # Up to here the graph holds all storages, so no two of them can have had the same address.
        del result
    finally:
        for hook in hooks:
            hook.remove()
    return Saved(
        total_bytes=sum(kept.values()),
        input_bytes=sum(kept[address] for address in given if address in kept),
        common_bytes=sum(kept[a] * (len(by) - 1) for a, by in keepers.items() if a not in given),
        has_result=has_result,
    )


def held_bytes(
    tensors: Iterable[torch.Tensor], parameters: Iterable[torch.Tensor], inputs: Iterable[torch.Tensor] = ()
) -> int:
    """Bytes that stay allocated because `tensors` exist.

    Args:
        tensors: each storage counts once and whole, however many of them are views of it.
        parameters: their storages are not counted.
        inputs: buffers of which `tensors` may be parts; the parts are counted, not the buffers.

    Returns:
        Bytes.
    """
    ours = {parameter.untyped_storage().data_ptr() for parameter in parameters}
    given = {buffer.untyped_storage().data_ptr() for buffer in inputs}
    held: dict[int, int] = {}
    for tensor in tensors:
        storage = tensor.untyped_storage()
        address = storage.data_ptr()
        if address not in ours:
            num_bytes = tensor.numel() * tensor.element_size() if address in given else storage.nbytes()
            held[address] = max(held.get(address, 0), num_bytes)
    return sum(held.values())


@dataclass(frozen=True)
class SplitBytes:
    """Memory of a backward in two parts, I and W."""

    queued_bytes: int
    """Bytes that wait in the queue from I to W."""
    input_peak_bytes: int
    """The most bytes during I, beyond what was allocated when it began."""
    weight_peak_bytes: int
    """The same during W."""


def count_split(
    forward: Callable[[], torch.Tensor],
    backward: Callable[[torch.Tensor], Any],
    module: nn.Module,
    device: torch.device,
    inputs: Callable[[torch.Tensor], Iterable[torch.Tensor]] = lambda _: (),
) -> SplitBytes:
    """Bytes of I and W over one run.

    Args:
        forward: of `module`; run once.
        backward: run once, on its result.
        module: its linear maps and embeddings are split; the gradients of its parameters are in place.
        device: the device that it runs on.
        inputs: takes the result, and gives buffers of which forward and backward read a part; see
            `held_bytes`.

    Returns:
        Bytes.
    """
    ours = [*module.parameters(), *module.buffers()]
    with split_backward(module) as queue:
        # The forward is watched, too: a CPU's allocator reports a free only if it reported the allocation.
        result, _ = watch_allocations(forward, device)
        _, of_input = watch_allocations(functools.partial(backward, result), device)
        queued_bytes = held_bytes(queue.held(), ours, inputs(result))
        del result
        _, of_weight = watch_allocations(queue.flush, device)
    return SplitBytes(queued_bytes, max(of_input.peak_bytes, 0), max(of_weight.peak_bytes, 0))


def touch_heap(num_bytes: int) -> None:
    """Writes and frees `num_bytes` once, so that later allocations cause no page faults.

    Helps only where the allocator keeps freed memory (`MALLOC_TRIM_THRESHOLD_`, set by the launcher).

    Args:
        num_bytes: of CPU memory.
    """
    torch.ones(num_bytes, dtype=torch.uint8)
