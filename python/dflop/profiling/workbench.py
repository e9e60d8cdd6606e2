"""Where cases run: makes cases, tries whether they fit into memory, counts their bytes and times them.

A session says what is to be done next; the workbench does it, on this rank alone (`Workbench`) or on several
at once (`dflop.profiling.together`).
"""

from __future__ import annotations

import gc
from contextlib import nullcontext
from typing import TYPE_CHECKING, Protocol

import torch

from dflop.profiling.cases import JOINT, SPLIT, Case, find_layers
from dflop.profiling.curves import LAYERS
from dflop.profiling.memory import count_split, saved_for_backward, watch_allocations
from dflop.profiling.timer import timer_of

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from dflop.models.sums import Sums
    from dflop.profiling.curves import Curve
    from dflop.profiling.timer import Timing


class Bench(Protocol):
    """What a session needs. Curves are given by name; a size must be tried before it is run."""

    def try_size(
        self, name: str, size: int, *, with_recompute: bool, known: Mapping[str, int]
    ) -> dict[str, int] | None:
        """See `Workbench.try_size`."""
        ...

    def collect(self) -> None:
        """See `Workbench.collect`."""
        ...

    def warm_up(self, name: str) -> None:
        """See `Workbench.warm_up`."""
        ...

    def run(self, name: str, size: int, way: str) -> Timing:
        """See `Workbench.run`."""
        ...


class Workbench:
    """The curves of one session on this rank."""

    def __init__(self, curves: Sequence[Curve], device: torch.device, sums: Sums | None = None) -> None:
        """Nothing is made or run yet.

        Args:
            curves: with distinct names.
            device: the device that they run on.
            sums: over the ranks that run the same cases, where there are any.
        """
        self._curves = {curve.name: curve for curve in curves}
        self._device, self._sums = device, sums
        self._timer = timer_of(device, counts_waiting=sums is not None)

    def try_size(
        self, name: str, size: int, *, with_recompute: bool, known: Mapping[str, int]
    ) -> dict[str, int] | None:
        """Makes the case of a size and runs it once in each way, without other ranks.

        Args:
            name: of the curve.
            size: one that is allowed.
            with_recompute: whether a new case is measured with recomputation, too.
            known: bytes that were counted earlier, by name.

        Returns:
            Bytes that were not known, by name; None if memory ran out, and the case is dropped.
        """
        curve = self._curves[name]
        try:
            # Without other ranks, so that none of them waits if this fails.
            with nullcontext() if self._sums is None else self._sums.silent():
                return self._count(curve.case(size, with_recompute=with_recompute), curve, known)
        except (RuntimeError, MemoryError) as error:
            if not is_out_of_memory(error):
                raise
        # Done after the handler: inside it the exception holds the frames, and so the tensors, of the run.
        self.drop(name, size)
        return None

    def drop(self, name: str, size: int) -> None:
        """Forgets the case of a size, if there is one.

        Args:
            name: of the curve.
            size: of the case.
        """
        self._curves[name].cases.pop(size, None)
        # Reference cycles of a failed run would still hold memory when the next size is tried.
        gc.collect()
        if self._device.type == "cuda":
            torch.cuda.empty_cache()

    def _count(self, case: Case, curve: Curve, known: Mapping[str, int]) -> dict[str, int]:
        new: dict[str, int] = {}
        if "workspace" not in known:
            new |= self._count_bytes(case, curve)
        if case.module is not None and "queued" not in known:
            new |= self._count_split(case, curve, {**known, **new}["bytes"])
        common = {**known, **new}["common bytes"]
        for way in case.ways:
            if way == JOINT:
                case.run_untimed(way)
            elif f"{way} bytes" not in known:
                with case.steps(way) as steps:
                    # Bound as a default argument, so that the lambda does not depend on the loop's variables.
                    first = steps[0]
                    result, allocated = watch_allocations(lambda first=first: first(None), self._device)
                    for step in steps[1:]:
                        result = step(result)
                new[f"{way} bytes"] = max(allocated.end_bytes, 0) + common
        return new

    def _count_bytes(self, case: Case, curve: Curve) -> dict[str, int]:
        parameters = list(curve.built.module.parameters())
        case.reset()
        # Run once before: caches of libraries and buffers of a first call do not count as workspace.
        case.run_untimed()
        piece = curve.built.piece
        is_stack = piece.name in LAYERS and piece.num_layers > 1
        layers = find_layers(curve.built.module, piece.num_layers) if is_stack else ()
        saved = saved_for_backward(case.forward, parameters, case.inputs, layers)
        case.reset()
        result, forward = watch_allocations(case.forward, self._device)
        _, backward = watch_allocations(lambda: case.backward(result), self._device)
        return {
            # What several layers keep in common counts for each of them: a stage may have a single layer.
            "common bytes": saved.common_bytes,
            "bytes": saved.total_bytes + saved.common_bytes,
            "workspace": max(forward.peak_bytes - max(forward.end_bytes, 0), backward.peak_bytes),
        }

    def _count_split(self, case: Case, curve: Curve, kept_bytes: int) -> dict[str, int]:
        assert case.module is not None, "attention alone has no weights"
        case.run_untimed(SPLIT)
        case.reset()
        buffers = lambda result: (*case.inputs, curve.gradients.like(result))  # noqa: E731
        split = count_split(case.forward, case.backward, case.module, self._device, buffers)
        # The input workspace is to be that of one layer. The last layer's I runs on top of what the other
        # layers have queued. What they queued beyond what the forward had kept is subtracted from the peak.
        grown = max(0, split.queued_bytes - kept_bytes)
        return {
            "queued": split.queued_bytes,
            "input workspace": split.input_peak_bytes - grown * (case.copies - 1) // case.copies,
            "weight workspace": split.weight_peak_bytes,
        }

    def run_ways(self, name: str, size: int) -> None:
        """Runs the case of a size once in each way, not timed.

        Args:
            name: of the curve.
            size: one that was tried.
        """
        case = self._curves[name].cases[size]
        for way in case.ways:
            case.run_untimed(way)

    def collect(self) -> None:
        """Frees reference cycles that autograd leaves and that hold memory; called while nothing is timed."""
        gc.collect()

    def warm_up(self, name: str) -> None:
        """Brings the module of a curve into the cache, as on a rank that runs nothing else.

        Args:
            name: of the curve.
        """
        cases = self._curves[name].cases
        cases[min(cases)].run_untimed()

    def run(self, name: str, size: int, way: str) -> Timing:
        """Runs once under the clock.

        Args:
            name: of the curve.
            size: one that was tried.
            way: as in `cases.WAYS`.

        Returns:
            The time of each phase.
        """
        case = self._curves[name].cases[size]
        if self._sums is not None:
            # An all-reduce as a barrier: all ranks begin at the same time.
            self._sums.add(torch.zeros(1, device=self._device))
        return case.run(way, self._timer)


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an error says that memory ran out.

    Args:
        error: any.

    Returns:
        True for such errors of CUDA, its libraries, the CPU's allocator and Python.
    """
    if isinstance(error, (torch.OutOfMemoryError, MemoryError)):
        return True
    # Some errors have no class of their own, only a text: those of the CPU's allocator; of the CUDA driver
    # where it loads a kernel; of cuBLAS and cuDNN, for handles and workspaces. cuDNN tries one engine after
    # the other, and where none gets its workspace it only says that it found none.
    texts = (
        "allocate memory", "CUDA error: out of memory", "STATUS_ALLOC_FAILED", "unable to find an engine",
    )  # fmt: skip
    return isinstance(error, RuntimeError) and any(text in str(error) for text in texts)
