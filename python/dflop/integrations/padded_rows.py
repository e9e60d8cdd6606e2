"""Says where a collation pads and balanced batches do not know it: there they would lose what they gain.

Pads nothing and takes no padding away: that is `padding.py`.
"""

from __future__ import annotations

import sys
import warnings
from typing import TYPE_CHECKING, Any

from torch.utils.data import get_worker_info

if TYPE_CHECKING:
    from collections.abc import Callable

NUM_BATCHES = 16
"""Batches that are looked at: some per cent of padding more or less is no news."""

RATIO_MIN = 1.1
"""Tokens with padding for each real one from which on it is said."""


class WatchedCollation:
    """A collation whose first batches are looked at, in whichever process it runs."""

    def __init__(self, collate: Callable[[list[Any]], Any]) -> None:
        """Looks at nothing yet.

        Args:
            collate: what makes a batch of samples.
        """
        self.collate = collate
        self._num_left = NUM_BATCHES
        self._num_real = self._num_padded = 0

    def __call__(self, samples: list[Any]) -> Any:
        """The batch, as `collate` makes it.

        Args:
            samples: of the dataset.

        Returns:
            The batch.
        """
        batch = self.collate(samples)
        worker = get_worker_info()
        # Each worker has its own copy: the first speaks.
        if self._num_left > 0 and (worker is None or worker.id == 0):
            self._look(batch)
        return batch

    def __getstate__(self) -> dict[str, Any]:
        # A process that is started anew does not know what was done to the model in this one.
        return {**self.__dict__, "_num_left": 0 if is_removed() else self._num_left}

    def _look(self, batch: Any) -> None:
        mask = batch.get("attention_mask") if hasattr(batch, "get") else None
        # Without a mask of (rows, tokens) nothing says where padding is.
        if getattr(mask, "ndim", 0) != 2 or mask.shape[0] < 2:
            return
        self._num_left -= 1
        self._num_real += int((mask != 0).sum())
        self._num_padded += mask.shape[0] * mask.shape[1]
        if self._num_left == 0 and self._num_padded > RATIO_MIN * max(1, self._num_real) and not is_removed():
            warnings.warn(
                f"rows are padded: {self._num_padded / max(1, self._num_real):.2f} tokens for each real one. "
                "Balanced batches are even in real tokens, so ranks may wait longer than before. Give the "
                "balanced batches `is_padded=True`, or compute no padding: "
                "`dflop.integrations.remove_padding(model)`",
                stacklevel=2,
            )


def is_removed() -> bool:
    """Whether `remove_padding` is in force for a model of this process."""
    padding = sys.modules.get("dflop.integrations.padding")
    return padding is not None and len(padding.IN_FORCE) > 0


def watched(options: dict[str, Any], is_padded: Any, rank: int) -> dict[str, Any]:
    """Arguments of a DataLoader, with its collation watched where that can tell something new.

    Args:
        options: arguments, `collate_fn` among them or not.
        is_padded: whether the balanced batches know of padding.
        rank: of them the first alone speaks.

    Returns:
        The same arguments, or new ones.
    """
    collate = options.get("collate_fn")
    if collate is None or is_padded or rank != 0:
        return options
    return {**options, "collate_fn": WatchedCollation(collate)}
