"""Says where a collation pads and balanced batches do not know it: there they would lose what they gain.

Pads nothing and takes no padding away: that is `padding.py`.
"""

from __future__ import annotations

import sys
import warnings
from typing import TYPE_CHECKING, Any

import torch
from torch.utils.data import get_worker_info

if TYPE_CHECKING:
    from collections.abc import Callable

NUM_BATCHES = 16
"""Batches that are looked at before anything is said: their mean is known to some per cent."""

RATIO_MIN = 1.1
"""Tokens with padding for each real one from which on it is said."""


class WatchedCollation:
    """A collation whose first batches are looked at, by all processes that collate together."""

    def __init__(self, collate: Callable[[list[Any]], Any]) -> None:
        """Looks at nothing yet.

        Args:
            collate: what makes a batch of samples.
        """
        self.collate = collate
        self._is_removed = False
        # Batches seen, real tokens, tokens if padded to the longest row, tokens as they are, and whether all
        # was said. Shared with the workers of this epoch and of the next ones.
        self._counts = torch.zeros(5, dtype=torch.int64).share_memory_()

    def __call__(self, samples: list[Any]) -> Any:
        """The batch, as `collate` makes it.

        Args:
            samples: of the dataset.

        Returns:
            The batch.
        """
        batch = self.collate(samples)
        if not self._counts[4]:
            self._look(batch)
        return batch

    def __getstate__(self) -> dict[str, Any]:
        # A process that is started anew does not know what was done to the model in this one.
        return {**self.__dict__, "_is_removed": self._is_removed or is_removed()}

    def _look(self, batch: Any) -> None:
        mask: Any = batch.get("attention_mask", None) if hasattr(batch, "get") else None
        # Without a mask of (rows, tokens) nothing says where padding is.
        if getattr(mask, "ndim", 0) != 2 or mask.shape[0] < 2:
            return
        lengths = (mask != 0).sum(dim=1)
        num_rows, width = mask.shape
        found = [1, int(lengths.sum()), num_rows * int(lengths.max()), num_rows * width, 0]
        self._counts += torch.tensor(found)
        worker = get_worker_info()
        if self._counts[0] >= NUM_BATCHES and (worker is None or worker.id == 0):
            self._counts[4] = 1
            self._say()

    def _say(self) -> None:
        _, num_real, num_longest, num_padded, _ = self._counts.tolist()
        if num_padded <= RATIO_MIN * max(1, num_real) or self._is_removed or is_removed():
            return
        ratio = f"{num_padded / max(1, num_real):.2f} tokens for each real one"
        if num_padded > RATIO_MIN * num_longest:
            text = (
                f"rows are padded beyond the longest of their batch: {ratio}. Balanced batches are even in "
                "real tokens, so ranks may wait longer than before. Pad to the longest row, "
            )
        else:
            text = (
                f"rows are padded: {ratio}. Balanced batches are even in real tokens, so ranks may wait "
                "longer than before. Give the balanced batches `is_padded=True`, "
            )
        text += "or compute no padding: `dflop.integrations.remove_padding(model)`"
        warnings.warn(text, stacklevel=4)


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
