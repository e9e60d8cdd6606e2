"""Real commands that a cluster ends: Slurm's warning, SIGTERM, an agent that is killed. What was trained is saved."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from demo_run import ENVIRONMENT, lines, write_demo
from ranks import free_port
from test_forks import is_alive

from dflop.runtime.directory import alone_in
from dflop.runtime.resume import checkpoints

pytestmark = [
    pytest.mark.timeout(1800),
    pytest.mark.skipif(sys.platform != "linux", reason="looks into /proc"),
]
GUARD_S = 600.0
SIGNALS = ["--signals-to-handle", "SIGTERM,SIGINT,SIGHUP,SIGQUIT,SIGUSR1"]
"""As `dflop plan --emit slurm` gives it to torchrun; `tests/unit/test_emit.py` holds it to that."""


@pytest.fixture(scope="module")
def demo(tmp_path_factory):
    return write_demo(tmp_path_factory.mktemp("demo"), 24, 8, 4)


def wait_until(is_so, what):
    deadline = time.monotonic() + GUARD_S
    while not is_so():
        assert time.monotonic() < deadline, what
        time.sleep(0.05)


def below(process):
    """All processes that a process has started, and those that these have."""
    found = []
    # Threads end while their list is read.
    for children in Path(f"/proc/{process}/task").glob("*/children"):
        with contextlib.suppress(OSError):
            for child in map(int, children.read_text().split()):
                found += [child, *below(child)]
    return found


class Started:
    """A command that trains in `out` without end, and writes to a file; two steps are trained when this returns."""

    def __init__(self, demo, out, signals=None):
        train = [
            "-m",
            "dflop",
            "train",
            "--other-device",
            "--steps",
            "100000",
            "--resume",
            "auto",
            "--out",
            str(out),
        ]
        if signals is not None:
            meeting = ["--master-addr", "127.0.0.1", "--master-port", str(free_port())]
            agent = ["-m", "torch.distributed.run", "--nproc-per-node", "2", *meeting]
            train = [*agent, *signals, *train]
        self.log = out.with_name(f"{out.name} {len(list(out.parent.iterdir()))}.log")
        environment = {k: v for k, v in ENVIRONMENT.items() if k != "RANK"} | {"GLOO_SOCKET_IFNAME": "lo"}
        with self.log.open("w") as log:
            self.process = subprocess.Popen(
                [sys.executable, *train],
                cwd=demo,
                env=environment,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )

    def wait_for_steps(self, out):
        metrics = out / "metrics.jsonl"

        def has_two():
            assert self.process.poll() is None, self.log.read_text()
            return metrics.exists() and metrics.read_bytes().count(b"\n") >= 2

        wait_until(has_two, "no step")


def check_saved(out):
    """A checkpoint after the last step that is written; none was due before."""
    steps = [m["step"] for m in lines(out / "metrics.jsonl")]
    assert steps == list(range(len(steps)))
    assert [step for step, _ in checkpoints(out)] == [len(steps)]


@pytest.mark.more
@pytest.mark.parametrize("is_torchrun", [False, True])
def test_ranks_that_are_left_behind_save_and_end_and_nobody_trains_beside_them(
    is_torchrun, kills, demo, tmp_path
):
    """SIGKILL of `dflop train`, and of the agent of an external torchrun. The directory is theirs until they have ended."""
    out = tmp_path / "run"
    command = Started(demo, out, [] if is_torchrun else None)
    command.wait_for_steps(out)
    ranks = (kills.children if is_torchrun else kills.ranks_of)(command.process.pid)
    assert len(ranks) == 2
    others = below(command.process.pid)
    for rank in ranks:
        os.kill(rank, signal.SIGSTOP)
    command.process.kill()
    command.process.wait()
    with pytest.raises(OSError, match="another command is training there, only one may"), alone_in(out):
        pass
    for rank in ranks:
        os.kill(rank, signal.SIGCONT)
    wait_until(lambda: not any(map(is_alive, others)), "the ranks train on")
    check_saved(out)

    def is_free():
        with contextlib.suppress(OSError), alone_in(out):
            return True
        return False

    wait_until(is_free, "nobody may train here any more")


@pytest.mark.more
@pytest.mark.parametrize(
    ("is_torchrun", "number", "to_all"),
    [
        (True, signal.SIGUSR1, False),
        (True, signal.SIGUSR1, True),
        (False, signal.SIGUSR1, False),
        (False, signal.SIGUSR1, True),
        (False, signal.SIGTERM, True),
    ],
)
def test_the_warning_of_a_queue_saves(is_torchrun, number, to_all, demo, tmp_path):
    """To the task of a Slurm step alone (`proctrack/cgroup`), or to all its processes; what then is left is killed.

    The task is torchrun, as the emitted script has it, or `dflop train`.
    """
    out = tmp_path / "run"
    command = Started(demo, out, SIGNALS if is_torchrun else None)
    command.wait_for_steps(out)
    others = below(command.process.pid)
    for process in (command.process.pid, *(others if to_all else ())):
        os.kill(process, number)
    status = command.process.wait(GUARD_S)
    # As Slurm does where the task has ended.
    for process in filter(is_alive, others):
        os.kill(process, signal.SIGKILL)
    assert status == (1 if is_torchrun else 128 + number), command.log.read_text()
    check_saved(out)
