"""Population: whether the samples that train are still like those that the plan was made with.

Samples have a kind (such as `image`) and a source; both are called names here. For each name a sequential
test (CUSUM) compares its share among the trained samples with its share of the data profile:

    evidence of a step = log [ P(counts | changed share) / P(counts | share of the data profile) ]
    sum                = max(0, sum + evidence); an alarm where it passes LIMIT

There are two sums for each name: for a changed share with `TIMES` the odds of the profile, and for one with
1 / `TIMES` of them. Where samples are drawn as in the profile, a sum gives a false alarm once in e^16 (9
million) steps on average, however rare the name is. Batches that are drawn without replacement vary less and
give even fewer. If a source is gone, the alarm comes after a few steps.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from dflop._native import Dataset

LIMIT = 16.0
"""Sum of log likelihood ratios above which a change is taken for sure."""
TIMES = 1.5
"""A change that is looked for multiplies the odds of a share by this, or divides them by it."""
LOOKED_AT = 1 << 17
"""About how many samples are counted for the usual shares; in larger data they are evenly spread."""
COUNT_MIN = 400
"""A name is watched if so many counted samples have it: its share is then known to 5 % (1 / sqrt(400))."""
_MEND = (
    "see `bad_samples.jsonl` for what was left out; where the data itself has changed, "
    "`dflop profile data` and then `dflop plan`"
)


class Population:
    """Compares the shares of one run with those of its data profile."""

    def __init__(self, dataset: Dataset) -> None:
        """Counts the profile's samples by kind and by source: the shares that are usual.

        Args:
            dataset: Of the run.
        """
        self._dataset = dataset
        looked_at = range(0, len(dataset), max(1, len(dataset) // LOOKED_AT))
        counts = _counted(name for sample in looked_at for name in self._names(sample))
        # Where only a part of the data is counted, the share of a rare name is not known well enough. A name
        # that all samples have cannot change its share either.
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
        """Adds the samples of a step, and gives the changes that have just become sure.

        Args:
            samples: Those that were trained.

        Returns:
            Alarms, as events without their step. A change is told once, until the share is usual again.
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
        """Goes on from what `state` gave; names that the data no longer has are left out.

        Args:
            kept: The answer of `state`, after a way through JSON.
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
    """Adds a step to a sum; true where the change has just become sure."""
    odds = times * share / (1 - share)
    other = odds / (1 + odds)
    evidence = count * math.log(other / share) + (num_samples - count) * math.log((1 - other) / (1 - share))
    change["sum"] += evidence
    if change["sum"] <= 0:
        # There is no change, or it is over: counting begins anew.
        change.update(_nothing()["more"])
        return False
    change["count"] += count
    change["num_samples"] += num_samples
    change["num_steps"] += 1
    # The sum has an upper limit, so that it falls to 0 soon after a change has ended.
    change["sum"] = min(change["sum"], 2 * LIMIT)
    if change["is_raised"] or change["sum"] <= LIMIT:
        return False
    change["is_raised"] = True
    return True


def _event(name: str, share: float, change: dict[str, Any]) -> dict[str, Any]:
    found = change["count"] / max(1, change["num_samples"])
    what, _, which = name.partition(" ")
    words = (
        f"samples of {what} `{which}` are {100 * found:.1f} % of those trained in the last "
        f"{change['num_steps']} steps, {100 * share:.1f} % of the data profile"
    )
    return {
        "kind": "alarm",
        "cause": "population",
        "size": found / share,
        "words": f"{words}: {_MEND}",
        "mend": _MEND,
    }
