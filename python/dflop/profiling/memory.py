"""Bytes: what a forward keeps for its backward, the peak of both, and a heap that is touched beforehand."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, cast

import torch

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

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


def touch_heap(num_bytes: int) -> None:
    """Writes and frees `num_bytes` once, so that later allocations find their pages present.

    Helps only where the allocator keeps freed memory (`MALLOC_TRIM_THRESHOLD_`, set by the launcher).

    Args:
        num_bytes: of CPU memory.
    """
    torch.ones(num_bytes, dtype=torch.uint8)
