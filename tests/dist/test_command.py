"""`dflop train` as a command that starts its ranks: Ctrl-C, what is killed, and who ends whom."""

from __future__ import annotations

import json
import os
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
from dflop.runtime.turns import log_lines

ASK = "import json, sys, dflop._native as d; print(json.dumps(d.run_cli(['dflop', *sys.argv[1:]])[1]))"
"""What the command line asks of the ranks, without starting them."""
NUM_SAMPLES, BATCH, MICROBATCHES = 24, 8, 4
RANKS = 2
GUARD_S = 240.0
"""Nothing may hang; what is asserted is what happened, not when."""


@pytest.fixture(scope="module")
def demo(tmp_path_factory):
    """Demo data, profiles and a plan of two ranks."""
    return write_demo(tmp_path_factory.mktemp("demo"), NUM_SAMPLES, BATCH, MICROBATCHES)


def test_the_command_starts_the_ranks_itself(demo, tmp_path):
    """`dflop train` with torchrun until Ctrl-C: 130, no traceback, whole lines. Its log can be replayed."""
    out = tmp_path / "run"
    process = subprocess.Popen(
        [sys.executable, "-m", "dflop", "train", "--other-device", "--steps", "100000", "--out", str(out)],
        cwd=demo,
        env=ENVIRONMENT,
        stderr=subprocess.PIPE,
        text=True,
    )
    metrics = out / "metrics.jsonl"
    deadline = time.monotonic() + GUARD_S
    while process.poll() is None and time.monotonic() < deadline:
        if metrics.exists() and metrics.read_text().count("\n") >= 2:
            break
        time.sleep(0.1)
    process.send_signal(signal.SIGINT)
    _, stderr = process.communicate(timeout=GUARD_S)
    assert process.returncode == 130, stderr
    assert "Traceback" not in stderr
    check_run(out, len(lines(metrics)))
    assert f"interrupted after {len(lines(metrics))} steps; metrics are in {out}\n" in stderr
    # What it does in the long time before the first step, in order.
    said = [line.removeprefix("train: ") for line in stderr.splitlines() if line.startswith("train: ")]
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
    replay = ["-m", "dflop", *flags]
    first = log_lines(log)[0] + "\n"
    for change, out, message in [
        ((first, ""), "other", "schedules.jsonl` line 1: step 1, but step 0 is missing before it"),
        (('"plan": "sha256:', '"plan": "sha256:0'), "other", "schedules.jsonl` is of another plan: sha256:0"),
        (("", ""), "run", "is in the directory of this run, which would overwrite it"),
    ]:
        log.write_text(log.read_text().replace(*change))
        failed = subprocess.run(
            [sys.executable, *replay, str(tmp_path / out), "--force"],
            cwd=demo, env=ENVIRONMENT, capture_output=True, text=True,
        )  # fmt: skip
        assert failed.returncode == 2
        assert message in failed.stderr


def test_a_run_that_ends_before_its_first_step_changes_nothing(demo, tmp_path):
    """Ctrl-C while PyTorch is imported: the earlier run is whole, and without one the next is not refused."""
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
    command = [sys.executable, "-m", "dflop", "train", "--other-device", "--out", str(out)]
    refused = subprocess.run(command, cwd=demo, env=ENVIRONMENT, capture_output=True, text=True)
    assert refused.returncode == 2
    assert "holds an earlier run" in refused.stderr
    for flags, files in [(["--force"], earlier), ([], {"metrics.jsonl": ""})]:
        for path in out.iterdir():
            if path.name not in files:
                path.unlink()
        for name, text in files.items():
            (out / name).write_text(text)
        process = subprocess.Popen(
            [*command, *flags], cwd=demo, env=ENVIRONMENT, stderr=subprocess.PIPE, text=True
        )
        for line in process.stderr:
            if line == "train: importing PyTorch\n":
                break
        process.send_signal(signal.SIGINT)
        _, stderr = process.communicate(timeout=GUARD_S)
        assert process.returncode == 130, stderr
        assert stderr == "interrupted before the first step; nothing is written\n"
        assert {path.name: path.read_text() for path in out.iterdir()} == files


def test_a_rank_that_is_killed_ends_the_others(tmp_path):
    """The agent says which rank the system killed, and ends the one that still waits."""
    (tmp_path / "stubborn.py").write_text(
        "import os, time\nif os.environ['RANK'] == '1':\n    os.kill(os.getpid(), 9)\ntime.sleep(600)\n"
    )
    done = subprocess.run(
        [sys.executable, "-m", "dflop.runtime.agent", "--standalone", "--local-addr", "127.0.0.1"]
        + ["--nproc-per-node", "2", "-m", "stubborn"],
        env=ENVIRONMENT | {"PYTHONPATH": os.pathsep.join([str(tmp_path), *sys.path])},
        capture_output=True,
        text=True,
        timeout=GUARD_S,
    )
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


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux tells a child")
def test_no_rank_outlives_an_agent_that_is_killed(demo, tmp_path):
    """By SIGKILL: the ranks end after the running step, and the command says what was killed."""
    out = tmp_path / "run"
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
    process = subprocess.Popen(command, cwd=demo, env=ENVIRONMENT, stderr=subprocess.PIPE, text=True)
    metrics = out / "metrics.jsonl"
    deadline = time.monotonic() + GUARD_S
    while not metrics.exists() or metrics.read_text().count("\n") < 2:
        assert time.monotonic() < deadline
        time.sleep(0.05)
    ranks = ranks_of(out / "request")
    # The agent, its ranks, and a process that decodes for each rank that encodes.
    assert len(ranks) > RANKS
    os.kill(agent_of(ranks), signal.SIGKILL)
    _, stderr = process.communicate(timeout=GUARD_S)
    assert "was killed by SIGKILL" in stderr
    wait_for_end(out / "request")
    check_run(out, len(lines(metrics)))


def wait_for_end(path):
    """Until no process has this argument."""
    deadline = time.monotonic() + GUARD_S
    while ranks_of(path):
        assert time.monotonic() < deadline, "ranks go on"
        time.sleep(0.05)


WAITING = """
import os, pathlib, signal, sys
from dflop.child import end_with_parent

end_with_parent()
signal.signal(signal.SIGINT, lambda *_: sys.exit(0))
signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})
pathlib.Path(sys.argv[1], os.environ["RANK"]).touch()
while True:
    signal.pause()
"""
"""A rank of torchrun that does nothing: it starts in no time."""
STARTER = """
import os, sys
from dflop.child import run_child

status, caught = run_child(sys.argv[1:], os.environ, "the agent")
sys.exit(status if caught is None else 128 + caught)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="looks into /proc")
@pytest.mark.parametrize("fault", ["command killed", "agent stopped"])
def test_torchrun_and_its_ranks_end_with_the_command(fault, tmp_path):
    """SIGKILL of the command, which cannot pass it on; and SIGTERM while torchrun's agent is stopped: it is woken."""
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
    process.send_signal(signal.SIGKILL if fault == "command killed" else signal.SIGTERM)
    if fault == "command killed":
        process.wait(timeout=GUARD_S)
    else:
        _, stderr = process.communicate(timeout=GUARD_S)
        assert process.returncode == 128 + signal.SIGTERM, stderr
        assert stderr == ""
    wait_for_end(begun)
