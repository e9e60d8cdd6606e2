"""Counts the bytes that tensors take, phase by phase."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from typing_extensions import Self


@dataclass(frozen=True)
class Phase:
    """Tensor bytes between two moments, above what was allocated when the counting began."""

    name: str
    peak_bytes: int
    """The most at any moment of the phase, including its first moment."""
    end_bytes: int
    """At the end of the phase."""


class ByteCounter:
    """Counts the bytes of one device's tensors, exactly, phase by phase, within a `with` block.

    On a GPU the numbers come from PyTorch's caching allocator, and counting costs nothing. On a CPU they come
    from the allocator's events, which include buffers inside an operator. That slows the block down by some
    microseconds an operator, and it sees only this thread and its backward.
    """

    def __init__(self, device: torch.device) -> None:
        """Nothing counted yet.

        Args:
            device: Whose tensors count.
        """
        self._device = device
        self._name: str | None = None
        self._start_bytes = 0
        self._live_bytes = 0
        self.phases: list[Phase] = []
        """All phases, in order; complete when the block has ended."""

    def __enter__(self) -> Self:
        """Begins to count; all bytes are counted from what is allocated now."""
        if self._device.type == "cuda":
            self._start_bytes = torch.cuda.memory_allocated(self._device)
        self._begin()
        return self

    def phase(self, name: str) -> None:
        """Ends the running phase and begins another. What is before the first phase is not reported."""
        self._end()
        self._name = name
        self._begin()

    def __exit__(self, *error: object) -> None:
        """Ends the last phase."""
        self._end()
        self._name = None

    @property
    def peak_bytes(self) -> int:
        """The most over all phases; 0 without any."""
        return max((phase.peak_bytes for phase in self.phases), default=0)

    def _begin(self) -> None:
        if self._device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(self._device)
        else:
            _log_allocations()

    def _end(self) -> None:
        before = self._live_bytes
        if self._device.type == "cuda":
            peak = torch.cuda.max_memory_allocated(self._device) - self._start_bytes
            self._live_bytes = torch.cuda.memory_allocated(self._device) - self._start_bytes
        else:
            most, kept = _read_log()
            peak, self._live_bytes = before + most, before + kept
        if self._name is not None:
            self.phases.append(Phase(self._name, peak, self._live_bytes))


def _log_allocations() -> None:
    """Makes the CPU's allocator log its events, until `_read_log`.

    This uses PyTorch's legacy profiler. The other one, Kineto, takes seconds to start and writes to stderr.
    """
    from torch._C._autograd import _enable_profiler_legacy
    from torch._C._profiler import ProfilerConfig, ProfilerState, _ExperimentalConfig

    # Of all switches of the profiler only the one for memory is on.
    config = ProfilerConfig(ProfilerState.CPU, False, True, False, False, False, _ExperimentalConfig())
    _enable_profiler_legacy(config)


def _read_log() -> tuple[int, int]:
    """Bytes relative to the start of the log: the most, at least 0; and at its end, which may be negative."""
    from torch._C._autograd import _disable_profiler_legacy

    live = peak = 0
    for thread in _disable_profiler_legacy():
        for event in thread:
            if event.kind() == "memory_alloc":
                live += event.cpu_memory_usage()
                peak = max(peak, live)
    return peak, live
