"""Processes of ours end together: a signal goes down, and none outlives the one it works for."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from dflop.child import as_parent, end_with_parent, run_child
from dflop.profiling.launch import launch

CHILD = """
import pathlib, time
from dflop.child import end_with_parent

try:
    end_with_parent()
    print("ready", flush=True)
    while True:
        time.sleep(0.02)
except KeyboardInterrupt:
    pathlib.Path("told").write_text("x")
"""
PARENT = f"""
import os, sys
from dflop.child import run_child

run_child([sys.executable, "-c", {CHILD!r}], os.environ, "the child")
"""


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux tells a child")
def test_a_child_ends_when_its_parent_is_killed(tmp_path: Path) -> None:
    """By SIGKILL, which the parent cannot pass on."""
    parent = subprocess.Popen([sys.executable, "-c", PARENT], cwd=tmp_path, stdout=subprocess.PIPE)
    assert parent.stdout is not None
    assert parent.stdout.readline() == b"ready\n"
    parent.kill()
    parent.wait()
    deadline = time.monotonic() + 120
    while not (tmp_path / "told").exists():
        assert time.monotonic() < deadline, "the child lives on"
        time.sleep(0.02)


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux tells a child")
@pytest.mark.parametrize(("parent", "status"), [("this", 0), ("another", 130), ("none", 0)])
def test_a_parent_that_has_gone_before(parent: str, status: int) -> None:
    """Between the start of the child and its asking to be told; by hand there is no parent to follow."""
    environment = {k: v for k, v in os.environ.items() if k not in as_parent()}
    process = os.getpid() + (parent == "another")
    environment |= {} if parent == "none" else {name: str(process) for name in as_parent()}
    code = "from dflop.child import end_with_parent as e; e()"
    assert subprocess.run([sys.executable, "-c", code], env=environment, check=False).returncode == status


OF_TORCHRUN = """
import pathlib, time
from dflop.child import end_with_torchrun

try:
    end_with_torchrun()
    print("ready", flush=True)
    while not pathlib.Path("enough").exists():
        time.sleep(0.02)
    pathlib.Path("told").write_text("no")
except KeyboardInterrupt:
    pathlib.Path("told").write_text("yes")
"""
AGENT = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {OF_TORCHRUN!r}])"


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux tells a child")
@pytest.mark.parametrize("is_torchrun", [True, False])
def test_a_rank_ends_when_somebodys_torchrun_is_killed(is_torchrun: bool, tmp_path: Path) -> None:
    """Torchrun says in the environment that it is one. What anything else has started goes on."""
    environment = {name: value for name, value in os.environ.items() if name != "TORCHELASTIC_RUN_ID"}
    environment |= {"TORCHELASTIC_RUN_ID": "some"} if is_torchrun else {}
    command = [sys.executable, "-c", AGENT]
    agent = subprocess.Popen(command, cwd=tmp_path, env=environment, stdout=subprocess.PIPE)
    assert agent.stdout is not None
    assert agent.stdout.readline() == b"ready\n"
    agent.kill()
    agent.wait()
    if not is_torchrun:
        (tmp_path / "enough").touch()
    deadline = time.monotonic() + 120
    while not (tmp_path / "told").exists() or not (tmp_path / "told").read_text():
        assert time.monotonic() < deadline, "the rank lives on"
        time.sleep(0.02)
    assert (tmp_path / "told").read_text() == ("yes" if is_torchrun else "no")


def test_a_parent_is_followed_by_its_child_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not by what the child starts: the variable is gone when it was read."""
    monkeypatch.setattr(sys, "platform", "other")
    for name, value in as_parent().items():
        monkeypatch.setenv(name, value)
    end_with_parent()
    assert not set(as_parent()) & set(os.environ)


WORKER = """#!{python}
import os, pathlib, signal, sys, time

def end(*_):
    pathlib.Path({told!r}).open("a").write("x")
    sys.exit({status})

signal.signal(signal.SIGINT, end)
os.kill(os.getppid(), {number})
while True:
    time.sleep(0.02)
"""
"""A worker that tells its parent to end, and sleeps in short pieces.

Python hears a signal between two lines: one that comes just before a long sleep begins is heard after it.
"""


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1])
def test_measuring_is_stopped_by_a_signal_to_the_command(
    number: signal.Signals, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """It reaches the worker, once, as Ctrl-C, also where no terminal sends it to both."""
    told, worker = tmp_path / "told", tmp_path / "worker"
    for status, expected, said in [(130, 128 + number, "interrupted; the same command goes on"), (0, 0, "")]:
        told.unlink(missing_ok=True)
        text = WORKER.format(python=sys.executable, told=str(told), status=status, number=int(number))
        worker.write_text(text)
        worker.chmod(0o755)
        with monkeypatch.context() as patch:
            patch.setattr(sys, "executable", str(worker))
            assert launch({}) == expected
        assert told.read_text() == "x"
        # A profile that was written is whole: it was not interrupted.
        err = capfd.readouterr().err
        assert (said in err) if said else err == ""


TOLD = """
import os, pathlib, signal, sys, time

BEGIN
signal.signal(signal.SIGINT, lambda *_: open("told", "a").write("x"))
os.kill(os.getppid(), int(sys.argv[1]))
while not pathlib.Path("told").exists():
    time.sleep(0.02)
"""
"""A child that sends its parent a signal, and ends when it is told to."""


def run_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int, begin: str = ""
) -> tuple[int, int | None]:
    """What `run_child` says of such a child, which does `begin` first."""
    monkeypatch.chdir(tmp_path)
    command = [sys.executable, "-c", TOLD.replace("BEGIN", begin), str(int(number))]
    return run_child(command, os.environ, "the child")


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1])
def test_a_signal_is_passed_on_once(number: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also one that comes while the child is being started, between its start and the wait for it."""
    assert run_told(tmp_path, monkeypatch, number) == (0, number)
    assert (tmp_path / "told").read_text() == "x"
    (tmp_path / "told").unlink()
    start = subprocess.Popen

    def interrupted(*arguments: Any, **options: Any) -> subprocess.Popen[bytes]:
        process = start(*arguments, stdout=subprocess.PIPE, **options)
        assert process.stdout is not None
        process.stdout.read(1)
        os.kill(os.getpid(), number)
        return process

    monkeypatch.setattr(subprocess, "Popen", interrupted)
    code = TOLD.replace("BEGIN", "").replace("os.kill(os.getppid(), int(sys.argv[1]))", "print(flush=True)")
    assert run_child([sys.executable, "-c", code], os.environ, "the child") == (0, number)
    assert (tmp_path / "told").read_text() == "x"


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGHUP, signal.SIGUSR1])
def test_what_was_ignored_stays_ignored_and_sigterm_ends_it(
    number: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """SIGHUP under `nohup`, SIGINT in a script's background: SIGTERM still reaches the child, as Ctrl-C."""
    before = signal.signal(number, signal.SIG_IGN)
    try:
        both = f"os.kill(os.getppid(), {int(number)})"
        assert run_told(tmp_path, monkeypatch, signal.SIGTERM, both) == (0, signal.SIGTERM)
        assert (tmp_path / "told").read_text() == "x"
        code = f"import os; os.kill(os.getppid(), {int(number)})"
        assert run_child([sys.executable, "-c", code], os.environ, "the child") == (0, None)
        # The child itself hears SIGINT, whatever its parent ignores: what is passed on is SIGINT.
        code = (
            "import signal, sys; sys.exit(signal.getsignal(signal.SIGINT) is not signal.default_int_handler)"
        )
        assert run_child([sys.executable, "-c", code], os.environ, "the child") == (0, None)
        assert signal.getsignal(number) is signal.SIG_IGN
    finally:
        signal.signal(number, before)


@pytest.mark.skipif(sys.platform != "linux", reason="looks into /proc")
def test_a_stopped_child_is_woken_to_hear_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The agent of torchrun, stopped by `kill -STOP`: its command would wait for ever after SIGTERM."""
    monkeypatch.chdir(tmp_path)
    code = (
        "import os, signal, subprocess, time\n"
        "signal.signal(signal.SIGINT, lambda *_: os._exit(7))\n"
        # Another process tells the parent, once this one is stopped.
        "tell = 'while ! grep -q \"^State:.T\" /proc/{0}/status; do sleep 0.02; done; kill -TERM {1}'\n"
        "subprocess.Popen(['sh', '-c', tell.format(os.getpid(), os.getppid())])\n"
        "os.kill(os.getpid(), signal.SIGSTOP)\n"
        "while True:\n"
        "    time.sleep(0.02)\n"
    )
    assert run_child([sys.executable, "-c", code], os.environ, "the child") == (7, signal.SIGTERM)


def test_a_child_that_does_not_end_is_killed_and_named(capfd: pytest.CaptureFixture[str]) -> None:
    """After the grace; nobody waits for ever for a child that hears nothing."""
    code = (
        "import os, signal\n"
        "signal.signal(signal.SIGINT, signal.SIG_IGN)\n"
        "os.kill(os.getppid(), signal.SIGTERM)\n"
        "while True:\n"
        "    signal.pause()\n"
    )
    command = [sys.executable, "-c", code]
    assert run_child(command, os.environ, "the child", grace_s=0.2) == (-signal.SIGKILL, signal.SIGTERM)
    said = capfd.readouterr().err
    assert re.fullmatch(r"the child \(process \d+\) did not end within 0.2 s: it is killed\n", said), said


def test_a_child_that_something_else_killed_is_named(capfd: pytest.CaptureFixture[str]) -> None:
    """It could say nothing itself; what most often does so is the system, for want of memory."""
    code = "import os; os.kill(os.getpid(), 9)"
    assert run_child([sys.executable, "-c", code], os.environ, "the child") == (-signal.SIGKILL, None)
    said = capfd.readouterr().err
    assert re.match(r"error: the child \(process \d+\) was killed by SIGKILL\n\nhint: .*dmesg", said), said
