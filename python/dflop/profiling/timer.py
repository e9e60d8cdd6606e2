"""Clocks: the time of each phase of a run, and statistics of many runs."""

from __future__ import annotations

import functools
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from collections.abc import Sequence


Step = Callable[[Any], Any]
"""One phase of a run: takes the result of the phase before it (None in the first)."""


@dataclass(frozen=True)
class Timing:
    """One run, in nanoseconds."""

    phases_ns: tuple[int, ...]
    """Time of each phase, in order: forward and backward, or forward, input gradient and weight gradient."""

    @property
    def total_ns(self) -> int:
        """All phases together, in nanoseconds."""
        return sum(self.phases_ns)


@dataclass(frozen=True)
class Summary:
    """Statistics of several runs, in nanoseconds."""

    phases_ns: tuple[float, ...]
    """Median of each phase."""
    total_ns: float
    """Median of all phases together."""
    spread_ns: float
    """Third minus first quartile of all phases together."""
    repeats: int
    """Runs."""


# Without an interruption, a thread's own time is that of the steady clock, up to the cost of reading clocks.
# A larger difference than this counts as an interruption.
_INTERRUPTED_RATIO, _INTERRUPTED_NS = 0.02, 20_000


@functools.cache
def _has_thread_clock() -> bool:
    """Whether the clock of this thread's own time is fine enough: in some sandboxes it has ticks of 10 ms.

    The first tick tells, however little of the core this thread gets meanwhile.
    """
    start, first = time.perf_counter_ns(), time.thread_time_ns()
    ticked = first
    while ticked == first and time.perf_counter_ns() - start < 1_000_000_000:
        ticked = time.thread_time_ns()
    return 0 < ticked - first <= 100_000


def _working_ns(steady_ns: int, thread_ns: int) -> int:
    """Time of the work alone, without time in which another process had the core."""
    is_interrupted = steady_ns - thread_ns > max(_INTERRUPTED_NS, _INTERRUPTED_RATIO * steady_ns)
    return thread_ns if is_interrupted and _has_thread_clock() else steady_ns


def time_on_cpu(steps: Sequence[Step]) -> Timing:
    """Time of one run by the steady clock, on one thread.

    If the system gave the core to another process meanwhile, the thread's own clock is used instead: a rank
    with a core of its own would not have been interrupted. Slower caches and memory, which are shared with
    neighbours, do count.

    Args:
        steps: the phases.

    Returns:
        Their times.
    """
    result: Any = None
    times = [(time.perf_counter_ns(), time.thread_time_ns())]
    for step in steps:
        result = step(result)
        times.append((time.perf_counter_ns(), time.thread_time_ns()))
    return Timing(
        tuple(_working_ns(b[0] - a[0], b[1] - a[1]) for a, b in zip(times, times[1:], strict=False))
    )


def time_with_waiting(steps: Sequence[Step]) -> Timing:
    """Time of one run on a CPU by the steady clock, including waiting, for example for other ranks.

    Args:
        steps: the phases.

    Returns:
        Their times, with interruptions by other processes in them.
    """
    result: Any = None
    times = [time.perf_counter_ns()]
    for step in steps:
        result = step(result)
        times.append(time.perf_counter_ns())
    return Timing(tuple(b - a for a, b in zip(times, times[1:], strict=False)))


def time_on_cuda(steps: Sequence[Step]) -> Timing:
    """Time of one run on the current CUDA device, by events on its stream.

    Starts on an idle device and waits for it at the end. So where launching takes longer than computing, the
    time of launching counts.

    Args:
        steps: the phases.

    Returns:
        Their times.
    """
    torch.cuda.synchronize()
    return _read(_launch(steps))


def _launch(steps: Sequence[Step]) -> list[torch.cuda.Event]:
    """Launches the phases, and gives an event before each and one after the last."""
    events = [torch.cuda.Event(enable_timing=True) for _ in range(len(steps) + 1)]
    result: Any = None
    events[0].record()
    for step, event in zip(steps, events[1:], strict=True):
        result = step(result)
        event.record()
    return events


def _read(events: Sequence[torch.cuda.Event]) -> Timing:
    """The times between events; waits for the device."""
    torch.cuda.synchronize()
    # `elapsed_time` is in milliseconds.
    return Timing(tuple(round(1e6 * a.elapsed_time(b)) for a, b in zip(events, events[1:], strict=False)))


_SLEEP_CYCLES_MAX = 1 << 29
# How long the device is kept busy first, in its cycles; doubled where launching took longer.
_sleep = {"cycles": 1 << 21}


def time_on_busy_cuda(steps: Sequence[Step]) -> Timing | None:
    """Time of one run on the current CUDA device, which is busy while the run is launched.

    So the time of launching does not count, as in the middle of a layer.

    Args:
        steps: the phases.

    Returns:
        Their times; None where launching took longer than the device was busy: to be run again.
    """
    cycles = _sleep["cycles"]
    torch.cuda.synchronize()
    torch.cuda._sleep(cycles)
    events = _launch(steps)
    was_busy = not events[0].query()
    timing = _read(events)
    if not was_busy and cycles < _SLEEP_CYCLES_MAX:
        _sleep["cycles"] = 2 * cycles
        return None
    return timing


def timer_of(device: torch.device, *, counts_waiting: bool = False) -> Callable[[Sequence[Step]], Timing]:
    """The clock for a device.

    Args:
        device: `cpu` or `cuda`.
        counts_waiting: whether waiting for other ranks counts as time of a run; on a GPU it always does.

    Returns:
        `time_on_cpu`, `time_with_waiting` or `time_on_cuda`.
    """
    if device.type == "cuda":
        return time_on_cuda
    return time_with_waiting if counts_waiting else time_on_cpu


def summarise(timings: Sequence[Timing]) -> Summary:
    """Medians and spread of several runs.

    A run with page faults takes much longer than the rest. Medians and quartiles ignore it; means would not.

    Args:
        timings: at least one run, all of the same phases.

    Returns:
        The statistics.
    """
    totals = sorted(timing.total_ns for timing in timings)
    spread = 0.0
    if len(totals) > 1:
        first, _, third = statistics.quantiles(totals, n=4, method="inclusive")
        spread = third - first
    phases = zip(*(timing.phases_ns for timing in timings), strict=True)
    return Summary(
        tuple(statistics.median(phase) for phase in phases), statistics.median(totals), spread, len(timings)
    )
