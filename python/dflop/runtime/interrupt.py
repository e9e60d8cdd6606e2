"""Ctrl-C in a rank: it waits for the end of the step."""

from __future__ import annotations

import signal

INTERRUPTED = 130
"""Exit status after Ctrl-C, as shells have it: 128 + SIGINT."""


class Interrupt:
    """Remembers Ctrl-C until the running step has been written."""

    def __init__(self) -> None:
        """Takes over SIGINT of this process."""
        self.is_set = False
        signal.signal(signal.SIGINT, self._remember)

    def _remember(self, *_: object) -> None:
        self.is_set = True
