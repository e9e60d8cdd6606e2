"""Ctrl-C while the command starts: it ends as later, without a traceback of what was being imported.

A program that imports dflop keeps its own way.
"""

from __future__ import annotations

import itertools
import os
import signal
import sys


def _is_command() -> bool:
    """Whether this process was started as `dflop` or `python -m dflop`."""
    started, called = sys.orig_argv, (getattr(sys, "argv", None) or [""])[0]
    if called == "-m":
        return next((name for flag, name in itertools.pairwise(started) if flag == "-m"), "") == "dflop"
    # A process that another one spawns has that one's `argv`, and was started otherwise.
    # A script of one's own may have the command's name, and lies elsewhere.
    command = os.path.join(os.path.dirname(sys.executable), "dflop")  # noqa: PTH118, PTH120 it starts sooner
    return os.path.abspath(called) == command and called in started  # noqa: PTH100


# One that a shell lets ignore Ctrl-C goes on doing so.
if signal.getsignal(signal.SIGINT) is signal.default_int_handler and _is_command():
    signal.signal(signal.SIGINT, signal.SIG_DFL)
