"""The directory of a run: who may write there, and whether an earlier run stands in the way.

started by `dflop train`        the command and torchrun's agent hold the lock; the command line has looked
                                for an earlier run
started by somebody's torchrun  the first rank does both once all ranks have met, and tells the others

The lock is one of the operating system. It is released when the last process that holds it ends, however it
ends, and leaves no file. Where `dflop train` is killed, the agent holds it until the ranks have ended. On a
file system without locks for directories (NFS) nothing is locked.
"""

from __future__ import annotations

import fcntl
import os
from contextlib import contextmanager
from typing import TYPE_CHECKING

from dflop.models.errors import hinted

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from dflop.runtime.mesh import Mesh
    from dflop.runtime.options import Options


@contextmanager
def alone_in(out: Path) -> Iterator[int]:
    """Makes the output directory, and keeps other commands from training in it until this one ends.

    Args:
        out: Directory of the run.

    Yields:
        The handle of the lock, which children may share.

    Raises:
        OSError: Another command trains there, or it cannot be written.
    """
    held = _hold(out)
    try:
        yield held
    finally:
        os.close(held)


def take_together(options: Options, mesh: Mesh) -> None:
    """Takes the directory for ranks that no command of ours has started, until the first rank's process ends.

    Every rank must call it, once all have met; the leader looks and tells all; blocks.

    Args:
        options: Of the run.
        mesh: This rank's coordinates.

    Raises:
        RankError: Another command trains there, it holds an earlier run that may not be overwritten, or it
            cannot be written; on every rank alike.
    """
    import torch.distributed as dist

    from dflop.runtime.failure import RankError, talking

    if options.request_path is not None:
        return
    refused: list[RankError | None] = [None]
    if mesh.is_leader:
        try:
            # Never closed: the lock is released when this process ends.
            _hold(options.out)
            if not options.may_overwrite:
                _check_empty(options.out)
        except OSError as error:
            refused = [RankError(str(error), *getattr(error, "__notes__", []), is_of_all=True)]
    with talking("take the directory of the run"):
        dist.broadcast_object_list(refused, src=0, group=mesh.control)
    if refused[0] is not None:
        raise refused[0]


def not_writable(out: Path, error: OSError) -> OSError:
    """What to raise where a run cannot be written.

    Args:
        out: Directory of the run.
        error: As it came.

    Returns:
        The error in our words, with a hint.
    """
    # Where a file of that name is in the way, mkdir only says that it exists.
    cause = "it is no directory" if out.exists() and not out.is_dir() else str(error.strerror).lower()
    message = f"`{out}`: {cause}, the run must be written there"
    return hinted(OSError(message), "choose another directory with `--out`")


def _hold(out: Path) -> int:
    """Makes the directory and locks it; the handle that holds the lock while it is open."""
    try:
        out.mkdir(parents=True, exist_ok=True)
        held = os.open(out, os.O_RDONLY | os.O_DIRECTORY)
    except OSError as error:
        raise not_writable(out, error) from error
    try:
        fcntl.flock(held, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(held)
        message = f"`{out}`: another command is training there, only one may"
        hint = "wait until it has ended, or choose another directory with `--out`"
        raise hinted(OSError(message), hint) from None
    except OSError:
        pass
    return held


def _check_empty(out: Path) -> None:
    """As the command line does it; a run that ended before its first step is none."""
    metrics = out / "metrics.jsonl"
    if metrics.exists() and metrics.stat().st_size > 0:
        message = f"`{out}` holds an earlier run, it would be overwritten"
        hint = "continue it with `--resume auto`, choose another directory with `--out`, or pass `--force`"
        raise hinted(OSError(message), hint)
