"""Ctrl-C while the command starts: it ends as later, without a traceback of what was being imported.

A program that imports dflop keeps its own way.
"""

from __future__ import annotations

import itertools
import signal
import sys


def _is_command() -> bool:
    """Whether this process was started as `dflop` or `python -m dflop`."""
    started, called = sys.orig_argv, (getattr(sys, "argv", None) or [""])[0]
    if called == "-m":
        return next((name for flag, name in itertools.pairwise(started) if flag == "-m"), "") == "dflop"
    # A process that another one spawns has that one's `argv`, and was started otherwise.
    return called.rpartition("/")[2] == "dflop" and called in started


# One that a shell lets ignore Ctrl-C goes on doing so.
if signal.getsignal(signal.SIGINT) is signal.default_int_handler and _is_command():
    signal.signal(signal.SIGINT, signal.SIG_DFL)
