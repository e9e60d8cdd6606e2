"""Where the wall clock of a run goes: every nanosecond of the leader belongs to one part of some step."""

from __future__ import annotations

import time

PARTS = ("schedule", "pack", "agree", "step", "checkpoint", "evaluation", "write")
"""Waiting for the schedule; packing samples, and waiting for media; waiting for the last rank to be ready;
the step itself; copying and waiting for checkpoints; evaluations; gathering spans, writing the journals."""


class Clock:
    """Laps of one process; what lies between two of them is not lost but belongs to the second."""

    def __init__(self) -> None:
        """Starts."""
        self._began_ns = self._last_ns = time.monotonic_ns()
        self._parts = _nothing()
        self._totals = _nothing()

    def lap(self, part: str) -> None:
        """All since the last lap was `part`.

        Args:
            part: One of `PARTS`.
        """
        now = time.monotonic_ns()
        self._parts[part] += now - self._last_ns
        self._totals[part] += now - self._last_ns
        self._last_ns = now

    def take(self) -> dict[str, int]:
        """Nanoseconds by part since this was asked last; and `end`, those of the last lap since the start.

        Over all answers the parts add up to the last `end`.
        """
        parts, self._parts = self._parts, _nothing()
        return {**parts, "end": self._last_ns - self._began_ns}

    def totals(self) -> dict[str, int]:
        """Nanoseconds by part since the start; and `end`, their sum: from the start to the last lap."""
        return {**self._totals, "end": self._last_ns - self._began_ns}


def _nothing() -> dict[str, int]:
    return dict.fromkeys(PARTS, 0)
