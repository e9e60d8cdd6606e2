"""The whole of `dflop train` on demo data: what it writes, Ctrl-C, broken files, both ways to start."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
import torch.utils.tensorboard  # noqa: F401  (this and the trainer: imported once, for all forked ranks)
from ranks import results, run_ranks

import dflop.runtime.trainer  # noqa: F401
from dflop._native import load_config
from dflop.models import load_adapter
from dflop.profiling.artifact import hash_config
from dflop.runtime.launch import launch

ENVIRONMENT = dict(os.environ)
NUM_SAMPLES, BATCH, MICROBATCHES = 24, 8, 4
RANKS = 2


def python(arguments, directory):
    """Runs `python ARGUMENTS` in `directory`, apart: forked ranks must not inherit Rust's thread pool."""
    done = subprocess.run(
        [sys.executable, *arguments], cwd=directory, env=ENVIRONMENT, capture_output=True, text=True
    )
    assert done.returncode == 0, f"{arguments}: {done.returncode}\n{done.stdout}\n{done.stderr}"
    return done


def model_profile(model_config):
    """A made-up profile: a microsecond a token and 50 us a call."""

    def curve(per_token_ns):
        zeros = dict.fromkeys(("input_ns", "weight_ns", "spread_ns", "activation_bytes", "workspace_bytes"), 0)
        point = {**zeros, "repeats": 1}
        times = [(n, 50_000 + n * per_token_ns) for n in (1, 4096)]
        return {
            "points": [point | {"size": n, "forward_ns": ns, "backward_ns": 2 * ns} for n, ns in times],
        }

    module = {"attention": {"points": []}, "num_parameters": 1000, "parameter_bytes": 4000}
    link = {
        "collective": "point_to_point", "span": "node", "num_ranks": 2, "latency_ns": 100_000,
        "bandwidth_bytes_per_s": 1_000_000_000, "points": [],
    }  # fmt: skip
    counts = {
        "encoder_embedding": 1, "encoder_layer": 3, "projector": 1, "llm_embedding": 1, "llm_layer": 4, "llm_head": 1,
    }  # fmt: skip
    return {
        "dflop": "model_profile",
        "format_version": 2,
        "made_from": {"model_config": model_config},
        "family": "llava_onevision",
        "is_estimated": False,
        "device": {
            "kind": "cpu", "name": "made up", "num_threads": 1, "num_neighbours": 1, "dtype": "float32",
            "torch": "",
        },
        "hidden_bytes": 512,
        "network": {"backend": "gloo", "is_assumed": False, "links": [link]},
        "modules": {
            name: module | {"count": count, "linear": curve(1000)} for name, count in counts.items()
        },
        "optimizer_ns_per_million": 1_000_000,
    }  # fmt: skip


@pytest.fixture(scope="module")
def demo(tmp_path_factory):
    """Demo data, profiles and a plan of two ranks."""
    torch.set_num_threads(1)
    directory = tmp_path_factory.mktemp("demo")
    python(["-m", "dflop", "demo-data", str(directory), "--samples", str(NUM_SAMPLES)], directory)
    config = directory / "dflop.yaml"
    text = config.read_text()
    sizes = {"global_batch_size": BATCH, "num_microbatches": MICROBATCHES, "video_max_frames": 3}
    for key, value in sizes.items():
        text = re.sub(rf"{key}: \d+", f"{key}: {value}", text)
    config.write_text(text)
    python(["-m", "dflop", "profile", "data"], directory)
    profile = model_profile(hash_config(directory / "model"))
    (directory / "model_profile.json").write_text(json.dumps(profile))
    python(["-m", "dflop", "plan"], directory)
    load_adapter(directory / "model")
    return directory


def request(demo, out, **changes):
    """What the command line would ask for."""
    return {
        "config_path": str(demo / "dflop.yaml"),
        "config": load_config(str(demo / "dflop.yaml")),
        "plan": str(demo / "plan.json"),
        "data_profile": str(demo / "data_profile.parquet"),
        "model_profile": str(demo / "model_profile.json"),
        "out": str(out),
        "steps": 3,
        "compare": False,
        "warmup_pairs": 0,
        "num_ranks": RANKS,
        "environment": {},
        "timeout_s": 60.0,
        **changes,
    }


def run_training(asked, directory, before=None):
    """Ranks of a run in forked processes, as an external torchrun would start them; their exit statuses."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]

    def rank(index):
        os.environ |= {
            "RANK": str(index), "LOCAL_RANK": str(index),
            "WORLD_SIZE": str(RANKS), "LOCAL_WORLD_SIZE": str(RANKS),
            "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port),
        }  # fmt: skip
        if before is not None:
            before(index)
        return launch(asked)

    return run_ranks(RANKS, rank, directory)


def lines(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


def check_run(out, num_records):
    """The three files agree with each other and with the plan's actions; the metrics."""
    metrics, traces, schedules = (lines(out / f"{n}.jsonl") for n in ("metrics", "trace", "schedules"))
    assert len(metrics) == len(traces) == len(schedules) == num_records
    for m, trace, schedule in zip(metrics, traces, schedules, strict=True):
        key = (m["step"], m["arm"])
        assert (trace["step"], trace["arm"]) == (schedule["step"], schedule["arm"]) == key
        assert trace["makespan_ns"] == m["step_ns"] >= max(span[3] for span in trace["spans"])
        assert len(trace["spans"]) == RANKS * 2 * MICROBATCHES
        busy = sum(end - start for _, _, start, end in trace["spans"])
        idle = sum(m["idle_ns"].values())
        assert 0 < m["bubble_ratio"] < 1
        assert busy + idle <= RANKS * m["step_ns"]
        llm = schedule["schedule"]["llm"]
        placed = [s for microbatch in llm for replica in microbatch for s in replica]
        assert sorted(placed) == sorted(schedule["samples"])
        assert m["samples"] == len(placed)
        assert m["predicted_ns"] > 0
        assert m["tokens"] > 0
        assert 0 < m["grad_norm"] < 1e3
    return metrics, schedules


def test_a_run_writes_each_step_and_each_sample_once_an_epoch(demo, tmp_path):
    """Five steps by the environment of torchrun: one epoch of three, and two of the next."""
    out = tmp_path / "run"
    assert results(run_training(request(demo, out, steps=5), tmp_path)) == [0, 0]
    metrics, schedules = check_run(out, 5)
    assert [m["epoch"] for m in metrics] == [0, 0, 0, 1, 1]
    assert [m["arm"] for m in metrics] == ["aware"] * 5
    epoch = [s for schedule in schedules[:3] for s in schedule["samples"]]
    assert sorted(epoch) == list(range(NUM_SAMPLES))
    assert schedules[3]["samples"] != schedules[0]["samples"]
    assert metrics[-1]["loss"] < metrics[0]["loss"]
    assert list((out / "tensorboard" / "aware").glob("events.*"))


def test_a_comparison_trains_both_arms_on_the_same_batches(demo, tmp_path):
    """One warm-up pair is not written; who goes first alternates; both arms get the same samples."""
    out = tmp_path / "run"
    asked = request(demo, out, compare=True, warmup_pairs=1, steps=2)
    assert results(run_training(asked, tmp_path)) == [0, 0]
    metrics, schedules = check_run(out, 4)
    assert [(m["step"], m["arm"], m["pair"]) for m in metrics] == [
        (1, "aware", 0),
        (1, "blind", 0),
        (2, "blind", 1),
        (2, "aware", 1),
    ]
    for one, two in [(0, 1), (2, 3)]:
        assert schedules[one]["samples"] == schedules[two]["samples"]
    assert schedules[0]["schedule"]["llm"] != schedules[1]["schedule"]["llm"]


def test_the_arm_does_not_change_what_is_learned(demo, tmp_path):
    """Three steps blind and three aware: losses and gradient norms are equal up to rounding."""
    runs = {}
    for arm in ("blind", "aware"):
        config = json.loads(load_config(str(demo / "dflop.yaml")))
        config["train"]["schedule"] = arm
        out = tmp_path / arm
        asked = request(demo, out, config=json.dumps(config))
        assert results(run_training(asked, tmp_path / f"{arm} ranks")) == [0, 0]
        runs[arm] = lines(out / "metrics.jsonl")
    for blind, aware in zip(runs["blind"], runs["aware"], strict=True):
        assert blind["loss"] == pytest.approx(aware["loss"], rel=1e-5)
        assert blind["grad_norm"] == pytest.approx(aware["grad_norm"], rel=1e-4)


def test_an_interrupted_rank_stops_all_after_the_running_step(demo, tmp_path):
    """SIGINT reaches one rank alone; both end with 130, and every line on disk is whole."""
    out = tmp_path / "run"

    def before(index):
        if index == 1:
            # From a child of this rank: sent once three steps are on disk.
            parent = os.getpid()
            if os.fork() == 0:
                while not (out / "metrics.jsonl").exists() or len(lines(out / "metrics.jsonl")) < 3:
                    time.sleep(0.02)
                os.kill(parent, signal.SIGINT)
                os._exit(0)

    assert results(run_training(request(demo, out, steps=10_000), tmp_path, before)) == [130, 130]
    written = len(lines(out / "metrics.jsonl"))
    assert 3 <= written < 1000
    check_run(out, written)


def test_a_file_that_cannot_be_decoded_stops_the_run_with_its_name(demo, tmp_path):
    """A picture that broke after it was profiled: the encoder rank names sample and file, all stop."""
    copy = tmp_path / "demo"
    shutil.copytree(demo, copy)
    for path in (copy / "data").rglob("*"):
        if path.suffix in (".jpg", ".png", ".webp"):
            # Header and size, which were profiled, stay.
            whole = path.read_bytes()
            path.write_bytes(whole[:200] + bytes(len(whole) - 200))
    ranks = run_training(request(copy, tmp_path / "run"), tmp_path)
    assert [r.result for r in ranks] == [1, 1]
    assert re.search(r"\[encoder dp 0/1\] step 0: sample `.*` \(\d+\): cannot decode `.*`", ranks[0].stderr)
    assert "[llm pp 0/1 dp 0/1] step 0: cannot compare digests, another rank stopped" in ranks[1].stderr


def test_bfloat16_trains_on_the_same_way(demo, tmp_path):
    """One step: features, hidden states and gradients cross ranks; the loss is about that of float32."""
    losses = {}
    for dtype in ("float32", "bfloat16"):
        config = json.loads(load_config(str(demo / "dflop.yaml")))
        config["model"]["dtype"] = dtype
        asked = request(demo, tmp_path / dtype, config=json.dumps(config), steps=1)
        assert results(run_training(asked, tmp_path / f"{dtype} ranks")) == [0, 0]
        losses[dtype] = lines(tmp_path / dtype / "metrics.jsonl")[0]["loss"]
    assert losses["bfloat16"] == pytest.approx(losses["float32"], rel=0.01)


def test_the_command_starts_the_ranks_itself(demo, tmp_path):
    """`dflop train` with torchrun on this machine, until Ctrl-C: 130, no traceback, whole lines."""
    out = tmp_path / "run"
    process = subprocess.Popen(
        [sys.executable, "-m", "dflop", "train", "--other-device", "--steps", "100000", "--out", str(out)],
        cwd=demo,
        env=ENVIRONMENT,
        stderr=subprocess.PIPE,
        text=True,
    )
    metrics = out / "metrics.jsonl"
    deadline = time.monotonic() + 120
    while process.poll() is None and time.monotonic() < deadline:
        if metrics.exists() and metrics.read_text().count("\n") >= 2:
            break
        time.sleep(0.1)
    process.send_signal(signal.SIGINT)
    _, stderr = process.communicate(timeout=60)
    assert process.returncode == 130, stderr
    assert "Traceback" not in stderr
    check_run(out, len(lines(metrics)))


def test_a_rank_that_is_killed_ends_the_others(tmp_path):
    """The agent says which rank the system killed, and ends the one that still waits."""
    (tmp_path / "stubborn.py").write_text(
        "import os, time\nif os.environ['RANK'] == '1':\n    os.kill(os.getpid(), 9)\ntime.sleep(600)\n"
    )
    began = time.monotonic()
    done = subprocess.run(
        [sys.executable, "-m", "dflop.runtime.agent", "--standalone", "--local-addr", "127.0.0.1"]
        + ["--nproc-per-node", "2", "-m", "stubborn"],
        env={**ENVIRONMENT, "PYTHONPATH": str(tmp_path)},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert time.monotonic() - began < 60
    assert done.returncode == 1
    assert "error: rank 1 was killed by SIGKILL" in done.stderr
    assert "Traceback" not in done.stderr
