"""The command `dflop`: Rust parses and checks everything.

Five verbs are carried out here, because they need PyTorch. So is `profile data` if a function of Python gives
the shapes.
"""

from __future__ import annotations

import importlib.util
import json
import os
import signal
import sys
from pathlib import Path
from typing import Any

from dflop import Error
from dflop._native import run_cli

# Of the extra `train`; without them nothing that needs PyTorch can begin.
_NEEDED = ("numpy", "torch", "transformers")


def main() -> int:
    """Runs the command line of this process.

    Returns:
        The exit status: 0 done, 1 the answer is no, 2 wrong arguments or files, 130 interrupted.
    """
    python_handler = signal.getsignal(signal.SIGINT)
    if python_handler is signal.SIG_DFL:
        # Since this process began to import dflop (`_interrupt.py`).
        python_handler = signal.default_int_handler
    # A shell that starts a job in the background of a script has it ignore Ctrl-C, which stays so.
    if python_handler is not signal.SIG_IGN:
        # While Rust runs, Python's own handler would only set a flag that nobody reads.
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    status, request = run_cli(["dflop", *sys.argv[1:]])
    if request is None:
        return status
    signal.signal(signal.SIGINT, python_handler)
    try:
        return _run(request)
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return 130
    except ModuleNotFoundError as error:
        if error.name is None or error.name.startswith("dflop"):
            raise
        print(f"error: `{error.name}` is not installed", file=sys.stderr)
        print("\nhint: pip install 'dflop[train]'", file=sys.stderr)
        return 2
    except (Error, OSError) as error:
        print(f"error: {_text(error)}", file=sys.stderr)
        for note in getattr(error, "__notes__", []):
            print(f"\nhint: {note}", file=sys.stderr)
        return 2


def _run(request: dict[str, object]) -> int:
    """Carries out what Rust asks for; imports torch only now, where it is needed."""
    arguments = request["arguments"]
    assert isinstance(arguments, dict)
    if request["verb"] == "profile_data":
        return _profile_data(arguments["family"], arguments["directory"])
    # Here, as the processes that are started would end in a traceback each.
    for name in _NEEDED:
        if importlib.util.find_spec(name) is None:
            raise ModuleNotFoundError(name=name)
    if request["verb"] == "profile_model":
        from dflop.profiling.launch import launch as profile

        return profile(arguments)
    if request["verb"] == "check":
        from dflop.checking.check import check

        return check(arguments)
    if request["verb"] == "export":
        from dflop.runtime.export import export

        return export(arguments)
    from dflop.runtime.launch import launch as train

    status = train(arguments)
    if request["verb"] == "rehearse" and status == 0 and os.environ.get("RANK", "0") == "0":
        _say_rehearsed(arguments)
    if "RANK" in os.environ:
        from dflop.runtime.worker import leave

        leave(status)
    return status


def _say_rehearsed(arguments: dict[str, Any]) -> None:
    """What a rehearsal showed."""
    from dflop.runtime.rehearse import summary

    found = summary(Path(arguments["out"]))
    if found["steps"] > 0 and (why := _why_off(found, arguments["rehearsal"])):
        print(f"note: {why}", file=sys.stderr)
    if arguments["json"]:
        print(json.dumps(found))
        return
    if found["steps"] == 0:
        print("rehearsed no step: the checkpoint has all of them")
        return
    steps = "1 step" if found["steps"] == 1 else f"{found['steps']} steps"
    print(
        f"rehearsed {steps} on {found['ranks']} ranks: a step took {found['step_ms_median']:,.0f} ms "
        f"(median), simulated {found['simulated_ms_median']:,.0f} ms; "
        f"error {100 * found['error_median']:.2f} % (median), "
        f"{100 * found['error_p95']:.2f} % (p95)"
    )
    if arguments["steps"] == 1:
        print("note: ranks connect in the first step, and there is no other: rehearse two steps or more")
    print(f"look at it: dflop report {Path(arguments['out']).parent} --run {arguments['out']}")


_OFF_RATIO = 0.1
"""A rehearsal whose median error is above this says why."""


def _why_off(found: dict[str, Any], asked: dict[str, Any]) -> str:
    """Why rehearsed steps are far from simulated ones, in words; empty where they are not."""
    error = found["error_median"]
    if error <= _OFF_RATIO:
        return ""
    start = f"rehearsed steps are {100 * error:.0f} % off simulated ones"
    slowed = {
        "--slow-rank": asked["slow_ranks"],
        "--slow-shapes": asked["slow_shapes"],
        "--network-latency": asked["network_latency_ns"],
    }
    if flags := [flag for flag, value in slowed.items() if value]:
        return f"{start}, which know nothing of {' and '.join(flags)}"
    speed = asked["speed"]
    late = f"{start}: the ranks were late, as this machine could not wake {found['ranks']} of them in time"
    return f"{late} at `--speed {speed:g}`; take a lower one" if speed > 1 else late


def _text(error: Exception) -> str:
    """An error in words, without the number of the system."""
    if isinstance(error, OSError) and error.filename is not None and error.strerror:
        return f"`{error.filename}`: {error.strerror.lower()}"
    return str(error)


def _profile_data(name: str, directory: str) -> int:
    """Runs the command line again, with the function that `model.family` names."""
    from dflop.data.family import load

    family = load(name, directory)
    if signal.getsignal(signal.SIGINT) is not signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    status, _ = run_cli(["dflop", *sys.argv[1:]], family)
    return status


if __name__ == "__main__":
    sys.exit(main())
