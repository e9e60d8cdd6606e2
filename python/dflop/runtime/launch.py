"""Starts the ranks of one machine, or becomes one where torchrun has started this process."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence


def launch(request: Mapping[str, Any]) -> int:
    """Trains as `request` says.

    Under torchrun (RANK and WORLD_SIZE are set) this process is that rank. Otherwise torchrun is started on
    this machine, with one process a rank of the plan; Ctrl-C is passed on, and the ranks finish their step.

    Args:
        request: As the command line makes it; see `Options` of `runtime/options.py`.

    Returns:
        The exit status: 0 done, 1 a rank failed, 130 interrupted.

    Raises:
        OSError: The output directory cannot be written.
    """
    if "RANK" in os.environ and "WORLD_SIZE" in os.environ:
        from dflop.runtime.worker import run

        missing = [n for n in request["environment"] if n not in os.environ]
        if missing and os.environ["RANK"] == "0":
            names = ", ".join(missing)
            print(f"warning: the profile was measured with {names} set: times may differ", file=sys.stderr)
        return run(request)
    out = Path(request["out"])
    out.mkdir(parents=True, exist_ok=True)
    path = out / "request.json"
    path.write_text(json.dumps(dict(request), indent=1), encoding="utf-8")
    command = [
        sys.executable, "-m", "dflop.runtime.agent",
        "--standalone", "--local-addr", "127.0.0.1", "--nnodes", "1",
        "--nproc-per-node", str(request["num_ranks"]),
        "-m", "dflop.runtime.worker", str(path),
    ]  # fmt: skip
    # What the user has set stays.
    environment = {**request["environment"], **os.environ}
    return run_agent(command, environment)


def run_agent(command: Sequence[str], environment: Mapping[str, str]) -> int:
    """Runs the process that starts the ranks, and passes a signal on to it, once, as Ctrl-C.

    Args:
        command: Of the process.
        environment: Of it.

    Returns:
        Its exit status, 1 where a signal ended it; 128 + the signal if one came to this process meanwhile, as
        in 130 for Ctrl-C.

    Raises:
        OSError: It cannot be started.
    """
    caught: int | None = None
    process: subprocess.Popen[bytes] | None = None
    is_told = False

    def pass_on() -> None:
        nonlocal is_told
        if process is not None and not is_told:
            is_told = True
            process.send_signal(signal.SIGINT)

    def forward(number: int, _: object) -> None:
        # SIGTERM and SIGHUP end this process alone where a queue or a lost terminal sends them: the ranks
        # must not train on without it. They too finish their step.
        nonlocal caught
        if caught is None:
            caught = number
            pass_on()

    # Before it starts: a signal that ended this process in between would leave it, and all ranks, behind.
    numbers = [signal.SIGINT, signal.SIGTERM]
    # `nohup` ignores it, so that training outlives the terminal.
    if signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:
        numbers.append(signal.SIGHUP)
    handlers = {n: signal.signal(n, forward) for n in numbers}
    try:
        # In a session of its own, or the terminal would send Ctrl-C to torchrun a second time.
        process = subprocess.Popen(command, env=environment, start_new_session=True)
        if caught is not None:
            pass_on()
        status = process.wait()
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)
    if caught is not None:
        return 128 + caught
    return 1 if status < 0 else status
