"""Ranks as forks of one process, which has imported what they need.

Importing PyTorch and transformers takes a rank many seconds of a core. With as many ranks as a rehearsal
has, on a few cores, and again after each restart, that would be most of its time. A fork takes milliseconds.

    torchrun's agent --fork--> nursery (imports; has no threads) --fork--> one rank each

The agent itself has threads once torchrun runs. One of them may hold a lock at the moment of a fork, and the
fork would then wait for it without end. So the nursery is forked before, and forks for the agent.

It is done on Linux and without GPUs: forks of a process that has looked at CUDA cannot use it.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import json
import logging
import os
import select
import signal
import socket
import subprocess
import sys
import time
import traceback
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

_POLL_S = 0.02
_WAIT_S = 0.1
"""So long this process waits for an answer before it looks whether a signal came."""


def may_fork(request: Mapping[str, Any]) -> bool:
    """Whether ranks can be forks.

    Args:
        request: Of the command line; empty where something else than a rank of ours is started.

    Returns:
        True on Linux, for a rehearsal and for training on CPUs.
    """
    if sys.platform != "linux" or not request:
        return False
    return "rehearsal" in request or request["config"]["cluster"]["device"] == "cpu"


def fork_ranks(request: Mapping[str, Any]) -> None:
    """Starts the nursery, and makes torchrun start ranks by it. This process has no threads yet.

    Args:
        request: Of the command line.
    """
    from torch.distributed.elastic.multiprocessing.subprocess_handler import subprocess_handler

    ours, theirs = socket.socketpair()
    sys.stdout.flush()
    sys.stderr.flush()
    agent = os.getpid()
    if os.fork() == 0:
        ours.close()
        _be_nursery(agent, theirs, f"dflop.runtime.{'rehearse' if 'rehearsal' in request else 'rank'}")
    theirs.close()
    nursery = _Nursery(ours)

    # torchrun starts each rank by this method, and needs of its result what `ForkedRank` has.
    def popen(_: object, command: Sequence[str], environment: Mapping[str, str]) -> ForkedRank:
        return ForkedRank(nursery, command, environment)

    setattr(subprocess_handler.SubprocessHandler, "_popen", popen)  # noqa: B010


class _Nursery:
    """The agent's end: a question is a line of JSON, and so is its answer, which has the question's number.

    torchrun raises in the midst of a question where a signal comes. The next one passes over the answer to
    that.
    """

    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection
        self._number = 0
        self._read = b""

    def ask(self, **question: Any) -> Any:
        self._number += 1
        number = self._number
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):
            self._connection.sendall(json.dumps({"number": number, **question}).encode() + b"\n")
            while line := self._line():
                # The rest of one that was cut by a signal is no JSON.
                with contextlib.suppress(ValueError, TypeError):
                    of_question, answer = json.loads(line)
                    if of_question == number:
                        return answer
        message = "the process that starts the ranks was killed"
        raise ChildProcessError(message)

    def _line(self) -> bytes:
        """The next answer; empty once the other process has ended."""
        while b"\n" not in self._read:
            # Another thread takes Ctrl-C for this one, which nothing interrupts.
            if not select.select([self._connection], [], [], _WAIT_S)[0]:
                continue
            part = self._connection.recv(1 << 16)
            if not part:
                return b""
            self._read += part
        line, _, self._read = self._read.partition(b"\n")
        return line


class ForkedRank:
    """A rank, with that part of `subprocess.Popen` that torchrun uses."""

    def __init__(self, nursery: _Nursery, command: Sequence[str], environment: Mapping[str, str]) -> None:
        """Starts it.

        Args:
            nursery: What forks.
            command: Of a rank that would be started anew; its last argument is the path of the request.
            environment: All variables of the rank.
        """
        self._nursery = nursery
        self.returncode: int | None = None
        self.pid: int = nursery.ask(start=command[-1], environment=dict(environment))

    def poll(self) -> int | None:
        """The exit status, as of `subprocess`: minus the signal where one killed it.

        Returns:
            None while it runs.
        """
        if self.returncode is None:
            self.returncode = self._nursery.ask(ended=self.pid)
        return self.returncode

    def wait(self, timeout: float) -> int:
        """Waits for its end.

        Args:
            timeout: Seconds.

        Returns:
            The exit status.

        Raises:
            TimeoutExpired: It still runs.
        """
        deadline = time.monotonic() + timeout
        while (status := self.poll()) is None:
            if time.monotonic() > deadline:
                raise subprocess.TimeoutExpired(str(self.pid), timeout)
            time.sleep(_POLL_S)
        return status


def _be_nursery(agent: int, connection: socket.socket, module: str) -> NoReturn:
    """Imports a module, then does what the agent asks for until the agent is gone; its ranks end with it."""
    from dflop.child import killed_with
    from dflop.runtime.worker import leave

    status = 1
    try:
        # Ctrl-C is for the agent, which tells the ranks. They inherit this: a signal that comes early waits
        # until they unblock it (`runtime/worker.py`).
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
        # A queue may send it to all processes. This one ends with the agent, which waits for the ranks.
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        # Also while it imports: it holds the lock of the run, and would start ranks that nobody waits for.
        killed_with(agent)
        importlib.import_module(module)
        # What is imported outlives all ranks: a collection in one of them would look at each object again,
        # and copy the pages that ranks share.
        gc.collect()
        gc.freeze()
        # One file for both ways would drop questions that it has read ahead when it writes an answer.
        lines = connection.makefile("r")
        # The system tells each status once, and the agent may ask again.
        statuses: dict[int, int] = {}
        while line := lines.readline():
            question = json.loads(line)
            if "start" in question:
                answer = _fork(connection, Path(question["start"]), question["environment"])
            else:
                rank = question["ended"]
                ended, ending = (0, 0) if rank in statuses else os.waitpid(rank, os.WNOHANG)
                if ended:
                    statuses[rank] = os.waitstatus_to_exitcode(ending)
                answer = statuses.get(rank)
            connection.sendall(json.dumps([question["number"], answer]).encode() + b"\n")
        status = 0
    except BaseException:  # noqa: BLE001 - this process ends here, whatever it was.
        traceback.print_exc()
    leave(status)


def _fork(connection: socket.socket, request: Path, environment: Mapping[str, str]) -> int:
    """Starts a rank; its process id."""
    from dflop.child import as_parent, end_with_parent
    from dflop.runtime.resume import request_of
    from dflop.runtime.worker import leave, run

    # This process is its parent, not the agent.
    environment = {**environment, **as_parent()}
    process = os.fork()
    if process:
        return process
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    status = 1
    try:
        # `close` would leave it open for the nursery's reader: the agent would not see the nursery end.
        os.close(connection.detach())
        # torchrun ends a rank by its process group.
        os.setsid()
        os.environ.clear()
        os.environ.update(environment)
        # The agent has left out torchrun's tables.
        logging.disable(logging.NOTSET)
        end_with_parent()
        status = run(request_of(request))
    except BaseException:  # noqa: BLE001 - this process ends here, whatever it was.
        traceback.print_exc()
    leave(status)
