"""How long a rank waits for others: longer in its first step than in later ones.

start, model, first step    minutes: kernels are loaded, ranks start apart, a checkpoint is read
second step and later       steps take about equally long; a rank that is much later hangs
"""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import torch.distributed as dist

DECODING_RATIO = 0.75
"""Part of the limit that a rank waits for its own decoders, so that it gives up before the others do. The
rest allows for ranks that ended the step before at different moments."""


class Deadline:
    """The time after which a rank that waits for another gives up."""

    def __init__(self, first_s: float, later_s: float) -> None:
        """Begins with the limit of the first step.

        Args:
            first_s: Seconds until the first step has ended.
            later_s: Seconds from then on.
        """
        self.now = timedelta(seconds=first_s)
        """The limit that holds at present."""
        self._later = timedelta(seconds=later_s)
        self._kept: set[dist.ProcessGroup] = set()

    def decoding_s(self) -> float:
        """Seconds that a rank waits for its decoders: fewer than others wait for it, so it can say why."""
        return DECODING_RATIO * self.now.total_seconds()

    def keep(self, group: dist.ProcessGroup) -> None:
        """Leaves a group the longer limit, since it does not wait for steps but, for example, for disks."""
        self._kept.add(group)

    def shorten(self) -> None:
        """Gives all groups of this process the later limit, except those of `keep`; after the first step.

        On gloo, messages between two ranks ignore the limit of their group: the caller passes `now` instead.
        """
        if self.now == self._later:
            return
        self.now = self._later
        c10d: Any = dist.distributed_c10d
        # PyTorch 2.11 has it under this name alone.
        set_timeout = getattr(dist, "set_timeout", None) or c10d._set_pg_timeout  # noqa: SLF001
        for group in c10d._world.pg_map:  # noqa: SLF001
            if group not in self._kept:
                set_timeout(self._later, group)
