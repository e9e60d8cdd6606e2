"""Ranks as forked processes: one import of torch serves them all."""

from __future__ import annotations

import contextlib
import faulthandler
import gc
import itertools
import os
import pickle
import signal
import socket
import sys
import time
import traceback


class Rank:
    """How one rank ended."""

    def __init__(self, status, result, stderr):
        self.status, self.result, self.stderr = status, result, stderr


_BEGIN = 10_000 + os.getpid() * 997 % 20_000
_PORTS = itertools.cycle(range(_BEGIN, _BEGIN + 1_000))
"""Below those that the system gives to connections (32768 on, on Linux), which may be taken before somebody listens.

Processes that run tests beside each other begin at different places.
"""


def free_port():
    """A port of this machine that nobody listens on."""
    for port in _PORTS:
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind(("127.0.0.1", port))
            return port
    raise AssertionError("an endless list has ended")


def environment(rank, num_ranks, port):
    """The environment variables that torchrun gives a rank of one machine, without a GPU."""
    return {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(num_ranks),
        "LOCAL_WORLD_SIZE": str(num_ranks),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "GLOO_SOCKET_IFNAME": "lo",
        "ACCELERATE_USE_CPU": "true",
        "OMP_NUM_THREADS": "1",
        "CUDA_VISIBLE_DEVICES": "",
    }


def run_ranks(num_ranks, function, directory, timeout_s=240.0):
    """Runs `function(rank)` in one forked process a rank; the ranks' `Rank` in order.

    A rank still running after `timeout_s` is killed and the test fails: nothing may hang.
    """
    directory.mkdir(parents=True, exist_ok=True)
    sys.stdout.flush()
    sys.stderr.flush()
    processes = [_fork(rank, function, directory) for rank in range(num_ranks)]
    deadline = time.monotonic() + timeout_s
    statuses = {}
    while len(statuses) < num_ranks and time.monotonic() < deadline:
        for rank, process in enumerate(processes):
            if rank not in statuses:
                ended, status = os.waitpid(process, os.WNOHANG)
                if ended:
                    statuses[rank] = os.waitstatus_to_exitcode(status)
        time.sleep(0.01)
    hanging = [rank for rank in range(num_ranks) if rank not in statuses]
    for rank in hanging:
        os.kill(processes[rank], signal.SIGKILL)
        os.waitpid(processes[rank], 0)
    ranks = []
    for rank in range(num_ranks):
        result = directory / f"result{rank}"
        stderr = (directory / f"stderr{rank}").read_text()
        ranks.append(
            Rank(statuses.get(rank), pickle.loads(result.read_bytes()) if result.exists() else None, stderr)
        )
    report = "\n".join(f"rank {r}: {rank.stderr}" for r, rank in enumerate(ranks))
    assert not hanging, f"ranks {hanging} hang\n{report}"
    return ranks


def results(ranks):
    """The results of ranks that must all have succeeded."""
    report = "\n".join(f"rank {r}: status {rank.status}\n{rank.stderr}" for r, rank in enumerate(ranks))
    assert all(rank.status == 0 for rank in ranks), report
    return [rank.result for rank in ranks]


def _fork(rank, function, directory):
    process = os.fork()
    if process:
        return process
    status = 1
    try:
        # What it inherits is not its own to collect.
        gc.freeze()
        # Its own stderr: pytest's is the parent's.
        file = os.open(directory / f"stderr{rank}", os.O_CREAT | os.O_WRONLY | os.O_TRUNC)
        os.dup2(file, 2)
        sys.stderr = os.fdopen(2, "w", closefd=False)
        # A rank that ends by a signal says where it was; pytest's own handler writes to the parent's stderr.
        faulthandler.enable(sys.stderr)
        result = function(rank)
        (directory / f"result{rank}").write_bytes(pickle.dumps(result))
        status = 0
    except SystemExit as end:
        status = end.code
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stderr.flush()
        # No clean-up of the parent's: pytest itself must not end here.
        os._exit(status)
