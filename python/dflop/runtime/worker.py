"""One rank as a process: a fork (`forks.py`), or torchrun's `python -m dflop.runtime.worker REQUEST.json`."""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from dflop.child import end_with_parent
from dflop.runtime.progress import say
from dflop.runtime.resume import request_of

if TYPE_CHECKING:
    from collections.abc import Mapping

_HEAP_BYTES = 1 << 30
"""Memory that is written once before training, where the allocator keeps freed memory (`MALLOC_MMAP_MAX_` is
0). Otherwise the first steps would pay for its page faults."""


def run(request: Mapping[str, Any]) -> int:
    """Trains as the rank that the environment names. Imports torch only once it is called.

    Args:
        request: As the command line makes it.

    Returns:
        The exit status: 0 done, 1 failed, 130 interrupted. Ctrl-C before the ranks have met ends this
        process.
    """
    # Until the trainer takes the signal over, there is nothing to save, so Ctrl-C ends the process at once.
    # Python's own handler would raise inside an import, which may swallow the exception: the process would
    # then go on with half a module.
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    # SIGINT was blocked while this process started (`runtime/agent.py`). One that has come ends it now.
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})
    if "torch" not in sys.modules:
        say("importing PyTorch", "rehearse" if "rehearsal" in request else "train")
    if "rehearsal" in request:
        from dflop.runtime.rehearse import rehearse

        return rehearse(request)
    from dflop.runtime.rank import train

    if os.environ.get("MALLOC_MMAP_MAX_") == "0":
        _touch_heap()
    return train(request)


def _touch_heap() -> None:
    import torch

    ranks = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    free_bytes = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_AVPHYS_PAGES")
    torch.zeros(min(_HEAP_BYTES, free_bytes // (4 * ranks)), dtype=torch.uint8)


def leave(status: int) -> NoReturn:
    """Ends this process, a rank, at once.

    It skips all clean-up: after a failure, the clean-up of a process group may wait for ranks that are gone.

    Args:
        status: The exit status.
    """
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)


def main() -> NoReturn:
    """Reads the request and trains."""
    end_with_parent()
    leave(run(request_of(Path(sys.argv[1]))))


if __name__ == "__main__":
    main()
