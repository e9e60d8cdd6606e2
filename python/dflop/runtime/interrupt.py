"""Signals that end a run: a rank waits for the end of the step."""

from __future__ import annotations

import signal

SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)
"""Ctrl-C, what schedulers and an external torchrun send, and SLURM's warning before its end."""
INTERRUPTED = 128 + signal.SIGINT
"""Exit status after Ctrl-C, as shells have it."""


class Interrupt:
    """Remembers a signal to stop until the running step has been written."""

    def __init__(self) -> None:
        """Takes over `SIGNALS` of this process."""
        self.number = 0
        """Of the last that came; 0: none did."""
        for number in SIGNALS:
            signal.signal(number, self._remember)

    def _remember(self, number: int, _: object) -> None:
        self.number = number
