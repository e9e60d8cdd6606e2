"""torchrun without its traceback: the ranks have said what went wrong, in one line each.

`python -m dflop.runtime.agent [options of torchrun] -m dflop.runtime.worker REQUEST.json`
"""

from __future__ import annotations

import logging
import signal
import sys


def main() -> int:
    """Runs torchrun with this process's arguments.

    Returns:
        The exit status: that of the first rank that failed, 130 after SIGINT, else 0.
    """
    # Until torchrun takes the signal over there is no rank to end. Python's own handler could break into an
    # import that swallows it, and the run would go on.
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    from torch.distributed import run as torchrun
    from torch.distributed.elastic.multiprocessing.api import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError

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


if __name__ == "__main__":
    sys.exit(main())
