"""Processes of a rank that decode media ahead of need.

    rank, a thread a worker --jobs, block of the arena--> worker --adapter.pixels--> the block
                            <--done, or what is wrong----

They are forked before the rank starts threads, joins process groups or touches its GPU. They know the model's
processor and the arena, but not the dataset: they are sent names of files, or bytes, to decode. A worker ends
when its rank ends, whatever the reason. It ignores the signals of a terminal, which the rank handles.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import queue
import signal
import sys
import threading
import traceback
from multiprocessing import Pipe
from typing import TYPE_CHECKING, Any

import torch

from dflop._native import Error
from dflop.data.decoding import Job, decode
from dflop.models.errors import hinted

if TYPE_CHECKING:
    from collections.abc import Sequence
    from multiprocessing.connection import Connection

    from dflop.data.arena import Arena, Block
    from dflop.models.adapter import ModelAdapter

_PR_SET_PDEATHSIG = 1
"""Of `prctl(2)`."""


class WorkerError(Error):
    """A process that decodes has ended; no fault of the sample that can be told."""


class UndecodableError(Exception):
    """A file that a worker could not decode."""

    def __init__(self, job: int, cause: str) -> None:
        """Of one of the jobs.

        Args:
            job: Its number among them.
            cause: What the decoder said.
        """
        super().__init__(cause)
        self.job = job


class Workers:
    """The decoding processes of one rank; for any thread."""

    def __init__(self, num_workers: int, adapter: ModelAdapter, arenas: Sequence[Arena]) -> None:
        """Forks them; to be called before this process has threads.

        Args:
            num_workers: How many, at least 1.
            adapter: Decodes; its processor should have been loaded, once for all of them.
            arenas: Where what is decoded goes.
        """
        self._arenas = list(arenas)
        self._connections: list[Connection] = []
        self.processes: dict[int, int] = {}
        """Ids of those that run, by number."""
        self._ending = threading.Lock()
        self._idle: queue.SimpleQueue[int] = queue.SimpleQueue()
        sys.stdout.flush()
        sys.stderr.flush()
        rank = os.getpid()
        for index in range(num_workers):
            ends: Any = Pipe()
            own, theirs = ends
            process = os.fork()
            if process == 0:
                _work(theirs, [*self._connections, own], rank, adapter, self._arenas)
            theirs.close()
            self._connections.append(own)
            self.processes[index] = process
            self._idle.put(index)

    def decode(self, jobs: Sequence[Job], arena: Arena, block: Block, name: str) -> None:
        """Has one of them decode, and waits for it.

        Args:
            jobs: One after the other.
            arena: One of those given at the start.
            block: Where the results go, one after the other.
            name: What is decoded, for the error of a worker that ends.

        Raises:
            UndecodableError: What a decoder says of a file.
            WorkerError: The worker has ended; the message names the sample.
        """
        index = self._idle.get()
        try:
            self._connections[index].send((jobs, self._arenas.index(arena), block))
            wrong = self._connections[index].recv()
        except (EOFError, OSError) as error:
            # Not idle again: whoever comes next must not wait for it.
            raise self._ended(index, name) from error
        self._idle.put(index)
        if wrong is not None:
            raise UndecodableError(*wrong)

    def close(self) -> None:
        """Ends them, at once."""
        with self._ending:
            processes = list(self.processes.values())
            self.processes.clear()
        for process in processes:
            with contextlib.suppress(ProcessLookupError, ChildProcessError):
                os.kill(process, signal.SIGKILL)
                os.waitpid(process, 0)
        # After that: a thread that waits for an answer has got the end of the worker.
        for connection in self._connections:
            connection.close()

    def _ended(self, index: int, name: str) -> WorkerError:
        with self._ending:
            process, how = self.processes.pop(index, 0), "has ended"
        with contextlib.suppress(ChildProcessError):
            # One that another thread has waited for is none of ours any more.
            _, status = os.waitpid(process, 0) if process else (0, 0)
            code = os.waitstatus_to_exitcode(status)
            how = f"was killed by {signal.Signals(-code).name}" if code < 0 else f"ended with status {code}"
        # The next that would have got it is told as well.
        self._idle.put(index)
        message = f"{name}: the process that decodes it ({process}) {how}"
        hint = "look for the out-of-memory killer in `dmesg`; fewer `train.workers` take less memory"
        return hinted(WorkerError(message), hint)


def _work(
    own: Connection,
    of_rank: Sequence[Connection],
    rank: int,
    adapter: ModelAdapter,
    arenas: Sequence[Arena],
) -> None:
    """The life of a worker, after the fork; it does not return."""
    status = 1
    try:
        _end_with(rank)
        # Ends that stay open here would hide the rank's end from the others.
        for connection in of_rank:
            connection.close()
        torch.set_num_threads(1)
        while True:
            jobs, arena, block = own.recv()
            own.send(_decoded(adapter, jobs, arenas[arena], block))
    except (EOFError, OSError):
        # The rank has gone.
        status = 0
    except BaseException:  # noqa: BLE001
        traceback.print_exc()
    finally:
        sys.stderr.flush()
        # Without the clean-up of the rank: its files and groups are not this process's.
        os._exit(status)


def _end_with(rank: int) -> None:
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1):
        signal.signal(number, signal.SIG_IGN)
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        # It may have gone before it was asked for.
        if os.getppid() != rank:
            os._exit(0)


def _decoded(
    adapter: ModelAdapter, jobs: Sequence[Job], arena: Arena, block: Block
) -> tuple[int, str] | None:
    """Decodes into the block; or which job is not to be decoded, and why."""
    start = 0
    for number, job in enumerate(jobs):
        try:
            tiles = decode(adapter, job)
        except Exception as error:  # noqa: BLE001
            return number, str(error) or type(error).__name__
        place = type(block)(block.start + start, block.num_bytes - start)
        arena.view(place, tuple(tiles.shape)).copy_(tiles)
        start += 4 * tiles.numel()
    return None
