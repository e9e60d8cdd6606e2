"""torchrun without its traceback: the ranks have said what went wrong, in one line each.

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
from typing import Any

from dflop.child import as_parent, end_with_parent


def main() -> int:
    """Runs torchrun with this process's arguments.

    Returns:
        The exit status: that of the first rank that failed, 2 where ranks would have no GPU, 130 after
        SIGINT, else 0.
    """
    end_with_parent()
    # Until torchrun takes the signal over there is no rank to end. Python's own handler could break into an
    # import that swallows it, and the run would go on.
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    from torch.distributed import run as torchrun
    from torch.distributed.elastic.multiprocessing.api import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError

    request = Path(sys.argv[-1])
    # Here, since torch is imported already and no rank has started.
    if request.suffix == ".json" and (status := _check_gpus(json.loads(request.read_bytes()))):
        return status
    # The ranks' parent is this process.
    os.environ.update(as_parent())
    # Ranks inherit that SIGINT waits until they have said what it shall do (`runtime/worker.py`): while
    # Python starts, it would be a traceback. Another thread takes what is meant for this process.
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    threading.Thread(target=_take_interrupts, daemon=True).start()
    # It logs each exit of a rank with a table; what matters is on stderr already.
    logging.disable(logging.ERROR)
    try:
        torchrun.main(sys.argv[1:])
    except ChildFailedError as error:
        failures = sorted(error.failures.items(), key=lambda item: item[1].timestamp)
        rank, first = failures[0]
        if first.exitcode > 0:
            return first.exitcode
        # It could say nothing itself.
        name = signal.Signals(-first.exitcode).name
        sys.stderr.write(f"\nerror: rank {rank} was killed by {name}\n")
        if name == "SIGKILL":
            sys.stderr.write("hint: look for the out-of-memory killer in `dmesg`\n")
        return 1
    except SignalException as error:
        return 128 + int(error.sigval)
    return 0


def _take_interrupts() -> None:
    """Receives SIGINT for this process, in a thread; Python runs the handler in the main one."""
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})
    threading.Event().wait()


def _check_gpus(request: dict[str, Any]) -> int:
    """Zero if each rank of this machine has a GPU, or needs none; else 2, and stderr says why."""
    if "rehearsal" in request or json.loads(request["config"])["cluster"]["device"] != "cuda":
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
