"""Gradients with NaN or infinity: such a step is skipped, and after too many in a row the run ends."""

from __future__ import annotations

import math

from dflop.runtime.failure import RankError


class Guard:
    """Counts steps that are skipped because their gradient is not finite; too many in a row end the run."""

    def __init__(self, skipped_max: int) -> None:
        """Nothing skipped yet.

        Args:
            skipped_max: Steps in a row that may be skipped.
        """
        self._skipped_max = skipped_max
        self.in_row = 0
        """Steps skipped in a row, up to the last step; 0 where the last step was not skipped."""
        self.num_skipped = 0
        """Steps skipped in the whole run."""

    def skips(self, norm: float) -> bool:
        """Whether this step is skipped, its weights unchanged. The same on every rank, as the norm is.

        Args:
            norm: Of the gradients of the whole model.

        Returns:
            False where it is finite.

        Raises:
            RankError: More steps in a row are skipped than `skipped_max`.
        """
        if math.isfinite(norm):
            self.in_row = 0
            return False
        self.in_row += 1
        self.num_skipped += 1
        if self.in_row <= self._skipped_max:
            return True
        message = f"the norm of the gradients is {norm}, must be finite"
        if self._skipped_max > 0:
            rule = f"`train.skipped_steps_max` is {self._skipped_max}"
            message += f"; as many steps before it were skipped for that ({rule})"
        hint = (
            "lower `train.learning_rate` or `train.max_grad_norm`; "
            "`metrics.jsonl` shows how loss and norm went before"
        )
        raise RankError(message, hint, is_of_all=True)

    def state(self) -> dict[str, int]:
        """For a checkpoint."""
        return {"in_row": self.in_row, "num_skipped": self.num_skipped}

    def load(self, state: dict[str, int]) -> None:
        """Goes on from what `state` gave."""
        self.in_row, self.num_skipped = state["in_row"], state["num_skipped"]
