"""Population: whether the samples that are trained are still those that were planned with.

    counts of a step, by kind and by source
      -> for each name: log P(counts | another share) / P(counts | its share of the data profile), summed up
         from 0 on; an alarm above LIMIT

The other share has `TIMES` the odds, or one over that. Of samples drawn as in the profile, a sum passes its
limit once in e^16 steps (9 million) on the mean, however rare the name is. Batches that are drawn without
replacement scatter less. A source that is gone is named after a few steps.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from dflop._native import Dataset

LIMIT = 16.0
"""Log likelihood ratio from which a change is sure."""
TIMES = 1.5
"""Odds of the share that is looked for, over those of the profile; and one over that."""
LOOKED_AT = 1 << 17
"""Samples that are counted, about: evenly spread over larger data."""
COUNT_MIN = 400
"""Of those, how many must have a name: its share is then known to 5 %."""
_MEND = (
    "see `bad_samples.jsonl` for what was left out; where the data itself has changed, "
    "`dflop profile data` and then `dflop plan`"
)


class Population:
    """The shares of one run against those of its data profile."""

    def __init__(self, dataset: Dataset) -> None:
        """Counts the profile's samples by kind and by source: the shares that are usual.

        Args:
            dataset: Of the run.
        """
        self._dataset = dataset
        looked_at = range(0, len(dataset), max(1, len(dataset) // LOOKED_AT))
        counts = _counted(name for sample in looked_at for name in self._names(sample))
        # Of a part of the data a rare name's share is not known well enough.
        # What all samples are cannot shift.
        least = 1 if len(looked_at) == len(dataset) else COUNT_MIN
        self._shares = {
            name: count / len(looked_at)
            for name, count in sorted(counts.items())
            if least <= count < len(looked_at)
        }
        self._changes = {name: _nothing() for name in self._shares}

    def _names(self, sample: int) -> tuple[str, str]:
        return f"kind {self._dataset.kind(sample)}", f"source {self._dataset.source(sample)}"

    def step(self, samples: Sequence[int]) -> list[dict[str, Any]]:
        """What has become sure with the samples of a step.

        Args:
            samples: Those that were trained.

        Returns:
            Alarms, as events without their step: each of a name once, until its share is the usual one again.
        """
        counts = _counted(name for sample in samples for name in self._names(sample))
        events: list[dict[str, Any]] = []
        for name, share in self._shares.items():
            change = self._changes[name]
            for side, times in (("more", TIMES), ("less", 1 / TIMES)):
                if _add(change[side], counts.get(name, 0), len(samples), share, times):
                    events.append(_event(name, share, change[side]))
        return events

    def state(self) -> dict[str, Any]:
        """What a checkpoint keeps."""
        return {
            name: {side: dict(sums) for side, sums in sides.items()} for name, sides in self._changes.items()
        }

    def load(self, kept: dict[str, Any]) -> None:
        """Goes on from what `state` gave; of names that the data no longer has, nothing is taken.

        Args:
            kept: Through JSON.
        """
        for name in self._changes.keys() & kept.keys():
            self._changes[name] = {side: {**sums} for side, sums in kept[name].items()}


def _nothing() -> dict[str, dict[str, Any]]:
    return {
        side: {"sum": 0.0, "count": 0, "num_samples": 0, "num_steps": 0, "is_raised": False}
        for side in ("more", "less")
    }


def _counted(names: Iterable[str]) -> dict[str, int]:
    counts: dict[str, int] = {}
    for name in names:
        counts[name] = counts.get(name, 0) + 1
    return counts


def _add(change: dict[str, Any], count: int, num_samples: int, share: float, times: float) -> bool:
    """Adds a step to a sum; whether the change has just become sure."""
    odds = times * share / (1 - share)
    other = odds / (1 + odds)
    evidence = count * math.log(other / share) + (num_samples - count) * math.log((1 - other) / (1 - share))
    change["sum"] += evidence
    if change["sum"] <= 0:
        # The change, if it was one, is over; what follows is counted anew.
        change.update(_nothing()["more"])
        return False
    change["count"] += count
    change["num_samples"] += num_samples
    change["num_steps"] += 1
    # Bounded, so that it is soon over when it is over.
    change["sum"] = min(change["sum"], 2 * LIMIT)
    if change["is_raised"] or change["sum"] <= LIMIT:
        return False
    change["is_raised"] = True
    return True


def _event(name: str, share: float, change: dict[str, Any]) -> dict[str, Any]:
    found = change["count"] / max(1, change["num_samples"])
    what, _, which = name.partition(" ")
    words = (
        f"samples of {what} `{which}` are {found:.1%} of those trained in the last {change['num_steps']} "
        f"steps, {share:.1%} of the data profile"
    )
    return {
        "kind": "alarm",
        "cause": "population",
        "size": found / share,
        "words": f"{words}: {_MEND}",
        "mend": _MEND,
    }
