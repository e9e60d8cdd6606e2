"""Bytes: those that tensors take, counted between two moments, phase by phase."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, cast

import torch

if TYPE_CHECKING:
    from typing_extensions import Self

_MARK = "dflop phase"


@dataclass(frozen=True)
class Phase:
    """Tensor bytes between two moments, above what was allocated when the counting began."""

    name: str
    peak_bytes: int
    """The most at any moment of the phase, its first included."""
    end_bytes: int
    """When the phase ended."""


class ByteCounter:
    """Counts the bytes of one device's tensors, exactly, phase by phase, within a `with` block.

    On a GPU these are the numbers of PyTorch's caching allocator, and counting costs nothing. On a CPU they
    are the allocator's own events, buffers inside an operator included, taken with the profiler of PyTorch:
    that slows the block down (some microseconds an operator), sees this thread and its backward only, and
    does not see it when a tensor from before the block is freed.
    """

    def __init__(self, device: torch.device) -> None:
        """Nothing counted yet.

        Args:
            device: Whose tensors count.
        """
        self._device = device
        self._names: list[str] = []
        self._profile: torch.profiler.profile | None = None
        self._start_bytes = 0
        self.phases: list[Phase] = []
        """All phases, in order; complete when the block has ended."""

    def __enter__(self) -> Self:
        """Begins to count; bytes are those above what is allocated now."""
        if self._device.type == "cuda":
            self._start_bytes = torch.cuda.memory_allocated(self._device)
        else:
            # The profiler's own lines on stderr are of no use to anyone here.
            os.environ.setdefault("KINETO_LOG_LEVEL", "99")
            self._profile = torch.profiler.profile(
                activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True
            )
            self._profile.__enter__()
        return self

    def phase(self, name: str) -> None:
        """Ends the running phase and begins the next; what comes before the first is not reported."""
        if self._device.type == "cuda":
            self._end_cuda_phase()
            torch.cuda.reset_peak_memory_stats(self._device)
        else:
            with torch.profiler.record_function(_MARK):
                pass
        self._names.append(name)

    def __exit__(self, *error: object) -> None:
        """Ends the last phase."""
        if self._profile is None:
            self._end_cuda_phase()
            return
        self._profile.__exit__(*error)
        if error[0] is None:
            self._read_events(self._profile)
        self._profile = None

    @property
    def peak_bytes(self) -> int:
        """The most over all phases; 0 without any."""
        return max((phase.peak_bytes for phase in self.phases), default=0)

    def _end_cuda_phase(self) -> None:
        if len(self.phases) == len(self._names):
            return
        peak = torch.cuda.max_memory_allocated(self._device) - self._start_bytes
        end = torch.cuda.memory_allocated(self._device) - self._start_bytes
        self.phases.append(Phase(self._names[len(self.phases)], peak, end))

    def _read_events(self, profile: torch.profiler.profile) -> None:
        assert profile.profiler is not None
        results = profile.profiler.kineto_results
        assert results is not None
        events = [e for e in results.events() if e.name() in ("[memory]", _MARK)]
        # Stable: events of one nanosecond keep their order.
        events.sort(key=lambda e: e.start_ns())
        live = peak = 0
        for event in events:
            if event.name() == _MARK:
                self._end_phase(peak, live)
                peak = live
            elif event.device_type().name == "CPU":
                # The stubs of PyTorch do not know it.
                live += cast("Any", event).nbytes()
                peak = max(peak, live)
        self._end_phase(peak, live)
        # The first one ended at the first mark, before which nothing has a name.
        self.phases = self.phases[1:]

    def _end_phase(self, peak: int, live: int) -> None:
        name = self._names[len(self.phases) - 1] if self.phases else ""
        self.phases.append(Phase(name, peak, live))
