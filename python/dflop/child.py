"""Processes that hear of each other's end: a signal goes down, and none outlives the one it works for."""

from __future__ import annotations

import ctypes
import os
import signal
import subprocess
import sys
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

_PARENT = "DFLOP_PARENT"
"""Environment variable with the id of the process that a child works for."""
_PR_SET_PDEATHSIG = 1
"""Of `prctl(2)`."""


def run_child(command: Sequence[str], environment: Mapping[str, str]) -> tuple[int, int | None]:
    """Runs a process to its end, and passes a signal on to it, once, as Ctrl-C.

    Args:
        command: Of the process; it calls `end_with_parent` first.
        environment: Of it.

    Returns:
        Its exit status, as of `subprocess`, and the first signal that came to this process meanwhile.

    Raises:
        OSError: It cannot be started.
    """
    caught: int | None = None
    process: subprocess.Popen[bytes] | None = None
    is_told = False

    def pass_on() -> None:
        nonlocal is_told
        if process is not None and not is_told:
            is_told = True
            process.send_signal(signal.SIGINT)

    def forward(number: int, _: object) -> None:
        # SIGTERM and SIGHUP end this process alone where a queue or a lost terminal sends them: the child
        # must not go on without it. It ends as after Ctrl-C.
        nonlocal caught
        if caught is None:
            caught = number
            pass_on()

    # Before it starts: a signal that ended this process in between would leave it, and all below it, behind.
    numbers = [signal.SIGINT, signal.SIGTERM]
    # `nohup` ignores it, so that the work outlives the terminal.
    if signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:
        numbers.append(signal.SIGHUP)
    handlers = {n: signal.signal(n, forward) for n in numbers}
    try:
        # In a session of its own, or the terminal would send Ctrl-C to it a second time.
        process = subprocess.Popen(command, env={**environment, **as_parent()}, start_new_session=True)
        if caught is not None:
            pass_on()
        status = process.wait()
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)
    return status, caught


def as_parent() -> dict[str, str]:
    """What the environment of a child that calls `end_with_parent` must have.

    Returns:
        One variable.
    """
    return {_PARENT: str(os.getpid())}


def end_with_parent() -> None:
    """Sends Ctrl-C to this process when its parent is gone, which `kill -9` gives no time to say so.

    The parent is a process of ours that waits: under `nohup` it outlives its terminal, and so does this one.
    Where this process was started by hand, and elsewhere than on Linux, nothing happens.
    """
    parent = os.environ.pop(_PARENT, None)
    if parent is None or sys.platform != "linux":
        return
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGINT)
    # It may have gone before it was asked for.
    if os.getppid() != int(parent):
        os._exit(128 + signal.SIGINT)
