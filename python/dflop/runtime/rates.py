"""Learning rates: one for each component, and how they change over a run. They depend on the step only."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping

COMPONENTS = ("encoder", "projector", "llm")
"""Parts of a model that may learn at rates of their own."""


@dataclass(frozen=True)
class Rates:
    """Learning rates of a run: one for each component, and how they change over the steps."""

    peak: Mapping[str, float]
    """By component: the rate after the warm-up."""
    schedule: str
    """`constant`, `cosine`, `linear` (both to 0 at the last step) or `constant-then-decay`."""
    num_steps: int
    """Of the whole run."""
    warmup_steps: int
    """Steps at the start over which rates rise evenly: the first step has 1 / `warmup_steps` of the peak."""
    decay_steps: int
    """Steps at the end over which rates fall evenly; used by `constant-then-decay` only."""

    def factor(self, step: int) -> float:
        """What the peak is multiplied by at a step.

        Args:
            step: From 0.

        Returns:
            From 0 to 1.
        """
        if step < self.warmup_steps:
            return (step + 1) / self.warmup_steps
        if self.schedule == "constant":
            return 1.0
        if self.schedule == "constant-then-decay":
            return max(0.0, min(1.0, (self.num_steps - step) / self.decay_steps))
        # The factor is 1 at the first step after the warm-up and would be 0 one step after the last.
        done = min(1.0, (step - self.warmup_steps) / max(1, self.num_steps - self.warmup_steps))
        return 0.5 * (1.0 + math.cos(math.pi * done)) if self.schedule == "cosine" else 1.0 - done

    def at(self, step: int) -> dict[str, float]:
        """The rate of each component at a step."""
        return {component: rate * self.factor(step) for component, rate in self.peak.items()}
