"""Processes of ours end together: a signal goes down, and none outlives the one it works for."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from dflop.child import as_parent, end_with_parent
from dflop.profiling.launch import launch

CHILD = """
import pathlib, time
from dflop.child import end_with_parent

try:
    end_with_parent()
    print("ready", flush=True)
    time.sleep(60)
except KeyboardInterrupt:
    pathlib.Path("told").write_text("x")
"""
PARENT = f"""
import os, sys
from dflop.child import run_child

run_child([sys.executable, "-c", {CHILD!r}], os.environ)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux tells a child")
def test_a_child_ends_when_its_parent_is_killed(tmp_path: Path) -> None:
    """By SIGKILL, which the parent cannot pass on."""
    parent = subprocess.Popen([sys.executable, "-c", PARENT], cwd=tmp_path, stdout=subprocess.PIPE)
    assert parent.stdout is not None
    assert parent.stdout.readline() == b"ready\n"
    parent.kill()
    parent.wait()
    deadline = time.monotonic() + 20
    while not (tmp_path / "told").exists():
        assert time.monotonic() < deadline, "the child lives on"
        time.sleep(0.02)


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux tells a child")
@pytest.mark.parametrize(("parent", "status"), [(os.getpid(), 0), (os.getpid() + 1, 130), (None, 0)])
def test_a_parent_that_has_gone_before(parent: int | None, status: int) -> None:
    """Between the start of the child and its asking to be told; by hand there is no parent to follow."""
    environment = {k: v for k, v in os.environ.items() if k not in as_parent()}
    environment |= {} if parent is None else {name: str(parent) for name in as_parent()}
    code = "from dflop.child import end_with_parent as e; e()"
    assert subprocess.run([sys.executable, "-c", code], env=environment, check=False).returncode == status


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
time.sleep(60)
"""


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
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
