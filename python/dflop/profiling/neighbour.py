"""Busy neighbours: processes that load caches and memory as the other ranks of a training run will."""

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
    """Keeps `count` processes running `work` at random while the body runs.

    They are forked, so that they start at once and share the parameters until they write to them.

    Args:
        count: processes; 0 for none.
        work: what one of them may run next.

    Yields:
        Nothing; they are running.
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
        # A parent that was killed cannot end us.
        while os.getppid() == parent:
            order.choice(work)()
    except KeyboardInterrupt:
        return
