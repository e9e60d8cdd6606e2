"""Ranks of a benchmark: processes forked from this one, so that one import of torch serves all of them."""

from __future__ import annotations

import os
import sys
import traceback
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable

# What starts ranks of the tests knows their environment.
sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "dist"))
from ranks import environment, free_port


def run_forked(num_ranks: int, work: Callable[[int], None]) -> None:
    """Runs `work(rank)` in one process for each rank, with one thread of torch, and waits for all of them.

    Args:
        num_ranks: Number of processes.
        work: What a rank does; its answer goes to a file.

    Raises:
        RuntimeError: A rank failed; its traceback stands on stderr.
    """
    port = free_port()
    children = []
    for rank in range(num_ranks):
        child = os.fork()
        if child == 0:
            status = 1
            try:
                os.environ.update(environment(rank, num_ranks, port))
                import torch
                from transformers.utils import logging

                logging.set_verbosity_error()
                torch.set_num_threads(1)
                work(rank)
                status = 0
            except BaseException:
                traceback.print_exc()
            finally:
                sys.stderr.flush()
                os._exit(status)
        children.append(child)
    failed = [child for child in children if os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])]
    if failed:
        message = f"{len(failed)} of {num_ranks} ranks failed"
        raise RuntimeError(message)
