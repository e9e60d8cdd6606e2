"""Runs of `dflop train` on demo data, with ranks as forked processes."""

from __future__ import annotations

import json
import os
import re
from pathlib import Path

import torch
from made_up import made_up_profile
from ranks import environment, free_port, run_ranks

import warm
from dflop._native.testing import load_config
from dflop.models import load_adapter
from dflop.profiling.artifact import hash_config
from dflop.runtime.launch import launch

ENVIRONMENT = dict(os.environ)
VISION = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 2}
TEXT = {"hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 2, "num_key_value_heads": 1}
"""Of the demo's model made smaller: what is tested does not depend on its size, the time does."""


def python(arguments, directory):
    """Runs `python ARGUMENTS` in `directory`, apart: forked ranks must not inherit Rust's thread pool."""
    done = warm.run(arguments, cwd=directory, env=ENVIRONMENT)
    assert done.returncode == 0, f"{arguments}: {done.returncode}\n{done.stdout}\n{done.stderr}"
    return done


def model_profile(model_config, llm_layers=2):
    """A made-up profile: a microsecond a token and 50 us a call, also where two ranks share layers."""

    def curve(per_token_ns):
        zeros = dict.fromkeys(
            ("input_ns", "weight_ns", "spread_ns", "activation_bytes", "workspace_bytes"), 0
        )
        point = {**zeros, "repeats": 1}
        times = [(n, 50_000 + n * per_token_ns) for n in (1, 4096)]
        return {
            "points": [point | {"size": n, "forward_ns": ns, "backward_ns": 2 * ns} for n, ns in times],
        }

    module = {"attention": {"points": []}, "num_parameters": 1000, "parameter_bytes": 4000}
    counts = {
        "encoder_embedding": 1, "encoder_layer": 2, "projector": 1, "llm_embedding": 1, "llm_layer": llm_layers, "llm_head": 1,
    }  # fmt: skip
    modules = {name: module | {"count": count, "linear": curve(1000)} for name, count in counts.items()}
    profile = made_up_profile(model_config, 4 * TEXT["hidden_size"], modules)
    cut = {"tensor_parallel_degree": 2, "lora_rank": 0, "has_collectives": True, "modules": modules}
    return {**profile, "variants": [cut]}


def write_demo(directory, num_samples, batch, num_microbatches, spoil=None, llm_layers=2, **data):
    """Demo data with a small model, profiles and a plan of two ranks; `spoil` changes the data before it is profiled.

    `data` goes into the section of that name.
    """
    torch.set_num_threads(1)
    directory.mkdir(parents=True, exist_ok=True)
    python(["-m", "dflop", "demo-data", str(directory), "--samples", str(num_samples)], directory)
    config = directory / "dflop.yaml"
    text = config.read_text()
    sizes = {"global_batch_size": batch, "num_microbatches": num_microbatches, "video_max_frames": 3} | data
    for key, value in sizes.items():
        text, count = re.subn(rf"{key}: \w+", f"{key}: {value}", text)
        assert count == 1, key
    # What two runs measure is never the same, and their schedules shall be.
    config.write_text(text.replace("train:\n", "train:\n  correction: off\n", 1))
    path = directory / "model/config.json"
    model = json.loads(path.read_text())
    # Larger than usual, so that every part of so small a model changes the loss.
    model["vision_config"] |= VISION | {"initializer_range": 0.1}
    model["text_config"] |= TEXT | {"initializer_range": 0.1, "num_hidden_layers": llm_layers}
    path.write_text(json.dumps(model))
    if spoil is not None:
        spoil(directory)
    python(["-m", "dflop", "profile", "data"], directory)
    profile = model_profile(hash_config(directory / "model"), llm_layers)
    (directory / "model_profile.json").write_text(json.dumps(profile))
    python(["-m", "dflop", "plan", "--only", "colocated=false"], directory)
    load_adapter(directory / "model")
    return directory


def request(demo, out, num_ranks=2, **changes):
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
        "arms": ["blind", "aware"],
        "made_from": {"plan": "a hash", "data_profile": "another"},
        "warmup_pairs": 0,
        "num_ranks": num_ranks,
        "environment": {},
        "timeout_s": 100.0,
        **changes,
    }


def run_training(asked, directory, before=None):
    """Ranks of a run in forked processes, as an external torchrun would start them; their exit statuses."""
    num_ranks = asked["num_ranks"]
    port = free_port()

    def rank(index):
        os.environ |= environment(index, num_ranks, port)
        if before is not None:
            before(index)
        return launch(asked)

    return run_ranks(num_ranks, rank, directory)


def lines(path):
    """The records of a journal."""
    return [json.loads(line) for line in path.read_text().splitlines()]


def check_run(out, num_records, num_ranks=2, num_microbatches=4):
    """The three files agree with each other and with the plan's actions; the metrics."""
    metrics, traces, turns = (lines(out / f"{n}.jsonl") for n in ("metrics", "trace", "schedules"))
    schedules = [turn for turn in turns if turn["is_recorded"]]
    assert len(metrics) == len(traces) == len(schedules) == num_records
    for m, trace, schedule in zip(metrics, traces, schedules, strict=True):
        key = (m["step"], m["arm"])
        assert (trace["step"], trace["arm"]) == (schedule["step"], schedule["arm"]) == key
        assert trace["makespan_ns"] == m["step_ns"] >= max(span[3] for span in trace["spans"])
        assert len(trace["spans"]) == num_ranks * 2 * num_microbatches
        busy = sum(end - start for _, _, start, end in trace["spans"])
        idle = sum(m["idle_ns"][cause] for cause in ("ramp", "imbalance", "transfer"))
        # Before the clock of the step starts, and on all ranks: each waits for the last to have its samples.
        assert m["idle_ns"]["data_wait"] == num_ranks * m["data_wait_ns"] > 0
        assert abs(m["bubble_ratio"] - idle / (num_ranks * m["step_ns"])) < 1e-9
        assert 0 < m["bubble_ratio"] < 1
        # One encoder replica feeds one LLM replica: at most a message a microbatch, and nothing is cut.
        crossing = m["boundary"]
        assert 0 < crossing["messages"] <= num_microbatches
        assert crossing["feature_tokens"] > 0 == crossing["cut_samples"]
        assert (m["giants"], m["was_stopped"]) == ([], False)
        assert busy + idle <= num_ranks * m["step_ns"]
        llm = schedule["schedule"]["llm"]
        placed = [s for microbatch in llm for replica in microbatch for s in replica]
        assert sorted(placed) == sorted(schedule["samples"])
        assert m["samples"] == len(placed)
        assert m["predicted_ns"] > 0
        assert m["tokens"] > 0
        assert 0 < m["grad_norm"] < 1e3
    check_documented(out)
    return metrics, schedules


FILES_PAGE = Path(__file__).parents[2] / "docs/files.md"


def check_documented(out):
    """The page of files names every field of the metrics and of the checkpoints in `out`."""
    page = FILES_PAGE.read_text()
    of_metrics = page.partition("### `metrics.jsonl`: one line a step\n")[2].partition("\n### ")[0]
    found = {name for line in lines(out / "metrics.jsonl") for name in line}
    assert not [name for name in found if f"`{name}`" not in of_metrics]
    of_checkpoints = page.partition("`checkpoint.json` has ")[2].partition("\n\n")[0]
    for path in out.glob("checkpoints/*/checkpoint.json"):
        assert not [name for name in json.loads(path.read_text()) if f"`{name}`" not in of_checkpoints]
