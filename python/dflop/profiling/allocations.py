"""Bytes that a piece of work takes from the allocator: what stays at its end, and the peak on the way.

Exact on both kinds of device, buffers inside of kernels included: on CUDA the allocator's own statistics, on
a CPU its log of allocations, which PyTorch's profiler without Kineto records (Kineto itself takes seconds to
start and writes to stderr).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from collections.abc import Callable


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
    return _watch_cuda(work, device) if device.type == "cuda" else _watch_cpu(work)


def _watch_cuda(work: Callable[[], Any], device: torch.device) -> tuple[Any, Allocated]:
    torch.cuda.synchronize(device)
    torch.cuda.reset_peak_memory_stats(device)
    before = torch.cuda.memory_allocated(device)
    result = work()
    torch.cuda.synchronize(device)
    after, peak = torch.cuda.memory_allocated(device), torch.cuda.max_memory_allocated(device)
    return result, Allocated(after - before, peak - before)


def _watch_cpu(work: Callable[[], Any]) -> tuple[Any, Allocated]:
    from torch._C._autograd import _disable_profiler_legacy, _enable_profiler_legacy
    from torch._C._profiler import ProfilerConfig, ProfilerState, _ExperimentalConfig

    # Of its switches only the memory's is on.
    config = ProfilerConfig(ProfilerState.CPU, False, True, False, False, False, _ExperimentalConfig())
    _enable_profiler_legacy(config)
    try:
        result = work()
    finally:
        threads = _disable_profiler_legacy()
    live = peak = 0
    for thread in threads:
        for event in thread:
            if event.kind() == "memory_alloc":
                live += event.cpu_memory_usage()
                peak = max(peak, live)
    return result, Allocated(live, peak)
