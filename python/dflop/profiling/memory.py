"""Bytes: what a forward keeps for its backward, and a heap whose pages are there before the clock starts."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable


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
    # The graph holds the storages up to here, so no address stands for two of them.
    del result
    return sum(kept.values())


def touch_heap(num_bytes: int) -> None:
    """Writes and frees `num_bytes` once, so that later allocations find their pages present.

    Helps only where the allocator keeps freed memory (`MALLOC_TRIM_THRESHOLD_`, set by the launcher).

    Args:
        num_bytes: of CPU memory.
    """
    torch.ones(num_bytes, dtype=torch.uint8)
