"""`dflop train` as a command that starts its ranks: Ctrl-C, what is killed, and who ends whom."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch.utils.tensorboard  # noqa: F401  (this and the trainer: imported once, for all forked ranks)
from demo_run import ENVIRONMENT, check_run, lines, python, run_training, write_demo
from ranks import results

import dflop.runtime.trainer  # noqa: F401
import warm
from dflop.runtime.resume import checkpoints
from dflop.runtime.turns import log_lines

ASK = "import json, sys, dflop._native as d; print(json.dumps(d.run_cli(['dflop', *sys.argv[1:]])[1]))"
"""What the command line asks of the ranks, without starting them."""
NUM_SAMPLES, BATCH, MICROBATCHES = 24, 8, 4
RANKS = 2
GUARD_S = 600.0
"""Nothing may hang; what is asserted is what happened, not when."""


@pytest.fixture(scope="module")
def demo(tmp_path_factory):
    """Demo data, profiles and a plan of two ranks."""
    return write_demo(tmp_path_factory.mktemp("demo"), NUM_SAMPLES, BATCH, MICROBATCHES)


def wait_until(is_so, process):
    """Looks again and again, while the process runs."""
    deadline = time.monotonic() + GUARD_S
    while not is_so():
        assert process.poll() is None, process.communicate()
        assert time.monotonic() < deadline
        time.sleep(0.05)


@pytest.mark.more
@pytest.mark.timeout(1800)
def test_the_command_starts_the_ranks_and_starts_them_again(kills, demo, tmp_path):
    """`dflop train` with torchrun: a `kill -9` of a rank, after which it goes on by itself, until Ctrl-C: 130.

    Each sample is trained once, no line is half; the log can be replayed. One run for all of it: its start
    imports for seconds. Several kills are `make bench-kills` and, with forked ranks, `test_faults.py`.
    """
    folder = tmp_path / "demo"
    shutil.copytree(demo, folder)
    config = folder / "dflop.yaml"
    config.write_text(config.read_text() + "checkpoint:\n  every: 2\n")
    out = folder / "run"
    command = [
        sys.executable,
        "-m",
        "dflop",
        "train",
        "--other-device",
        "--steps",
        "100000",
        "--out",
        str(out),
    ]
    process = subprocess.Popen(
        [*command, "--max-restarts", "1"], cwd=folder, env=ENVIRONMENT, stderr=subprocess.PIPE, text=True
    )
    metrics = out / "metrics.jsonl"
    # A checkpoint is written beside the steps that follow it.
    wait_until(lambda: kills.num_lines(metrics) >= 3 and checkpoints(out), process)
    first = kills.ranks_of(process.pid)
    assert len(first) == RANKS
    os.kill(first[1], signal.SIGKILL)
    wait_until(lambda: set(kills.ranks_of(process.pid)) - set(first), process)
    # Then those steps are undone that came after the checkpoint.
    num_before = kills.num_lines(metrics)
    wait_until(lambda: kills.num_lines(metrics) >= num_before + 2, process)
    process.send_signal(signal.SIGINT)
    _, stderr = process.communicate(timeout=GUARD_S)
    assert process.returncode == 130, stderr
    num_steps = len(lines(metrics))
    check_run(out, num_steps)
    assert kills.check(folder, num_steps) | {"steps_undone": 0} == {
        "steps": num_steps, "samples": NUM_SAMPLES, "is_right": True, "steps_undone": 0,
    }  # fmt: skip
    before, after = re.split("restart 1 of 1: the ranks go on from step [0-9]+\n", stderr)
    assert "error: rank 1 was killed by SIGKILL" in before
    assert "Traceback" not in after
    # The checkpoint has them.
    assert "drawn at random" not in after
    assert re.search(f"interrupted after [0-9]+ steps; metrics are in {re.escape(str(out))}\n", after)
    # What it does in the long time before the first step, in order.
    said = [line.removeprefix("train: ") for line in before.splitlines() if line.startswith("train: ")]
    assert said == [
        "starting 2 ranks",
        "importing PyTorch",
        "waiting for all ranks",
        "building the model and reading the data profile",
        "the parameters are drawn at random from seed 0 (`train.init: random`)",
        "the first step: its schedule, its media, the step itself",
    ]
    assert json.loads((out / "request.json").read_text())["num_ranks"] == RANKS
    # The log as it is; then without its first step; then as if of another plan; then over itself.
    log = out / "schedules.jsonl"
    flags = ["train", "-c", str(demo / "dflop.yaml"), "--other-device", "--replay", str(log), "--out"]
    asked = python(["-c", ASK, *flags, str(tmp_path / "again")], demo).stdout
    assert results(run_training(json.loads(asked)["arguments"], tmp_path / "ranks")) == [0, 0]
    again = lines(tmp_path / "again" / "metrics.jsonl")
    assert [m["loss"] for m in again] == [m["loss"] for m in lines(metrics)]
    first_line = log_lines(log)[0] + "\n"
    for change, name, message in [
        ((first_line, ""), "other", "schedules.jsonl` line 1: step 1, but step 0 is missing before it"),
        (('"plan": "sha256:', '"plan": "sha256:0'), "other", "schedules.jsonl` is of another plan: sha256:0"),
        (("", ""), "demo/run", "is in the directory of this run, which would overwrite it"),
    ]:
        log.write_text(log.read_text().replace(*change))
        failed = warm.run(["-m", "dflop", *flags, tmp_path / name, "--force"], demo, ENVIRONMENT)
        assert failed.returncode == 2
        assert message in failed.stderr


def test_a_run_that_ends_before_its_first_step_changes_nothing(demo, tmp_path):
    """Ctrl-C while PyTorch is imported: the earlier run is whole, and what holds none is not refused."""
    out = tmp_path / "run"
    out.mkdir()
    earlier = {
        "metrics.jsonl": '{"step": 7}\n',
        "trace.jsonl": "t",
        "schedules.jsonl": "s",
        "request.json": "{}",
    }
    for name, text in earlier.items():
        (out / name).write_text(text)
    train = ["train", "--other-device", "--out", str(out)]
    refused = warm.run(["-m", "dflop", *train], demo, ENVIRONMENT)
    assert refused.returncode == 2
    assert "holds an earlier run" in refused.stderr
    process = subprocess.Popen(
        [sys.executable, "-m", "dflop", *train, "--force"],
        cwd=demo, env=ENVIRONMENT, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    for line in process.stderr:
        if line == "train: importing PyTorch\n":
            break
    process.send_signal(signal.SIGINT)
    _, stderr = process.communicate(timeout=GUARD_S)
    assert process.returncode == 130, stderr
    assert stderr == "interrupted before the first step; nothing is written\n"
    assert {path.name: path.read_text() for path in out.iterdir()} == earlier
    # As a run leaves it that was ended before its first step.
    for name in earlier:
        (out / name).unlink()
    (out / "metrics.jsonl").write_text("")
    assert json.loads(python(["-c", ASK, *train], demo).stdout)["arguments"]["out"] == str(out)


def test_a_rank_that_is_killed_ends_the_others(tmp_path):
    """The agent says which rank the system killed, and ends the one that still waits."""
    (tmp_path / "stubborn.py").write_text(
        "import os, time\nif os.environ['RANK'] == '1':\n    os.kill(os.getpid(), 9)\ntime.sleep(600)\n"
    )
    agent = [
        "-m",
        "dflop.runtime.agent",
        "--standalone",
        "--local-addr",
        "127.0.0.1",
        "--nproc-per-node",
        "2",
    ]
    path = os.pathsep.join([str(tmp_path), *sys.path])
    done = warm.run([*agent, "-m", "stubborn"], tmp_path, ENVIRONMENT | {"PYTHONPATH": path})
    assert done.returncode == 1
    assert "error: rank 1 was killed by SIGKILL" in done.stderr
    assert "Traceback" not in done.stderr


def ranks_of(path):
    """Command lines of the processes that have this request; one that has ended but is not yet buried has none."""
    commands = {}
    for process in Path("/proc").glob("[0-9]*"):
        try:
            commands[process.name] = (process / "cmdline").read_bytes()
        except OSError:
            continue
    return {int(name): command for name, command in commands.items() if str(path).encode() in command}


def agent_of(processes):
    """The agent among them. The numbers of processes begin again at some point: its own need not be the smallest."""
    (agent,) = (process for process, command in processes.items() if b"dflop.runtime.agent" in command)
    return agent


def wait_for_end(path):
    """Until no process has this argument."""
    deadline = time.monotonic() + GUARD_S
    while ranks_of(path):
        assert time.monotonic() < deadline, "ranks go on"
        time.sleep(0.05)


WAITING = """
import os, pathlib, signal, sys, time
from dflop.child import end_with_parent

end_with_parent()
signal.signal(signal.SIGINT, lambda *_: sys.exit(0))
signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})
pathlib.Path(sys.argv[1], os.environ["RANK"]).touch()
while True:
    time.sleep(0.02)
"""
"""A rank of torchrun that does nothing: it starts in no time."""
STARTER = """
import os, sys
from dflop.child import run_child

status, caught = run_child(sys.argv[1:], os.environ, "the agent")
sys.exit(status if caught is None else 128 + caught)
"""


@pytest.mark.some(2)
@pytest.mark.skipif(sys.platform != "linux", reason="looks into /proc")
@pytest.mark.parametrize("fault", ["command killed", "agent stopped", "agent killed"])
def test_command_agent_and_ranks_end_together(fault, tmp_path):
    """SIGKILL of the command or of torchrun's agent, which cannot pass it on; SIGTERM while the agent is stopped: it is woken.

    The ranks hear Ctrl-C, after which those of a run end with the running step, as the test above has it.
    """
    begun = tmp_path / "begun"
    begun.mkdir()
    (tmp_path / "waiting.py").write_text(WAITING)
    agent = ["-m", "dflop.runtime.agent", "--standalone", "--local-addr", "127.0.0.1"]
    agent += ["--nproc-per-node", "2", "-m", "waiting", str(begun)]
    process = subprocess.Popen(
        [sys.executable, "-c", STARTER, sys.executable, *agent],
        env=ENVIRONMENT | {"PYTHONPATH": os.pathsep.join([str(tmp_path), *sys.path])},
        stderr=subprocess.PIPE,
        text=True,
    )
    deadline = time.monotonic() + GUARD_S
    while len(list(begun.iterdir())) < 2:
        assert time.monotonic() < deadline
        time.sleep(0.05)
    started = {rank: command for rank, command in ranks_of(begun).items() if rank != process.pid}
    assert len(started) == 3
    if fault == "agent stopped":
        stopped = agent_of(started)
        os.kill(stopped, signal.SIGSTOP)
        while "State:\tT" not in Path(f"/proc/{stopped}/status").read_text():
            assert time.monotonic() < deadline
            time.sleep(0.01)
    if fault == "agent killed":
        os.kill(agent_of(started), signal.SIGKILL)
        _, stderr = process.communicate(timeout=GUARD_S)
        assert "was killed by SIGKILL" in stderr
    elif fault == "command killed":
        process.kill()
        process.wait(timeout=GUARD_S)
    else:
        process.terminate()
        _, stderr = process.communicate(timeout=GUARD_S)
        assert process.returncode == 128 + signal.SIGTERM, stderr
        assert stderr == ""
    wait_for_end(begun)
