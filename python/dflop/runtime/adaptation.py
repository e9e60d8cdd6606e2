"""Whether measured times correct the schedules of a run: cost against benefit.

The scheduler can learn from measured steps and correct the times that it predicts. That takes time on the
leader, so it is done only while it saves more than it costs.

    watching: seven steps in eight are learned from; every fourth schedule is also made without correction
    decision: after 32 steps; saved = mean makespan won by the correction, simulated with corrected times
              cost  = what learning adds to the leader's time between two steps (medians, with and without)
    resting:  where saved <= cost; ranks are still watched, shapes and corrected times are not; after 256
              steps, or after an alarm, watching begins again

Only the leader decides; the other ranks receive the schedules. Every decision is an event, with its numbers.
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
"""Every fourth schedule is made a second time, without the correction, to see what the correction saves."""
UNMONITORED_EVERY = 8
"""Every eighth step is not learned from: its shorter time on the leader shows what learning costs."""


class Adaptation:
    """Decides during one run whether its schedules are corrected."""

    def __init__(self, mode: str) -> None:
        """Starts in the state `watching`, unless the mode is `off`.

        Args:
            mode: `auto`: decides by cost and benefit; `on`: never rests; `off`: never corrects.
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
        """Whether to correct the next schedule, and whether to compare it with one that is not corrected."""
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
        """Ends a rest at once. Called after an alarm: a correction that did not pay before may pay now."""
        if self._mode == "auto" and self.is_resting:
            self._left = 0

    def state(self) -> dict[str, Any]:
        """What a checkpoint keeps, so that a resumed run decides as an uninterrupted one would."""
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
        """Goes on from what `state` gave, unless that run had another mode.

        Args:
            kept: The answer of `state`, after a way through JSON.
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
        """Takes the numbers of a step that has ended, and decides where a window or a rest is over.

        Args:
            step: Its number.
            correction: The correction that its schedule was made with.
            compared_ns: Makespans of its batch without and with the correction, both simulated with corrected
                times; none where only one schedule was made.
            step_ns: Duration of the step.
            cost_ns: What the leader spent after the step: with learning, or, in every eighth step, without.

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
