"""Child processes that get our signals, and that never outlive the process they work for.

signal to us          what the child gets
SIGINT, SIGTERM       SIGINT, once; it may end its step, or write what it has
SIGHUP, SIGUSR1       the same, unless it was ignored when we started (`nohup`); SIGUSR1 is Slurm's warning
SIGINT, ignored       nothing, if it was ignored when we started (a script's job in the background)
after the grace       SIGKILL, if it has not ended since
"""

from __future__ import annotations

import ctypes
import os
import signal
import subprocess
import sys
import threading
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

_PARENT = "DFLOP_PARENT"
"""Environment variable with the id of the process that a child works for."""
_PR_SET_PDEATHSIG = 1
"""Of `prctl(2)`."""
GRACE_S = 60.0
"""A child that was told to end is killed after so many seconds. torchrun gives its ranks 30 of them."""


def run_child(
    command: Sequence[str],
    environment: Mapping[str, str],
    what: str,
    grace_s: float = GRACE_S,
    handles: Sequence[int] = (),
) -> tuple[int, int | None]:
    """Runs a process to its end, and passes a signal on to it, once, as Ctrl-C.

    A child that is stopped is woken to hear it. One that does not end within the grace is killed, and
    stderr says so; it also says where something else killed the child.

    Args:
        command: Of the process; it calls `end_with_parent` first.
        environment: Of it.
        what: The process in words, for errors, as in "the process that measures".
        grace_s: Seconds that it may take to end once it was told to.
        handles: Open files that it shares, such as a lock.

    Returns:
        Its exit status, as of `subprocess`, and the first signal that came to this process meanwhile.

    Raises:
        OSError: It cannot be started.
    """
    caught: int | None = None
    process: subprocess.Popen[bytes] | None = None
    killer: threading.Timer | None = None

    def kill(process: subprocess.Popen[bytes]) -> None:
        if process.poll() is None:
            print(
                f"{what} (process {process.pid}) did not end within {grace_s:g} s: it is killed",
                file=sys.stderr,
            )
            process.kill()

    def pass_on() -> None:
        nonlocal killer
        # Once: a wrapper such as `uv run` sends again what the terminal has sent already.
        if process is None or killer is not None:
            return
        killer = threading.Timer(grace_s, kill, [process])
        killer.daemon = True
        process.send_signal(signal.SIGINT)
        # Stopped (`kill -STOP`, a debugger), it would not hear of it.
        process.send_signal(signal.SIGCONT)
        killer.start()

    def forward(number: int, _: object) -> None:
        # SIGTERM, SIGHUP and SIGUSR1 end this process alone where a queue or a lost terminal sends them: the
        # child must not go on without it. It ends as after Ctrl-C.
        nonlocal caught
        if caught is None:
            caught = number
        pass_on()

    # Before it starts: a signal that ended this process in between would leave it, and all below it, behind.
    handlers = {}
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1):
        is_ignored = signal.getsignal(number) is signal.SIG_IGN
        if not is_ignored or number == signal.SIGTERM:
            handlers[number] = signal.signal(number, forward)
        elif number == signal.SIGINT:
            # A child inherits what is ignored, not what is handled: it must hear what we pass on.
            handlers[number] = signal.signal(number, lambda *_: None)
    try:
        # In a session of its own, or the terminal would send Ctrl-C to it a second time.
        process = subprocess.Popen(
            command, env={**environment, **as_parent()}, start_new_session=True, pass_fds=handles
        )
        if caught is not None:
            pass_on()
        status = _wait(process)
    finally:
        if killer is not None:
            killer.cancel()
        for number, handler in handlers.items():
            signal.signal(number, handler)
    if status < 0 and caught is None:
        _say_killed(what, process.pid, -status)
    return status, caught


def _wait(process: subprocess.Popen[bytes]) -> int:
    """Exit status of a process, once it has ended.

    Python runs handlers of signals in the main thread alone. Where a second signal follows at once, the
    kernel may deliver it to another thread: a main thread that waits without end never handles it.
    """
    while True:
        try:
            # With a limit it looks 20 times a second, and handles what has come.
            return process.wait(timeout=3600)
        except subprocess.TimeoutExpired:
            continue


def _say_killed(what: str, process: int, number: int) -> None:
    """An error for people: the child could say nothing itself."""
    name = signal.Signals(number).name
    print(f"error: {what} (process {process}) was killed by {name}", file=sys.stderr)
    if number == signal.SIGKILL:
        print("\nhint: look for the out-of-memory killer in `dmesg`", file=sys.stderr)


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
    if parent is not None:
        _end_with(int(parent))


def end_with_torchrun() -> None:
    """The same in a rank that somebody's torchrun has started, whose agent names no parent.

    The parent of now is taken for the agent. Of one that was killed before, nothing is known. Where no
    torchrun has started this process, and elsewhere than on Linux, nothing happens.
    """
    if "TORCHELASTIC_RUN_ID" in os.environ:
        _end_with(os.getppid())


def killed_with(parent: int) -> None:
    """Has the system kill this process when its parent ends, which is what others then are told by.

    Args:
        parent: its process id, as this process knew it before it asked.
    """
    _end_with(parent, signal.SIGKILL)


def _end_with(parent: int, by: signal.Signals = signal.SIGINT) -> None:
    if sys.platform != "linux":
        return
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, by)
    # It may have gone before it was asked for.
    if os.getppid() != parent:
        os._exit(128 + by)
