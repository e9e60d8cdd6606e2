"""torchrun without its traceback: the ranks have said what went wrong, in one line each.

The agent starts the ranks again where one died or hung, at most `max_restarts` times in a row. A new
checkpoint in between begins the count anew. An error that all ranks raise alike, such as a damaged file,
would only come again: it ends the run.

Ranks that have no GPU are forks (`runtime/forks.py`).

`python -m dflop.runtime.agent [options of torchrun] -m dflop.runtime.worker REQUEST.json`
"""

from __future__ import annotations

import json
import logging
import os
import signal
import sys
import threading
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dflop.child import as_parent, end_with_parent
from dflop.runtime.forks import fork_ranks, may_fork
from dflop.runtime.progress import say

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from torch.distributed.elastic.multiprocessing.errors import ProcessFailure


def main() -> int:
    """Runs torchrun with this process's arguments.

    Returns:
        The exit status: that of the first rank that failed, 1 where the process that starts them was killed,
        2 where ranks would have no GPU, 130 after SIGINT, else 0.
    """
    end_with_parent()
    # Until torchrun handles SIGINT itself, no rank runs and Ctrl-C may end this process at once. Python's own
    # handler would raise inside an import, which may swallow the exception; the run would then go on.
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    # The command that started this process passes Slurm's warning on, as SIGINT. Slurm may send it to all
    # processes, and this one must outlive it to wait for its ranks.
    signal.signal(signal.SIGUSR1, signal.SIG_IGN)
    path = Path(sys.argv[-1])
    request: dict[str, Any] = json.loads(path.read_bytes()) if path.suffix == ".json" else {}
    if forks := may_fork(request):
        say("importing PyTorch", "rehearse" if "rehearsal" in request else "train")
        if int(request["num_ranks"]) > 1:
            # PyTorch reads it when it is imported. torchrun sets it so for ranks that are started anew.
            os.environ.setdefault("OMP_NUM_THREADS", "1")
    from torch.distributed import run as torchrun
    from torch.distributed.elastic.multiprocessing.api import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError

    from dflop.runtime.failure import NAMES_CAUSE

    if forks:
        fork_ranks(request)
    # GPUs are checked here: torch is imported already, and no rank has started yet.
    if request and (status := _check_gpus(request)):
        return status
    # The ranks' parent is this process, which says in the end why they failed.
    os.environ.update({**as_parent(), NAMES_CAUSE: "1"})
    # SIGINT is blocked here and ranks inherit that: it waits until they unblock it (`runtime/worker.py`).
    # While Python starts, it would only give a traceback. A thread of its own receives it for this process.
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    threading.Thread(target=_take_interrupts, daemon=True).start()
    # torchrun logs a table for each rank that exits; what matters is on stderr already.
    logging.disable(logging.ERROR)
    restarts = Restarts(request)
    while True:
        try:
            torchrun.main(sys.argv[1:])
            return 0
        except ChildFailedError as error:
            status = told(error.failures, _doomed(request))
            if not restarts.may_restart(error.failures.values()):
                return status
        except SignalException as error:
            return 128 + int(error.sigval)
        except ChildProcessError as error:
            sys.stderr.write(f"error: {error}\nhint: look for the out-of-memory killer in `dmesg`\n")
            return 1


class Restarts:
    """How often ranks may be started again."""

    def __init__(self, request: Mapping[str, Any]) -> None:
        """No restart so far.

        Args:
            request: Of the command line; without `max_restarts` ranks are never started again.
        """
        self._left = self._most = int(request.get("max_restarts", 0))
        self._out = Path(request.get("out", "."))
        self._newest = self._newest_checkpoint()

    def may_restart(self, failures: Iterable[ProcessFailure]) -> bool:
        """Whether to start the ranks again; if so, counts the restart and tells people on stderr.

        Args:
            failures: Of the ranks that failed.

        Returns:
            False where no restart is left, or where the ranks would fail in the same way again.
        """
        if self._most == 0 or any(_is_hopeless(failure) for failure in failures):
            return False
        newest = self._newest_checkpoint()
        if newest != self._newest:
            self._left, self._newest = self._most, newest
        if self._left == 0:
            sys.stderr.write(f"hint: {self._most} restarts in a row came to no new checkpoint\n")
            return False
        self._left -= 1
        where = "the beginning" if newest is None else f"step {newest}"
        turn = self._most - self._left
        sys.stderr.write(f"restart {turn} of {self._most}: the ranks go on from {where}\n")
        sys.stderr.flush()
        os.environ["DFLOP_RESTARTED"] = "1"
        return True

    def _newest_checkpoint(self) -> int | None:
        from dflop.runtime.resume import checkpoints

        found = checkpoints(self._out)
        return found[-1][0] if found else None


def _doomed(request: Mapping[str, Any]) -> int | None:
    """The rank that a rehearsal was asked to kill; none where it was not, and in training."""
    kill = request.get("rehearsal", {}).get("kill")
    return None if kill is None else kill["rank"]


def told(failures: Mapping[int, ProcessFailure], doomed: int | None = None) -> int:
    """Names the cause on stderr where no rank has: a killed one, or that of ranks that all waited for others.

    Args:
        failures: By rank.
        doomed: The rank that a rehearsal was asked to kill.

    Returns:
        The exit status.
    """
    from dflop.runtime.failure import IS_OF_OTHER

    killed = [(rank, failure) for rank, failure in failures.items() if failure.exitcode < 0]
    if not killed:
        _, first = min(failures.items(), key=lambda item: item[1].timestamp)
        if all(_about(failure).get(IS_OF_OTHER) for failure in failures.values()):
            # Each waited for another, and none said more: what the first said is all that is known.
            sys.stderr.write(f"\nerror: {first.error_file_data['message']['message']}\n")
        return first.exitcode
    # A killed rank could say nothing itself.
    rank, first = min(killed, key=lambda item: item[1].timestamp)
    name = signal.Signals(-first.exitcode).name
    sys.stderr.write(f"\nerror: rank {rank} was killed by {name}\n")
    if name == "SIGKILL" and rank != doomed:
        sys.stderr.write("hint: look for the out-of-memory killer in `dmesg`\n")
    return 1


def _is_hopeless(failure: ProcessFailure) -> bool:
    """Whether a rank said that a restart is of no use (`tell_agent`); a killed rank said nothing, so no."""
    from dflop.runtime.failure import HOPELESS

    return bool(_about(failure).get(HOPELESS))


def _about(failure: ProcessFailure) -> Mapping[str, Any]:
    """What a rank told the agent beside its message; nothing of one that said nothing."""
    message = failure.error_file_data.get("message")
    return message.get("extraInfo", {}) if isinstance(message, dict) else {}


def _take_interrupts() -> None:
    """Receives SIGINT for this process, in a thread; Python runs the handler in the main one."""
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})
    threading.Event().wait()


def _check_gpus(request: dict[str, Any]) -> int:
    """Zero if each rank of this machine has a GPU, or needs none; else 2, and stderr says why."""
    if "rehearsal" in request or request["config"]["cluster"]["device"] != "cuda":
        return 0
    from dflop import Error
    from dflop.device import check_gpus

    try:
        check_gpus(int(request["num_ranks"]))
    except Error as error:
        sys.stderr.write(f"error: {error}\n")
        for note in getattr(error, "__notes__", []):
            sys.stderr.write(f"\nhint: {note}\n")
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
