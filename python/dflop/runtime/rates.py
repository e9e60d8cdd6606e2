"""Learning rates: one a component, and how they go over the steps of a run. Nothing here is state."""

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
    """Learning rates of a run: one a component, and how they go over the steps."""

    peak: Mapping[str, float]
    """By component: the rate after the warm-up."""
    schedule: str
    """`constant`, `cosine`, `linear` (both to 0 at the last step) or `constant-then-decay`."""
    num_steps: int
    """Of the whole run."""
    warmup_steps: int
    """First steps, over which rates rise in equal parts: the first has 1 / `warmup_steps` of the peak."""
    decay_steps: int
    """Last steps, over which rates fall in equal parts under `constant-then-decay`."""

    def factor(self, step: int) -> float:
        """What the peak is multiplied by at a step; depends on nothing but the step.

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
        # From 1 at the first step after the warm-up to 0 just behind the last one.
        done = min(1.0, (step - self.warmup_steps) / max(1, self.num_steps - self.warmup_steps))
        return 0.5 * (1.0 + math.cos(math.pi * done)) if self.schedule == "cosine" else 1.0 - done

    def at(self, step: int) -> dict[str, float]:
        """The rate of each component at a step."""
        return {component: rate * self.factor(step) for component, rate in self.peak.items()}
