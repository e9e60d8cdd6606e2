"""Python programs in forks of this process, which has imported torch and transformers: `python ...` within milliseconds.

    pytest (all test modules imported, nothing run) --fork--> server --fork--> one child a program

The server is forked before the first test, so that its children have neither the threads that a test started nor what
it patched. A program runs as under `python -m`, `python -c` or `python FILE`: with its own arguments, environment,
folder, output and end. It finds modules imported that it would import itself: what an import does, and when, is for
tests that start Python anew.
"""

from __future__ import annotations

import contextlib
import json
import os
import runpy
import select
import signal
import socket
import subprocess
import sys
import tempfile
import time
import traceback
from pathlib import Path
from typing import NoReturn

_TIMEOUT_S = 300.0
"""Only against hanging."""


class _Server:
    """This process's end of the socket to the server."""

    connection: socket.socket | None = None


def start() -> None:
    """Forks the server; without one, programs are started anew."""
    if sys.platform != "linux":
        # Forks of processes that know Apple's frameworks may not use them.
        return
    ours, theirs = socket.socketpair()
    sys.stdout.flush()
    sys.stderr.flush()
    if os.fork() == 0:
        ours.close()
        _serve(theirs)
    theirs.close()
    _Server.connection = ours


def run(arguments, cwd=None, env=None, timeout=_TIMEOUT_S, check=False):
    """What `subprocess.run([sys.executable, *arguments], capture_output=True, text=True, ...)` returns and raises."""
    return run_all([(arguments, env)], cwd, timeout, check)[0]


def run_all(programs, cwd=None, timeout=_TIMEOUT_S, check=False):
    """The same of several at once, each as (arguments, environment); None is this process's environment."""
    programs = [
        ([str(one) for one in arguments], dict(os.environ if env is None else env))
        for arguments, env in programs
    ]
    folder = str(Path.cwd() if cwd is None else cwd)
    if _Server.connection is None:
        done = _run_anew(programs, folder, timeout)
    else:
        done = _run_forked(_Server.connection, programs, folder, timeout)
    for one in done:
        if check and one.returncode:
            print(one.stderr, file=sys.stderr)
            one.check_returncode()
    return done


def _run_forked(connection, programs, folder, timeout):
    with tempfile.TemporaryDirectory(prefix="warm-") as outputs:
        asked = {"programs": programs, "folder": folder, "outputs": outputs, "timeout": timeout}
        connection.sendall(json.dumps(asked).encode() + b"\n")
        with connection.makefile() as answers:
            statuses = json.loads(answers.readline())
        done = []
        for index, (status, (arguments, _)) in enumerate(zip(statuses, programs, strict=True)):
            out, err = (Path(outputs, f"{index}.{name}").read_text() for name in ("out", "err"))
            command = [sys.executable, *arguments]
            if status is None:
                raise subprocess.TimeoutExpired(command, timeout, out, err)
            done.append(subprocess.CompletedProcess(command, status, out, err))
    return done


def _run_anew(programs, folder, timeout):
    started = [
        subprocess.Popen(
            [sys.executable, *arguments],
            cwd=folder, env=env, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        )
        for arguments, env in programs
    ]  # fmt: skip
    done = []
    for process in started:
        out, err = process.communicate(timeout=timeout)
        done.append(subprocess.CompletedProcess(process.args, process.returncode, out, err))
    return done


def _serve(connection) -> NoReturn:
    """Runs what is asked for until the other end is closed."""
    status = 1
    try:
        # Not pytest's: Ctrl-C ends pytest, and that ends this.
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        with connection.makefile() as requests:
            for request in requests:
                asked = json.loads(request)
                children = [
                    _fork(connection, index, program, asked["folder"], Path(asked["outputs"]))
                    for index, program in enumerate(asked["programs"])
                ]
                statuses = _wait(connection, children, time.monotonic() + asked["timeout"])
                connection.sendall(json.dumps(statuses).encode() + b"\n")
        status = 0
    finally:
        os._exit(status)


def _wait(connection, children, deadline):
    """The exit status of each child; None of one that was still running at the deadline, and was killed."""
    statuses = dict.fromkeys(children)
    left = set(children)
    while left and time.monotonic() < deadline:
        for child in list(left):
            ended, status = os.waitpid(child, os.WNOHANG)
            if ended:
                statuses[child] = os.waitstatus_to_exitcode(status)
                left.remove(child)
        # Nothing is sent meanwhile: the socket becomes readable when pytest has ended.
        if left and select.select([connection], [], [], 0.01)[0]:
            deadline = 0.0
    for child in left:
        # With what it has started.
        with contextlib.suppress(ProcessLookupError):
            os.killpg(child, signal.SIGKILL)
        os.waitpid(child, 0)
    return [statuses[child] for child in children]


def _fork(connection, index, program, folder, outputs):
    child = os.fork()
    if child:
        with contextlib.suppress(OSError):
            os.setpgid(child, child)
        return child
    status = 1
    try:
        os.setpgid(0, 0)
        connection.close()
        signal.signal(signal.SIGINT, signal.default_int_handler)
        arguments, environment = program
        _redirect(index, outputs)
        os.chdir(folder)
        os.environ.clear()
        os.environ.update(environment)
        sys.stdin = open(0, closefd=False)  # noqa: SIM115
        sys.stdout = open(1, "w", closefd=False)  # noqa: SIM115
        sys.stderr = open(2, "w", buffering=1, closefd=False)  # noqa: SIM115
        status = _play(arguments)
    except BaseException:
        traceback.print_exc()
    finally:
        with contextlib.suppress(Exception):
            sys.stdout.flush()
            sys.stderr.flush()
        # No clean-up of pytest's: it must not end here.
        os._exit(status)


def _redirect(index, outputs):
    new = os.O_CREAT | os.O_WRONLY | os.O_TRUNC
    for number, path, flags in (
        (0, os.devnull, os.O_RDONLY),
        (1, outputs / f"{index}.out", new),
        (2, outputs / f"{index}.err", new),
    ):
        file = os.open(path, flags)
        os.dup2(file, number)
        os.close(file)


def _play(arguments):
    """The exit status of a program run as `python ARGUMENTS` runs it."""
    how, *rest = arguments
    try:
        if how == "-m":
            sys.argv = rest
            sys.path.insert(0, str(Path.cwd()))
            runpy.run_module(rest[0], run_name="__main__", alter_sys=True)
        elif how == "-c":
            sys.argv = ["-c", *rest[1:]]
            sys.path.insert(0, "")
            # `__main__` as it is in a new process: without what pytest has there.
            exec(compile(rest[0], "<string>", "exec"), {"__name__": "__main__"})
        else:
            sys.argv = arguments
            sys.path.insert(0, str(Path(how).resolve().parent))
            runpy.run_path(how, run_name="__main__")
    except SystemExit as end:
        if end.code is None or isinstance(end.code, int):
            return end.code or 0
        print(end.code, file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        traceback.print_exc()
        return 130
    except BaseException:
        traceback.print_exc()
        return 1
    return 0
