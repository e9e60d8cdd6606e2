"""The whole of `dflop train` on demo data, in ranks as an external torchrun starts them: what it writes, Ctrl-C, broken files."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import sys
import time
from collections import Counter
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch.utils.tensorboard  # noqa: F401  (this and the trainer: imported once, for all forked ranks)
from demo_run import check_run, lines, request, run_training, write_demo
from ranks import results

import dflop.runtime.trainer  # noqa: F401
from dflop._native import GlobalBatches, profile_shapes
from dflop._native.testing import load_config
from dflop.runtime import agent
from dflop.runtime.launch import launch
from dflop.runtime.schedules import Taken
from dflop.runtime.turns import arms_in_order, log_lines, steps

NUM_SAMPLES, BATCH, MICROBATCHES = 24, 8, 4
RANKS = 2


@pytest.fixture(scope="module")
def demo(tmp_path_factory):
    """Demo data, profiles and a plan of two ranks."""
    return write_demo(tmp_path_factory.mktemp("demo"), NUM_SAMPLES, BATCH, MICROBATCHES)


@pytest.fixture(scope="module")
def plain(demo, tmp_path_factory):
    """A run of five steps as the demo has it, which others are compared with; nothing else may write there."""
    directory = tmp_path_factory.mktemp("plain")
    assert results(run_training(request(demo, directory / "run", steps=5), directory)) == [0, 0]
    return directory / "run"


@pytest.fixture(scope="module")
def compared(demo, tmp_path_factory):
    """A comparison of two arms over two steps and one of warm-up; nothing else may write there."""
    directory = tmp_path_factory.mktemp("compared")
    asked = request(demo, directory / "run", compare=True, warmup_pairs=1, steps=2)
    assert results(run_training(asked, directory)) == [0, 0]
    return directory / "run"


def test_a_run_writes_each_step_and_each_sample_once_an_epoch(plain):
    """Five steps by the environment of torchrun: one epoch of three, and two of the next."""
    out = plain
    metrics, schedules = check_run(out, 5)
    assert [m["epoch"] for m in metrics] == [0, 0, 0, 1, 1]
    assert [m["arm"] for m in metrics] == ["aware"] * 5
    epoch = [s for schedule in schedules[:3] for s in schedule["samples"]]
    assert sorted(epoch) == list(range(NUM_SAMPLES))
    assert schedules[3]["samples"] != schedules[0]["samples"]
    assert metrics[-1]["loss"] < metrics[0]["loss"]
    assert list((out / "tensorboard" / "aware").glob("events.*"))


@pytest.mark.more
def test_giants_wait_for_each_other(demo, tmp_path):
    """One window of three steps: the three largest samples stand in its last batch, and each delay is told."""
    shapes, _ = profile_shapes(str(demo / "data_profile.parquet"))
    tokens = [llm_tokens for *_, llm_tokens in shapes]
    *_, limit, a, b, c = sorted(tokens)
    assert limit < a
    giants = {sample for sample, llm_tokens in enumerate(tokens) if llm_tokens > limit}
    assert len(giants) == 3, (a, b, c)
    config = load_config(str(demo / "dflop.yaml"))
    config["train"] |= {"giants": "defer", "giant_llm_tokens": limit, "giant_steps_max": 2}
    out = tmp_path / "run"
    asked = request(demo, out, steps=3, config=config)
    assert results(run_training(asked, tmp_path)) == [0, 0]
    metrics, schedules = check_run(out, 3)
    batches = [schedule["samples"] for schedule in schedules]
    assert sorted(s for batch in batches for s in batch) == list(range(NUM_SAMPLES))
    assert giants == set(batches[2][-3:])
    plain = GlobalBatches(NUM_SAMPLES, BATCH, config["train"]["seed"])
    came = {sample: step for step in range(3) for sample in plain.batch(step)}
    assert [m["deferred"] for m in metrics[:2]] == [[], []]
    assert {s: 2 - steps for s, steps in metrics[2]["deferred"]} == {
        s: came[s] for s in giants if came[s] < 2
    }
    # A replay says what was deferred then, though giants run alone now.
    again = tmp_path / "again"
    asked = request(demo, again, replay=str(out / "schedules.jsonl"))
    assert results(run_training(asked, tmp_path / "replay")) == [0, 0]
    assert [m["deferred"] for m in lines(again / "metrics.jsonl")] == [m["deferred"] for m in metrics]
    # The demo of the tests corrects nothing.
    assert metrics[0]["corrected_ns"] is None
    assert all(m["corrected_ns"] != m["predicted_ns"] for m in metrics[1:])


def test_a_comparison_trains_both_arms_on_the_same_batches(compared):
    """One warm-up pair is not written; who goes first alternates; both arms get the same samples."""
    metrics, schedules = check_run(compared, 4)
    assert [(m["step"], m["arm"], m["pair"]) for m in metrics] == [
        (1, "aware", 0),
        (1, "blind", 0),
        (2, "blind", 1),
        (2, "aware", 1),
    ]
    for one, two in [(0, 1), (2, 3)]:
        assert schedules[one]["samples"] == schedules[two]["samples"]
    assert schedules[0]["schedule"]["llm"] != schedules[1]["schedule"]["llm"]
    warm_up = [line for line in lines(compared / "schedules.jsonl") if not line["is_recorded"]]
    assert [(line["step"], line["arm"], line["pair"]) for line in warm_up] == [
        (0, "blind", None), (0, "aware", None),
    ]  # fmt: skip


def test_arms_follow_each_other_equally_often():
    """Over n batches (2n where n is odd) each arm stands at each place, and after each other, equally often."""
    for n in range(1, 11):
        arms = [str(arm) for arm in range(n)]
        rounds = [arms_in_order(arms, step) for step in range(2 * n)]
        assert all(sorted(row) == sorted(arms) for row in rounds)
        places = Counter((place, arm) for row in rounds for place, arm in enumerate(row))
        assert set(places.values()) == {2}
        followers = Counter(pair for row in rounds for pair in zip(row, row[1:], strict=False))
        assert len(followers) == n * (n - 1)
        assert set(followers.values()) <= {2}


def test_a_comparison_of_many_arms(demo, tmp_path):
    """Each global batch once with each, in another order each time."""
    out = tmp_path / "run"
    arms = ["blind", "tokens", "aware-ahead"]
    asked = request(demo, out, compare=True, arms=arms, warmup_pairs=0, steps=2)
    assert results(run_training(asked, tmp_path)) == [0, 0]
    metrics, schedules = check_run(out, 6)
    assert [m["arm"] for m in metrics] == arms_in_order(arms, 0) + arms_in_order(arms, 1)
    assert [m["pair"] for m in metrics] == [0] * 3 + [1] * 3
    assert len({tuple(s["samples"]) for s in schedules}) == 2


@pytest.mark.some(1)
@pytest.mark.parametrize("is_comparison", [False, True])
def test_a_replayed_run_is_the_same_bit_by_bit(is_comparison, demo, plain, compared, tmp_path):
    """From the log alone: losses, norms and schedules; the warm-up of a comparison too."""
    first, second = compared if is_comparison else plain, tmp_path / "second"
    # Nothing of it may be computed anew: another way to schedule is asked for, of steps that are not there.
    config = load_config(str(demo / "dflop.yaml"))
    config["train"]["schedule"] = "blind"
    asked = request(demo, second, config=config, replay=str(first / "schedules.jsonl"), steps=10_000)
    assert results(run_training(asked, tmp_path / "2")) == [0, 0]
    assert lines(first / "schedules.jsonl") == lines(second / "schedules.jsonl")
    kept = ("step", "arm", "pair", "loss", "grad_norm", "tokens", "predicted_ns")
    before, after = ([{k: m[k] for k in kept} for m in lines(d / "metrics.jsonl")] for d in (first, second))
    assert before == after
    assert len(after) == (4 if is_comparison else 5)


def test_schedules_are_computed_as_far_ahead_as_asked(demo, plain, tmp_path):
    """Depth 5, more than there are steps: the same run. The end says what schedules were waited for."""
    config = load_config(str(demo / "dflop.yaml"))
    assert config["train"]["prefetch_depth"] < 3
    config["train"]["prefetch_depth"] = 5
    out = tmp_path / "run"
    ranks = run_training(request(demo, out, config=config), tmp_path / "ranks")
    assert results(ranks) == [0, 0]
    metrics, _ = check_run(out, 3)
    (line,) = re.findall(
        r"schedules: waited ([\d.]+) ms in 3 steps, .* \(most: .* ms, step (\d)\)", ranks[0].stderr
    )
    assert float(line[0]) == pytest.approx(sum(m["schedule_wait_ns"] for m in metrics) / 1e6, abs=0.01)
    assert [m["loss"] for m in metrics] == [m["loss"] for m in lines(plain / "metrics.jsonl")[:3]]


@pytest.mark.parametrize("depth", [1, 2, 5, 50])
def test_what_is_asked_for_while_a_step_runs(depth):
    """The schedule of the next step is there, and `depth` are asked for with it, each once, none past the last."""
    num_steps, asked, taken = 9, [], []

    class Asked:
        def submit(self, step, arm):
            asked.append((step, arm))

        def take(self, step, arm):
            assert (step, arm) in asked
            taken.append(step)
            return Taken(None, 0, None, None)

    options = SimpleNamespace(arm="aware", prefetch_depth=depth, steps=num_steps)
    turns = steps(options, Asked(), GlobalBatches(NUM_SAMPLES, BATCH, 0))
    coming = next(turns)
    for step in range(num_steps):
        turn, coming = coming, next(turns, None)
        assert turn.step == step
        assert taken == list(range(min(step + 2, num_steps)))
        assert asked == [(k, "aware") for k in range(min(step + depth + 1, num_steps))]
    assert coming is None


def test_the_arm_does_not_change_what_is_learned(demo, plain, tmp_path):
    """Three steps blind and three aware: losses and gradient norms are equal up to rounding."""
    config = load_config(str(demo / "dflop.yaml"))
    config["train"]["schedule"] = "blind"
    asked = request(demo, tmp_path / "run", config=config)
    assert results(run_training(asked, tmp_path / "ranks")) == [0, 0]
    runs = [lines(out / "metrics.jsonl")[:3] for out in (tmp_path / "run", plain)]
    for blind, aware in zip(*runs, strict=True):
        assert (blind["arm"], aware["arm"]) == ("blind", "aware")
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
    """A picture that broke after it was profiled: told by its bytes, or by the decoder; all stop."""
    copy = tmp_path / "demo"
    shutil.copytree(demo, copy)
    for path in (copy / "data").rglob("*"):
        if path.suffix in (".jpg", ".png", ".webp"):
            # Header and size, which were profiled, stay.
            whole = path.read_bytes()
            path.write_bytes(whole[:200] + bytes(len(whole) - 200))
    ranks = run_training(request(copy, tmp_path / "run"), tmp_path)
    assert [r.result for r in ranks] == [1, 1]
    assert re.search(r"`data.on_changed_media: warn`", ranks[0].stderr)
    # Where changes are only told, the decoder finds it, and the encoder rank names sample and file.
    config = copy / "dflop.yaml"
    config.write_text(config.read_text().replace("\ndata:\n", "\ndata:\n  on_changed_media: warn\n"))
    ranks = run_training(request(copy, tmp_path / "run"), tmp_path)
    assert [r.result for r in ranks] == [1, 1]
    assert re.search(r"\[encoder dp 0/1\] step 0: sample `.*` \(\d+\): cannot decode `.*`", ranks[0].stderr)
    assert "[llm pp 0/1 dp 0/1] step 0: cannot compare digests, another rank stopped" in ranks[1].stderr


def test_bfloat16_trains_on_the_same_way(demo, plain, tmp_path):
    """One step: features, hidden states and gradients cross ranks; the loss is about that of float32."""
    config = load_config(str(demo / "dflop.yaml"))
    assert config["model"]["dtype"] == "float32"
    config["model"]["dtype"] = "bfloat16"
    asked = request(demo, tmp_path / "run", config=config, steps=1)
    assert results(run_training(asked, tmp_path / "ranks")) == [0, 0]
    losses = [lines(out / "metrics.jsonl")[0]["loss"] for out in (tmp_path / "run", plain)]
    assert losses[0] != losses[1]
    assert losses[0] == pytest.approx(losses[1], rel=0.01)


def test_a_line_cut_short_is_not_replayed(tmp_path):
    """What a kill left of the last line; a whole one has its end."""
    log = tmp_path / "schedules.jsonl"
    log.write_text('{"a": 1}\n{"a": 2}\n{"a"')
    assert log_lines(log) == ['{"a": 1}', '{"a": 2}']
    log.write_text("")
    assert log_lines(log) == []


def test_as_many_processes_as_the_plan_has_ranks(demo, tmp_path):
    """Else every rank says so in one line."""
    ranks = run_training(request(demo, tmp_path / "run", 3), tmp_path / "ranks")
    assert [r.result for r in ranks] == [1, 1, 1]
    for rank in ranks:
        assert "3 processes were started, the plan needs 2" in rank.stderr
        assert "Traceback" not in rank.stderr


def run_agent(command, environment, what, handles=()):
    """As `run_child` runs `python -m dflop.runtime.agent ...`, in a fork: torch is imported here already."""
    child = os.fork()
    if child == 0:
        status = 1
        try:
            os.environ.clear()
            os.environ.update(environment)
            sys.argv = command[2:]
            status = agent.main()
        finally:
            sys.stderr.flush()
            os._exit(status)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), None


def test_what_cannot_be_trained_is_refused_before_a_rank_starts(demo, tmp_path, capfd, monkeypatch):
    """A family without an adapter, a directory that is a file, and GPUs that are not there; each has a hint."""
    (tmp_path / "config.json").write_text('{"model_type": "internvl_chat"}')
    config = load_config(str(demo / "dflop.yaml"))
    config["model"]["dir"] = str(tmp_path)
    with pytest.raises(ValueError, match="is of model family `internvl_chat`, known are ") as caught:
        launch(request(demo, tmp_path / "run", config=config))
    assert "other families can be profiled" in caught.value.__notes__[0]
    assert not (tmp_path / "run").exists()
    for taken in (Path("/dev/full"), demo / "dflop.yaml"):
        with pytest.raises(OSError, match=f"`{taken}`: it is no directory, the run must be") as caught:
            launch(request(demo, taken))
        assert "--out" in caught.value.__notes__[0]
    capfd.readouterr()
    shutil.copytree(demo / "model", tmp_path / "model")
    path = tmp_path / "model/config.json"
    path.write_text(
        path.read_text().replace('"vision_config": {', '"vision_config": {"attention_dropout": 0.1,')
    )
    config["model"]["dir"] = str(tmp_path / "model")
    with pytest.raises(
        ValueError, match=r"`vision_config.attention_dropout` is 0.1, must be 0: what is dropped"
    ):
        launch(request(demo, tmp_path / "run", config=config))
    config["model"]["dir"], config["cluster"]["device"] = str(demo / "model"), "cuda"
    profile = json.loads((demo / "model_profile.json").read_text()) | {"is_estimated": True}
    (tmp_path / "estimated.json").write_text(json.dumps(profile))
    changes = {"config": config, "model_profile": str(tmp_path / "estimated.json")}
    hidden = {"CUDA_VISIBLE_DEVICES": ""}
    asked = request(demo, tmp_path / "run", **changes, environment=hidden)
    monkeypatch.setattr("dflop.runtime.launch.run_child", run_agent)
    assert launch(asked) == 2
    assert capfd.readouterr().err == (
        "note: the model profile is estimated: steps will take other times than predicted\n"
        "train: starting 2 ranks\n"
        "error: `cluster.device` is cuda, 2 ranks need a GPU each: PyTorch finds none on this machine\n"
        "\nhint: look at `nvidia-smi`, or set `cluster.device` to cpu, then measure the model and plan again\n"
    )


def test_a_gradient_that_is_no_number_is_skipped_and_then_told_once(demo, tmp_path):
    """All ranks find it at the same place, skip two steps of it, and the first says so, with a hint."""

    def before(index):
        gradients = dflop.runtime.gradients.Gradients
        reduce = gradients.reduce

        def spoilt(self):
            reduce(self)
            for flat in self._flats:
                flat.gradients.fill_(float("nan"))

        gradients.reduce = spoilt

    out = tmp_path / "run"
    ranks = run_training(request(demo, out, steps=9), tmp_path / "ranks", before)
    assert [rank.result for rank in ranks] == [1, 1]
    assert (
        "error: [all ranks] step 2: the norm of the gradients is nan, must be finite; as many steps before it "
        "were skipped for that (`train.skipped_steps_max` is 2)\nhint: lower"
    ) in ranks[0].stderr
    assert ranks[1].stderr == ""
    # Two of it are written and say so; in JSON that others read.
    metrics = [json.loads(line, parse_constant=pytest.fail) for line in (out / "metrics.jsonl").open()]
    assert [(m["was_skipped"], m["grad_norm"]) for m in metrics] == [(True, None)] * 2
