"""Signals that end a run: a rank waits for the end of the step."""

from __future__ import annotations

import signal

SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)
"""Ctrl-C; the signal of job schedulers and of an external torchrun; SLURM's warning before a job's end."""


class Interrupt:
    """Remembers a signal to stop until the running step has been written."""

    def __init__(self) -> None:
        """Takes over `SIGNALS` of this process."""
        self.number = 0
        """Number of the last signal that came; 0: none came."""
        for number in SIGNALS:
            signal.signal(number, self._remember)

    def _remember(self, number: int, _: object) -> None:
        self.number = number
