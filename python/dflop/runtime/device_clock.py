"""The clock of a rehearsed rank: that of a device which is not there, and which its process runs ahead of.

    start of an action = max(end of the action before it on the rank,
                             end of each input's action + its predicted transfer,
                             the moment when the process comes to it)
    end of an action   = start + predicted duration

A process that feeds a GPU issues an action while the action before it still runs. A process does the same
here: it issues an action as soon as the one before it has begun. Its message leaves at once, since no process
waits for what its GPU receives; it carries a time stamp, the moment at which the action will end. The system
may wake a process late, and a message takes its time on this machine. Such delays then show only where they
last longer than the running action, as on a GPU.

Clocks of two machines cannot be compared. Between machines a message is therefore sent when its action has
ended, and the moment of its arrival counts instead of the stamp.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

from dflop.runtime.failure import talking
from dflop.runtime.spans import SpanRecorder, clock_name

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from dflop.runtime.meeting import Meeting
    from dflop.runtime.mesh import Mesh

MARGIN_NS = 2_000_000
"""At least so long before a step starts its start is agreed on, so that no rank starts late."""
MARGIN_OF_RANK_NS = 1_000_000
"""Added to `MARGIN_NS` for each rank of this machine: on few cores they wake one after the other."""
MARGIN_OF_NEED = 2
"""The margin is at least so many times what ranks needed in the step before to issue their first actions."""


def sleep_until(moment_ns: int) -> None:
    """Returns at `moment_ns` of the steady clock, or at once where that is over.

    Args:
        moment_ns: As `time.monotonic_ns` has it.
    """
    left = moment_ns - time.monotonic_ns()
    if left > 0:
        time.sleep(left / 1e9)


class DeviceClock:
    """When the device of this rank is free and its inputs are there, in ns of this machine's steady clock."""

    def __init__(
        self,
        clock: int,
        clocks: Sequence[int],
        now: Callable[[], int] = time.monotonic_ns,
        sleep: Callable[[int], None] = sleep_until,
    ) -> None:
        """Before the first step.

        Args:
            clock: Number of this machine's clock, from `clock_number`.
            clocks: The same number for the machine of each rank.
            now: The steady clock.
            sleep: Takes a moment of that clock, and returns at it.
        """
        self.clock = clock
        self._is_here = [other == clock for other in clocks]
        self._now = now
        self._sleep = sleep
        self._free_ns = 0
        self._arrived_ns = 0
        self._begin_ns = 0
        self._agreed_ns = 0
        self._issued_ns = 0
        self.start_ns = 0
        """Of the action under way."""
        self.end_ns = 0
        """Of the action under way."""
        self.needed_ns = 0
        """From the agreement on the start of the step to when this rank issued what it starts with."""

    @property
    def num_here(self) -> int:
        """Ranks of this machine."""
        return sum(self._is_here)

    @property
    def is_one_machine(self) -> bool:
        """Whether all ranks read this clock."""
        return all(self._is_here)

    def begin(self, start_ns: int, agreed_ns: int | None = None) -> None:
        """A step begins at `start_ns`, which was agreed on at `agreed_ns`; none: just then."""
        self._free_ns = self._begin_ns = self.start_ns = self.end_ns = start_ns
        self._agreed_ns = start_ns if agreed_ns is None else agreed_ns
        self._arrived_ns = self._issued_ns = self.needed_ns = 0

    def arrive(self, sent_ns: Sequence[int], transfer_ns: int) -> None:
        """Notes when the inputs of the next action arrive: `transfer_ns` after the last of `sent_ns`."""
        if sent_ns:
            self._arrived_ns = max(sent_ns) + transfer_ns

    def ready(self) -> int:
        """When the device could start the next action; returns once it has started what `run` was called for.

        The action takes no time unless `run` is called for it, too.
        """
        self._sleep(self._issued_ns)
        self.start_ns = self.end_ns = max(self._free_ns, self._arrived_ns)
        return self.start_ns

    def join(self, start_ns: int) -> None:
        """Delays the action under way to `start_ns`, for ranks that start it together."""
        self.start_ns = self.end_ns = max(self.start_ns, start_ns)

    def run(self, duration_ns: int, receivers: Sequence[int] = ()) -> int:
        """Issues the action under way and returns at once, or at its end where a receiver is elsewhere.

        Args:
            duration_ns: Predicted duration of the action.
            receivers: Ranks that get its result.

        Returns:
            Its end. It may lie in the future; where a receiver is on another machine it has passed.
        """
        now_ns = self._now()
        if self.start_ns == self._begin_ns:
            self.needed_ns = now_ns - self._agreed_ns
        self.start_ns = max(self.start_ns, now_ns)
        self.end_ns = self.start_ns + duration_ns
        self._issued_ns = self.start_ns
        if any(not self._is_here[rank] for rank in receivers):
            self._sleep(self.end_ns)
        return self.end_ns

    def finish(self) -> None:
        """Notes that the action under way is issued: the device is free again at its end."""
        self._free_ns = self.end_ns
        self._arrived_ns = 0

    def wait(self) -> None:
        """Returns at the end of the action under way."""
        self._sleep(self.end_ns)


def clock_number() -> int:
    """A number that is the same on all ranks of a machine, and another on every other machine."""
    return int.from_bytes(clock_name().encode()[:7], "big")


def device_clock(mesh: Mesh) -> DeviceClock:
    """The clock of this rank. Every rank must call it; blocks until all have.

    Args:
        mesh: This rank's coordinates.

    Returns:
        Before the first step.
    """
    own = torch.tensor([clock_number()], dtype=torch.int64)
    gathered = [torch.empty_like(own) for _ in range(mesh.num_ranks)]
    with talking("tell machines apart"):
        dist.all_gather(gathered, own, group=mesh.control)
    return DeviceClock(int(own), [int(clock) for clock in gathered])


def start_together(clock: DeviceClock, mesh: Mesh, all_ranks: Meeting) -> None:
    """Begins a step at one moment on all ranks of a machine. Every rank must call it; blocks until all have.

    The moment lies ahead by a margin in which every rank issues its first action, as a process that feeds a
    GPU does before the GPU starts. How long that takes depends on the machine, so the margin follows from the
    step before.

    Args:
        clock: Of this rank.
        mesh: This rank's coordinates.
        all_ranks: Where they meet.
    """
    least_ns = MARGIN_NS + MARGIN_OF_RANK_NS * clock.num_here
    with talking("start a step together"):
        if clock.is_one_machine:
            margin_ns = max(least_ns, MARGIN_OF_NEED * all_ranks.largest(clock.needed_ns))
            start_ns = all_ranks.largest(0, lambda _: time.monotonic_ns() + margin_ns)
            clock.begin(start_ns, start_ns - margin_ns)
            return
        own = torch.tensor([time.monotonic_ns(), clock.clock], dtype=torch.int64)
        gathered = [torch.empty_like(own) for _ in range(mesh.num_ranks)]
        dist.all_gather(gathered, own, group=mesh.control)
    last_ns = max(int(one[0]) for one in gathered if int(one[1]) == clock.clock)
    clock.begin(last_ns + least_ns)


def meet(clock: DeviceClock, meeting: Meeting) -> None:
    """Has the action under way start when it can on all ranks that meet, each of which must call it; blocks.

    Args:
        clock: Of this rank.
        meeting: The ranks.
    """
    if clock.is_one_machine:
        clock.join(meeting.largest(clock.start_ns))
    else:
        # Clocks of several machines cannot be compared: all ranks wait for the last one to come.
        clock.wait()
        meeting.largest(0)
        clock.join(time.monotonic_ns())


class DeviceRecorder(SpanRecorder):
    """Spans by the clock of the device that a rank stands for."""

    def __init__(self, rank: int, clock: DeviceClock) -> None:
        """Nothing recorded yet.

        Args:
            rank: This rank.
            clock: Its device's.
        """
        super().__init__(rank, torch.device("cpu"))
        self._device_clock = clock

    def begin(self) -> None:
        """Starts a step, at the moment at which the device clock starts it."""
        super().begin()
        self._start_ns = self._device_clock.start_ns

    def now(self) -> int:
        """When the device could start the next action."""
        return self._device_clock.ready()

    def add(self, action: str, start: int | torch.cuda.Event) -> None:
        """The action under way, as the device runs it."""
        del start
        clock = self._device_clock
        self._marks.append((action, clock.start_ns, clock.end_ns))
        clock.finish()
