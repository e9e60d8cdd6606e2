"""torchrun without its traceback: the ranks have said what went wrong, in one line each.

`python -m dflop.runtime.agent [options of torchrun] -m dflop.runtime.worker REQUEST.json`
"""

from __future__ import annotations

import json
import logging
import os
import signal
import sys
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


def _check_gpus(request: dict[str, Any]) -> int:
    """Zero if each rank of this machine has a GPU, or needs none; else 2, and stderr says why."""
    if json.loads(request["config"])["cluster"]["device"] != "cuda":
        return 0
    import torch

    num_ranks, num_gpus = request["num_ranks"], torch.cuda.device_count()
    if num_ranks <= num_gpus:
        return 0
    has = f"this machine has {num_gpus}" if num_gpus else "PyTorch finds none on this machine"
    sys.stderr.write(f"error: `cluster.device` is cuda, {num_ranks} ranks need a GPU each: {has}\n")
    hint = (
        f"set `cluster.num_ranks` to {num_gpus} and plan again, or use more nodes (`torchrun`)"
        if num_gpus > 1
        else "look at `nvidia-smi`, or set `cluster.device` to cpu, then measure the model and plan again"
    )
    sys.stderr.write(f"\nhint: {hint}\n")
    return 2


if __name__ == "__main__":
    sys.exit(main())
