"""Links: latency and bandwidth between two ranks on this machine, over gloo."""

from __future__ import annotations

import logging
import multiprocessing
import statistics
import tempfile
import time
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from multiprocessing.connection import Connection

_LOG = logging.getLogger("dflop")
_SMALL_BYTES = 8
_LARGE_BYTES = 4 << 20
_SMALL_REPEATS, _LARGE_REPEATS = 200, 20
_TIMEOUT_S = 60.0


@dataclass(frozen=True)
class Link:
    """A link between two ranks."""

    latency_ns: int
    """Time of an empty message, in nanoseconds."""
    bandwidth_bytes_per_s: int
    """Bytes a second; 0: not measured."""


NOT_MEASURED = Link(0, 0)


def measure_gloo() -> Link:
    """Latency and bandwidth of point-to-point messages between two processes of this machine.

    Forks two processes that send tensors to each other; the caller waits. The caller must not have threads of
    its own at work.

    Returns:
        Half the usual round trip of a small message, and the rate of a large one beyond that; `NOT_MEASURED`,
        with a warning, if the processes cannot talk.
    """
    context = multiprocessing.get_context("fork")
    with tempfile.TemporaryDirectory(prefix="dflop-") as folder:
        ends = context.Pipe(duplex=False)
        processes = [
            context.Process(target=_play, args=(rank, f"{folder}/store", ends[1]), daemon=True)
            for rank in range(2)
        ]
        for process in processes:
            process.start()
        ends[1].close()
        try:
            answer = ends[0].recv() if ends[0].poll(_TIMEOUT_S) else "no answer within the time limit"
        except EOFError:
            answer = "the processes ended without an answer"
        finally:
            for process in processes:
                process.join(timeout=5.0)
                if process.is_alive():
                    process.kill()
                    process.join()
    if isinstance(answer, str):
        _LOG.warning("cannot measure the link between ranks: %s; transfers are taken as free", answer)
        return NOT_MEASURED
    small_ns, large_ns = answer
    # On a machine that is busy elsewhere even the small message may be slow: half at least is data.
    beyond_ns = max(large_ns - small_ns, large_ns / 2, 1.0)
    return Link(max(1, round(small_ns)), round(_LARGE_BYTES * 1e9 / beyond_ns))


def _play(rank: int, store: str, answer: Connection) -> None:
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    try:
        dist.init_process_group(
            "gloo",
            init_method=f"file://{store}",
            rank=rank,
            world_size=2,
            timeout=timedelta(seconds=_TIMEOUT_S / 2),
        )
        times = [
            _ping_pong(rank, torch.zeros(size, dtype=torch.uint8), repeats)
            for size, repeats in ((_SMALL_BYTES, _SMALL_REPEATS), (_LARGE_BYTES, _LARGE_REPEATS))
        ]
        if rank == 0:
            answer.send(times)
        dist.destroy_process_group()
    except KeyboardInterrupt:
        return
    except RuntimeError as error:
        if rank == 0:
            answer.send(str(error))


def _ping_pong(rank: int, message: object, repeats: int) -> float:
    """One-way time, in nanoseconds; called by both ranks, sends `repeats` messages each way, and blocks.

    The first quartile: other processes can only lengthen a message, and often do.
    """
    import torch.distributed as dist

    times: list[int] = []
    for _ in range(repeats):
        start = time.perf_counter_ns()
        if rank == 0:
            dist.send(message, 1)  # type: ignore[arg-type]
            dist.recv(message, 1)  # type: ignore[arg-type]
        else:
            dist.recv(message, 0)  # type: ignore[arg-type]
            dist.send(message, 0)  # type: ignore[arg-type]
        times.append(time.perf_counter_ns() - start)
    # The first messages set up the connection.
    return statistics.quantiles(times[repeats // 10 :], n=4)[0] / 2
