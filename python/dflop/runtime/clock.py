"""Where the wall clock of a run goes: every nanosecond of the leader belongs to one part of some step."""

from __future__ import annotations

import time

PARTS = ("schedule", "pack", "agree", "step", "checkpoint", "evaluation", "write")
"""In this order: waiting for the schedule; packing samples, and waiting for media; waiting for the last rank
to be ready; the step itself; copying for checkpoints and waiting for them; evaluations; gathering spans and
writing the journals."""


class Clock:
    """Measures one process in laps, without gaps: all time since a lap belongs to the next lap."""

    def __init__(self) -> None:
        """Starts."""
        self._began_ns = self._last_ns = time.monotonic_ns()
        self._parts = _nothing()
        self._totals = _nothing()

    def lap(self, part: str) -> None:
        """Ends a lap: counts the time since the last lap as time of `part`.

        Args:
            part: One of `PARTS`.
        """
        now = time.monotonic_ns()
        self._parts[part] += now - self._last_ns
        self._totals[part] += now - self._last_ns
        self._last_ns = now

    def take(self) -> dict[str, int]:
        """Nanoseconds by part since the last call; and `end`, from the start to the end of the last lap.

        The parts of all answers together add up to the `end` of the last answer.
        """
        parts, self._parts = self._parts, _nothing()
        return {**parts, "end": self._last_ns - self._began_ns}

    def totals(self) -> dict[str, int]:
        """Nanoseconds by part since the start; and `end`, their sum: from the start to the last lap."""
        return {**self._totals, "end": self._last_ns - self._began_ns}


def _nothing() -> dict[str, int]:
    return dict.fromkeys(PARTS, 0)
