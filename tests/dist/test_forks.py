"""Ranks that are forks of a process that has imported all: who their parent is, and that none outlives the others."""

from __future__ import annotations

import os
import select
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest
from demo_run import ENVIRONMENT, write_demo

from dflop.runtime import forks, resume, worker
from dflop.runtime.forks import may_fork

pytestmark = pytest.mark.skipif(
    sys.platform != "linux", reason="ranks are forks on Linux alone; looks into /proc"
)
GUARD_S = 120.0


def is_alive(process):
    try:
        return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


@pytest.fixture(scope="module")
def demo(tmp_path_factory):
    return write_demo(tmp_path_factory.mktemp("forks") / "demo", 8, 8, 4)


@pytest.mark.some(1)
@pytest.mark.parametrize("killed", ["agent", "nursery", "rank"])
def test_no_process_outlives_the_others(killed, kills, demo, tmp_path):
    """SIGKILL of torchrun's agent, of the process that forks the ranks, and of a rank: the command ends and says which."""
    out = tmp_path / "rehearsal"
    flags = ["--steps", "100000", "--speed", "20", "--out", str(out)]
    process = subprocess.Popen(
        [sys.executable, "-m", "dflop", "rehearse", *flags],
        cwd=demo, env=ENVIRONMENT, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    deadline = time.monotonic() + GUARD_S
    while not (out / "metrics.jsonl").exists():
        assert time.monotonic() < deadline
        assert process.poll() is None, process.stderr.read()
        time.sleep(0.05)
    (agent,) = kills.children(process.pid)
    (nursery,) = kills.children(agent)
    ranks = kills.ranks_of(process.pid)
    assert len(ranks) == 2
    os.kill({"agent": agent, "nursery": nursery, "rank": ranks[1]}[killed], signal.SIGKILL)
    _, stderr = process.communicate(timeout=GUARD_S)
    assert process.returncode == 1, stderr
    said = {
        "agent": "torchrun's agent, which starts the ranks,",
        "nursery": "error: the process that starts the ranks was killed",
        "rank": "error: rank 1 was killed by SIGKILL",
    }[killed]
    assert said in stderr
    assert "Traceback" not in stderr
    while any(is_alive(one) for one in (agent, nursery, *ranks)):
        assert time.monotonic() < deadline
        time.sleep(0.05)


def test_ranks_with_gpus_are_started_anew():
    """A process that has looked at CUDA has no forks that may use it."""
    assert not may_fork({"config": {"cluster": {"device": "cuda"}}})
    assert may_fork({"config": {"cluster": {"device": "cpu"}}})
    # Ranks of a rehearsal compute nothing.
    assert may_fork({"config": {"cluster": {"device": "cuda"}}, "rehearsal": {}})
    assert not may_fork({})


@pytest.fixture
def nursery(monkeypatch):
    """The agent's end of a real one, whose ranks end at once with status 3."""
    monkeypatch.setattr(worker, "run", lambda _: 3)
    monkeypatch.setattr(resume, "request_of", lambda _: {})
    ours, theirs = socket.socketpair()
    agent = os.getpid()
    process = os.fork()
    if process == 0:
        ours.close()
        forks._be_nursery(agent, theirs, "json")
    theirs.close()
    yield forks._Nursery(ours)
    ours.close()
    os.waitpid(process, 0)


def test_a_signal_in_the_midst_of_a_question_loses_no_status(nursery, monkeypatch):
    """The handler of torchrun raises where the answer is awaited, and torchrun then asks again."""

    class SignalError(Exception):
        pass

    rank = forks.ForkedRank(nursery, ["request.json"], dict(os.environ))
    deadline = time.monotonic() + GUARD_S
    while Path(f"/proc/{rank.pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z":
        assert time.monotonic() < deadline
    theirs = select.select

    def interrupted(*given):
        assert theirs(*given[:3], GUARD_S)[0], "the answer is there"
        raise SignalError

    for _ in range(2):
        monkeypatch.setattr(select, "select", interrupted)
        with pytest.raises(SignalError):
            rank.poll()
    monkeypatch.setattr(select, "select", theirs)
    other = forks.ForkedRank(nursery, ["request.json"], dict(os.environ))
    assert other.pid != rank.pid
    assert rank.poll() == 3
    assert other.wait(GUARD_S) == 3
