"""Clocks: the time of one forward and one backward, and what many of them say together."""

from __future__ import annotations

import functools
import statistics
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence


@dataclass(frozen=True)
class Timing:
    """One run, in nanoseconds."""

    forward_ns: int
    """Time of the forward."""
    backward_ns: int
    """Time of the backward."""

    @property
    def total_ns(self) -> int:
        """Forward and backward together, in nanoseconds."""
        return self.forward_ns + self.backward_ns


@dataclass(frozen=True)
class Summary:
    """What several runs say, in nanoseconds."""

    forward_ns: float
    """Median of the forwards."""
    backward_ns: float
    """Median of the backwards."""
    spread_ns: float
    """Third minus first quartile of forward plus backward."""
    repeats: int
    """Runs."""


# A thread that was not interrupted spends all of the steady clock's time, but for the clocks' own cost.
_INTERRUPTED_RATIO, _INTERRUPTED_NS = 0.02, 20_000


@functools.cache
def _has_thread_clock() -> bool:
    """Whether the clock of this thread's own time is fine enough; some sandboxes count ticks of 10 ms."""
    start, spent = time.perf_counter_ns(), time.thread_time_ns()
    while time.perf_counter_ns() - start < 1_000_000:
        pass
    return 100_000 < time.thread_time_ns() - spent <= 1_500_000


def _working_ns(steady_ns: int, thread_ns: int) -> int:
    """Time of the work alone: what another process took of it by having the core is no cost of ours."""
    is_interrupted = steady_ns - thread_ns > max(_INTERRUPTED_NS, _INTERRUPTED_RATIO * steady_ns)
    return thread_ns if is_interrupted and _has_thread_clock() else steady_ns


def time_on_cpu(forward: Callable[[], Any], backward: Callable[[Any], None]) -> Timing:
    """Time of one run by the steady clock, on one thread.

    Where the system gave the core to another process meanwhile, the thread's own clock is taken instead: a
    rank that has its core to itself would not have been interrupted. Caches and memory shared with neighbours
    do count.

    Args:
        forward: gives what `backward` starts from.
        backward: called once with it.

    Returns:
        Both times.
    """
    start = (time.perf_counter_ns(), time.thread_time_ns())
    result = forward()
    middle = (time.perf_counter_ns(), time.thread_time_ns())
    backward(result)
    end = (time.perf_counter_ns(), time.thread_time_ns())
    return Timing(
        _working_ns(middle[0] - start[0], middle[1] - start[1]),
        _working_ns(end[0] - middle[0], end[1] - middle[1]),
    )


def time_on_cuda(forward: Callable[[], Any], backward: Callable[[Any], None]) -> Timing:
    """Time of one run on the current CUDA device, by events on its stream.

    Starts on an idle device and waits for it at the end, so that the time to launch counts where it is the
    longer.

    Args:
        forward: gives what `backward` starts from.
        backward: called once with it.

    Returns:
        Both times.
    """
    events = [torch.cuda.Event(enable_timing=True) for _ in range(3)]
    torch.cuda.synchronize()
    events[0].record()
    result = forward()
    events[1].record()
    backward(result)
    events[2].record()
    torch.cuda.synchronize()
    # Events count milliseconds.
    forward_ns, backward_ns = (
        round(1e6 * a.elapsed_time(b)) for a, b in zip(events, events[1:], strict=False)
    )
    return Timing(forward_ns, backward_ns)


def timer_of(device: torch.device) -> Callable[[Callable[[], Any], Callable[[Any], None]], Timing]:
    """The clock for a device.

    Args:
        device: `cpu` or `cuda`.

    Returns:
        `time_on_cpu` or `time_on_cuda`.
    """
    return time_on_cuda if device.type == "cuda" else time_on_cpu


def summarise(timings: Sequence[Timing]) -> Summary:
    """Medians and spread of several runs.

    Runs that page faults struck lie far above the rest: medians and quartiles ignore them, means would not.

    Args:
        timings: at least one run.

    Returns:
        What they say.
    """
    totals = sorted(timing.total_ns for timing in timings)
    spread = 0.0
    if len(totals) > 1:
        first, _, third = statistics.quantiles(totals, n=4, method="inclusive")
        spread = third - first
    return Summary(
        statistics.median(timing.forward_ns for timing in timings),
        statistics.median(timing.backward_ns for timing in timings),
        spread,
        len(timings),
    )
