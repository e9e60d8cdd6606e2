"""Whether measured times correct the schedules of a run: cost against benefit.

    watching: every step is learned from; a step in four is scheduled with and without the correction
    decision: after 32 steps; saved = mean makespan won by the correction, simulated with corrected times
              cost  = mean time of learning and comparing on the leader, between two steps
    resting:  where saved <= cost; ranks are still watched, shapes and corrected times are not; after 256
              steps, or after an alarm, watching begins again

One leader decides; the others get schedules. Every decision is an event, with its numbers.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Mapping

WINDOW = 32
"""Steps between two decisions."""
REST = 256
"""Steps without correction before it is tried again."""
COMPARED_EVERY = 4
"""One schedule in so many is made without the correction too."""
UNMONITORED_EVERY = 8
"""One step in so many of a window is not learned from: it shows what learning costs."""


class Adaptation:
    """The state of one run."""

    def __init__(self, mode: str) -> None:
        """Watching, if it may.

        Args:
            mode: `auto`; `on`: never rests; `off`: never corrects.
        """
        self._mode = mode
        self._left = WINDOW
        self._num_asked = 0
        self._saved_ns: list[int] = []
        self._costs_ns: dict[bool, list[int]] = {True: [], False: []}
        self._steps_ns: list[int] = []
        self.is_resting = mode == "off"
        """Whether schedules are made without correction for now."""

    def asks(self) -> tuple[bool, bool]:
        """Whether the next schedule shall be corrected, and whether it shall be compared."""
        self._num_asked += 1
        is_corrected = not self.is_resting
        is_compared = is_corrected and self._mode == "auto" and self._num_asked % COMPARED_EVERY == 0
        return is_corrected, is_compared

    def is_monitored(self, step: int) -> bool:
        """Whether a step is learned from."""
        if self._mode == "auto" and not self.is_resting:
            return step % UNMONITORED_EVERY != UNMONITORED_EVERY - 1
        return not self.is_resting

    def wake(self) -> None:
        """An alarm: what did not pay may pay now."""
        if self._mode == "auto" and self.is_resting:
            self._left = 0

    def state(self) -> dict[str, Any]:
        """What a checkpoint keeps: a run that goes on decides as one that was never ended."""
        return {
            "mode": self._mode,
            "left": self._left,
            "num_asked": self._num_asked,
            "saved_ns": self._saved_ns,
            "learned_ns": self._costs_ns[True],
            "other_ns": self._costs_ns[False],
            "steps_ns": self._steps_ns,
            "is_resting": self.is_resting,
        }

    def load(self, kept: Mapping[str, Any]) -> None:
        """Goes on from what `state` gave, unless it was asked to decide otherwise then.

        Args:
            kept: Through JSON.
        """
        if kept["mode"] != self._mode:
            return
        self._left, self._num_asked = kept["left"], kept["num_asked"]
        self._saved_ns, self._steps_ns = list(kept["saved_ns"]), list(kept["steps_ns"])
        self._costs_ns = {True: list(kept["learned_ns"]), False: list(kept["other_ns"])}
        self.is_resting = kept["is_resting"]

    def after(
        self,
        step: int,
        correction: dict[str, Any] | None,
        compared_ns: tuple[int, int] | None,
        step_ns: int,
        cost_ns: int,
    ) -> list[dict[str, Any]]:
        """A step is over.

        Args:
            step: Its number.
            correction: What its schedule was made with.
            compared_ns: Corrected makespans of its batch without and with it, where both were made.
            step_ns: What it took.
            cost_ns: What the leader spent on learning from it, or on what it does where it does not learn.

        Returns:
            The decision, as an event without its step; none between two decisions.
        """
        if self._mode != "auto":
            return []
        self._left -= 1
        if not self.is_resting:
            if compared_ns is not None:
                without, with_correction = compared_ns
                self._saved_ns.append(without - with_correction)
            self._costs_ns[self.is_monitored(step)].append(cost_ns)
            self._steps_ns.append(step_ns)
        if self._left > 0:
            return []
        if self.is_resting:
            self._begin()
            return [_event("watch", "the correction of schedules is tried again", {})]
        return [self._decide(correction)]

    def _decide(self, correction: dict[str, Any] | None) -> dict[str, Any]:
        learned, other = self._costs_ns[True], self._costs_ns[False]
        cost_ns = max(0.0, _median(learned) - _median(other)) if other else _median(learned)
        saved_ns = sum(self._saved_ns) / max(1, len(self._saved_ns))
        numbers = {
            "saved_ns": round(saved_ns),
            "cost_ns": round(cost_ns),
            "step_ns": round(_median(self._steps_ns)),
            "num_compared": len(self._saved_ns),
            "num_steps": len(learned) + len(other),
            "correction": correction,
        }
        what = f"saves {saved_ns / 1e6:.2f} ms a step and costs {cost_ns / 1e6:.2f} ms"
        if saved_ns > cost_ns:
            self._begin()
            return _event("keep", f"the correction of schedules {what}: it stays on", numbers)
        self._begin()
        self.is_resting, self._left = True, REST
        words = f"the correction of schedules {what}: it is off for {REST} steps"
        return _event("rest", words, numbers)

    def _begin(self) -> None:
        self.is_resting, self._left = False, WINDOW
        self._saved_ns, self._costs_ns, self._steps_ns = [], {True: [], False: []}, []


def _event(decision: str, words: str, numbers: dict[str, Any]) -> dict[str, Any]:
    return {"kind": "correction", "decision": decision, "words": words, **numbers}


def _median(numbers: list[int]) -> float:
    ordered = sorted(numbers)
    return float(ordered[len(ordered) // 2]) if ordered else 0.0
