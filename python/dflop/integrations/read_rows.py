"""Samples that a loader has read and not collated yet; from a worker they come as bytes."""

from __future__ import annotations

import pickle
from typing import TYPE_CHECKING, Any

from dflop.integrations.sent_rows import own

if TYPE_CHECKING:
    from collections.abc import Sequence


class ReadRows:
    """Samples of one batch; in a type of its own, so that nobody moves their tensors to a device."""

    def __init__(self, rows: Sequence[Any]) -> None:
        """Holds them.

        Args:
            rows: samples.
        """
        self.rows = rows

    def __reduce__(self) -> tuple[Any, ...]:
        """As bytes: each tensor alone would take a file descriptor, and there may be thousands."""
        return _unpickled, (type(self), pickle.dumps(own(list(self.rows))))


def _unpickled(kind: type[ReadRows], rows: bytes) -> ReadRows:
    return kind(pickle.loads(rows))  # noqa: S301 of a worker of this process
