"""How long a rank waits for others: longer in its first step than in later ones.

start, model, first step    minutes: kernels are loaded, ranks start apart, a checkpoint is read
second step and later       a step takes what it takes; who is much later hangs
"""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import torch.distributed as dist

DECODING_RATIO = 0.75
"""Of the time that others wait for a rank; the rest is for the steps before, which end apart."""


class Deadline:
    """The time after which a rank that waits for another gives up."""

    def __init__(self, first_s: float, later_s: float) -> None:
        """That of the first step.

        Args:
            first_s: Seconds until the first step has ended.
            later_s: Seconds from then on.
        """
        self.now = timedelta(seconds=first_s)
        """What holds at present."""
        self._later = timedelta(seconds=later_s)
        self._kept: set[dist.ProcessGroup] = set()

    def decoding_s(self) -> float:
        """Seconds that a rank waits for its decoders: less than others wait for it, so that it says why."""
        return DECODING_RATIO * self.now.total_seconds()

    def keep(self, group: dist.ProcessGroup) -> None:
        """Leaves a group that waits for something else than steps, as for disks, with the longer time."""
        self._kept.add(group)

    def shorten(self) -> None:
        """The first step has ended: all groups of this process but those kept have the later time.

        Messages of gloo between two ranks take no notice of it: whoever waits for one passes `now`.
        """
        if self.now == self._later:
            return
        self.now = self._later
        groups: Any = dist.distributed_c10d._world.pg_map  # noqa: SLF001  # pyright: ignore[reportPrivateUsage]
        for group in groups:
            if group not in self._kept:
                dist.set_timeout(self._later, group)
