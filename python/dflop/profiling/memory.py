"""Bytes: what a forward keeps for its backward, what waits between I and W, the peaks, and a touched heap."""

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
        work: its result is alive when the bytes at its end are read.
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
    """What one forward keeps for its backward: each storage once, whole, however many views are kept."""

    total_bytes: int
    """All of it: that is what stays allocated."""
    input_bytes: int
    """Of `total_bytes`, in the given buffers."""
    common_bytes: int
    """What several layers of a stack keep in common, as the angles of rotary positions, times the layers that
    keep it beyond the first. Divided by the number of layers, `total_bytes` of a whole stack hold a part of
    it only; a stage of fewer layers keeps it whole all the same."""
    has_result: bool
    """Whether the result is kept, too."""


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
        layers: of the stack that `forward` runs, in order; without them nothing is in common.

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
        return tensor

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
        # The graph holds the storages up to here, so no address stands for two of them.
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
    """Bytes that stay allocated for the sake of `tensors`.

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
    """What a backward in two holds."""

    queued_bytes: int
    """From I to W."""
    input_peak_bytes: int
    """The most that I has beyond what was there when it began."""
    weight_peak_bytes: int
    """Likewise W."""


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
        device: it runs on.
        inputs: of the result: buffers of which forward and backward read a part, as in `held_bytes`.

    Returns:
        Bytes.
    """
    ours = [*module.parameters(), *module.buffers()]
    with split_backward(module) as queue:
        # Watched as well: a CPU's allocator tells of what is freed only where it told of its allocation.
        result, _ = watch_allocations(forward, device)
        _, of_input = watch_allocations(functools.partial(backward, result), device)
        queued_bytes = held_bytes(queue.held(), ours, inputs(result))
        del result
        _, of_weight = watch_allocations(queue.flush, device)
    return SplitBytes(queued_bytes, max(of_input.peak_bytes, 0), max(of_weight.peak_bytes, 0))


def touch_heap(num_bytes: int) -> None:
    """Writes and frees `num_bytes` once, so that later allocations find their pages present.

    Helps only where the allocator keeps freed memory (`MALLOC_TRIM_THRESHOLD_`, set by the launcher).

    Args:
        num_bytes: of CPU memory.
    """
    torch.ones(num_bytes, dtype=torch.uint8)
