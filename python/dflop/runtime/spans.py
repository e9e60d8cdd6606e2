"""Start and end of each action on this rank, in nanoseconds of a steady clock.

On a GPU the host runs ahead of the device. There the clock is that of CUDA events on the stream; one
synchronisation at the start of each step ties it to the clock of the host. A span is the time in which an
action keeps the rank busy: computing and handing over messages. It starts when the action has its inputs, so
waiting for a message is not part of it.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from collections.abc import Sequence

_EVENTS_MAX = 1 << 14
"""The most events that are kept for the next step. An action takes two."""

Span = tuple[int, str, int, int]
"""(rank, action, start, end), times in nanoseconds since the start of the step; for the native module."""


@dataclass(frozen=True)
class RankSpans:
    """What one rank measured in one step, in nanoseconds of its own clock."""

    rank: int
    clock: str
    """Name of the clock: ranks with the same name read the same clock."""
    start_ns: int
    """When this rank left the barrier that starts the step."""
    actions: tuple[tuple[str, int, int], ...]
    tail: tuple[int, int]
    """Start and end of reduction, clipping and optimizer."""


def clock_name() -> str:
    """A name for this machine's steady clock, which starts at a boot: the identity of that boot."""
    boot = Path("/proc/sys/kernel/random/boot_id")
    return boot.read_text().strip() if boot.exists() else f"machine of node {time.time_ns()}"


class SpanRecorder:
    """Records the spans of one step after the other."""

    def __init__(self, rank: int, device: torch.device) -> None:
        """Nothing recorded yet.

        Args:
            rank: This rank.
            device: Where its work runs.
        """
        self._rank = rank
        self._device = device
        self._clock = clock_name()
        self._start_ns = 0
        self._start_event: torch.cuda.Event | None = None
        # Of a step, made once and used again in each: making one takes the host as long as recording it.
        self._events: list[torch.cuda.Event] = []
        self._num_used = 0
        self._stream: torch.cuda.Stream | None = None
        self._marks: list[tuple[str, int | torch.cuda.Event, int | torch.cuda.Event]] = []

    def begin(self) -> None:
        """Starts a step: forgets the last one. To be called when leaving the barrier."""
        self._marks = []
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
            self._stream = torch.cuda.current_stream(self._device)
            self._num_used = 0
            self._start_event = self._event()
        self._start_ns = time.monotonic_ns()

    def now(self) -> int | torch.cuda.Event:
        """A mark of this moment: the time or, on a GPU, an event put on the stream."""
        return self._event() if self._device.type == "cuda" else time.monotonic_ns()

    def add(self, action: str, start: int | torch.cuda.Event) -> None:
        """An action that began at `start` and ends now."""
        self._marks.append((action, start, self.now()))

    def finish(self) -> RankSpans:
        """What was measured since `begin`; the last span added is the tail. Waits for the device."""
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        times = [(action, self._ns(start), self._ns(end)) for action, start, end in self._marks]
        *actions, (_, tail_start, tail_end) = times
        return RankSpans(self._rank, self._clock, self._start_ns, tuple(actions), (tail_start, tail_end))

    def _event(self) -> torch.cuda.Event:
        if self._num_used < len(self._events):
            event = self._events[self._num_used]
            self._num_used += 1
        else:
            event = torch.cuda.Event(enable_timing=True)
            # Not those of an evaluation, which takes many and is not read.
            if len(self._events) < _EVENTS_MAX:
                self._events.append(event)
                self._num_used += 1
        event.record(self._stream)
        return event

    def _ns(self, mark: int | torch.cuda.Event) -> int:
        if isinstance(mark, int):
            return mark
        assert self._start_event is not None
        return self._start_ns + round(self._start_event.elapsed_time(mark) * 1e6)


def align(ranks: Sequence[RankSpans]) -> tuple[list[Span], list[tuple[int, int, int]], int]:
    """Spans of all ranks on one axis whose zero is the start of the step.

    For ranks with the same clock, zero is the moment when the first of them left the barrier. Ranks with
    another clock count from the first of their own; that zero is wrong by the time that the barrier took to
    reach them.

    Args:
        ranks: What each rank measured in the same step.

    Returns:
        Spans by rank and start; (rank, start, end) of each rank's tail; the end of the last tail.
    """
    zero = {clock: min(r.start_ns for r in ranks if r.clock == clock) for clock in {r.clock for r in ranks}}
    spans: list[Span] = []
    tails: list[tuple[int, int, int]] = []
    for r in sorted(ranks, key=lambda r: r.rank):
        origin = zero[r.clock]
        spans += [(r.rank, action, start - origin, end - origin) for action, start, end in r.actions]
        tails.append((r.rank, r.tail[0] - origin, r.tail[1] - origin))
    return spans, tails, max(end for _, _, end in tails)
