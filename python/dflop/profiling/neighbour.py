"""Busy neighbours: processes that use caches and memory as the other ranks of a machine will in training."""

from __future__ import annotations

import multiprocessing
import os
import random
from contextlib import contextmanager
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence


@contextmanager
def busy_neighbours(count: int, work: Sequence[Callable[[], None]]) -> Iterator[None]:
    """Keeps `count` processes busy with `work` in random order while the body runs.

    The processes are forked: they start at once, and share the memory of parameters until they write to it.

    Args:
        count: processes; 0 for none.
        work: functions, of which each process runs a random one after the other.

    Yields:
        Nothing; inside, the processes run.
    """
    context = multiprocessing.get_context("fork")
    processes = [
        context.Process(target=_work, args=(work, seed, os.getpid()), daemon=True) for seed in range(count)
    ]
    try:
        for process in processes:
            process.start()
        yield
    finally:
        for process in processes:
            if process.pid is not None:
                process.terminate()
                process.join()


def _work(work: Sequence[Callable[[], None]], seed: int, parent: int) -> None:
    torch.set_num_threads(1)
    order = random.Random(seed)
    try:
        # A killed parent could not end this process, so it looks for the parent itself.
        while os.getppid() == parent:
            order.choice(work)()
    except KeyboardInterrupt:
        return
