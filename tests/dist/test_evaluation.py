"""Evaluation: its loss equals that of one process on the held-out samples, and training is not affected by it."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal

import pytest
import torch.utils.tensorboard  # noqa: F401  (imported once, for all forked ranks)
from demo_run import lines, python, request, run_training, write_demo
from ranks import results
from test_training import SEED, Oracle, check_groups, layout_of

from dflop._native import Dataset
from dflop._native.testing import load_config
from dflop.runtime import trainer  # noqa: F401
from dflop.runtime.evaluate import Evaluation, HeldOut

NUM_SAMPLES, BATCH, MICROBATCHES = 16, 8, 4


@pytest.fixture(scope="module")
def demo(tmp_path_factory):
    """Demo data, and as many other samples that are held out."""
    directory = tmp_path_factory.mktemp("demo") / "demo"
    write_demo(directory, NUM_SAMPLES, BATCH, MICROBATCHES)
    other = tmp_path_factory.mktemp("other")
    python(["-m", "dflop", "demo-data", str(other), "--samples", "10", "--seed", "9"], other)
    shutil.copytree(other / "data", directory / "held_out")
    (mixture,) = (directory / "held_out").glob("*.yaml")
    with (directory / "dflop.yaml").open("a") as config:
        config.write(f"\nevaluation:\n  mixture: held_out/{mixture.name}\n  every: 2\n")
    python(["-m", "dflop", "profile", "data", "--evaluation"], directory)
    return directory


def asked(demo, out, tmp_path, layout, evaluation=None, **train):
    """A request that evaluates."""
    config = load_config(str(demo / "dflop.yaml"))
    config["train"] |= {"seed": SEED, "learning_rate": 1e-3, **train}
    config["evaluation"] |= evaluation or {}
    return request(
        demo,
        out,
        **layout_of(demo, tmp_path, layout),
        config=config,
        evaluation_profile=None if evaluation is None else str(demo / "evaluation_profile.parquet"),
    )


class HeldOutOracle(Oracle):
    """Hugging Face's model on the samples that are held out."""

    @staticmethod
    def dataset_of(demo):
        """Those of `evaluation.mixture`."""
        profile = str(demo / "evaluation_profile.parquet")
        return Dataset(str(demo / "dflop.yaml"), profile, evaluation=True)


# One replica of one stage, and replicas that cut nothing, are parts of the others.
COVERED = [pytest.param(layout, marks=pytest.mark.layouts) for layout in ((1, 1, 1), (2, 0))]


@pytest.mark.some(1)
@pytest.mark.parametrize(
    "layout", [*COVERED, (2, 2, 1), (1, 1, 2), (2, 1), (2, 3), (1, 1, 1, {"encoder_tp": 2})], ids=str
)
def test_the_loss_is_that_of_one_process(layout, demo, tmp_path):
    """Without a learning rate the model is the one that was drawn. Two evaluations, equal; nothing of them in the steps."""
    wanted = asked(demo, tmp_path / "run", tmp_path, layout, {"every": 1}, learning_rate=0.0) | {"steps": 2}
    assert set(results(run_training(wanted, tmp_path))) == {0}
    first, second = lines(tmp_path / "run/evaluations.jsonl")
    assert (first["step"], second["step"]) == (0, 1)
    assert first["loss"] == second["loss"]
    assert first["loss_by"] == second["loss_by"]
    oracle = HeldOutOracle(demo, tmp_path / "pretrained")
    every = list(range(len(oracle.dataset)))
    assert first["samples"] == len(every)
    assert first["label_tokens"] == sum(oracle.dataset.shape(index)[2] for index in every)
    assert first["loss"] == pytest.approx(oracle.backward(every), rel=1e-5)
    check_groups(first["loss_by"], oracle, every)
    assert first["bad"] == []


@pytest.mark.more
@pytest.mark.parametrize(
    "layout", [(1, 1, 1), (2, 3), pytest.param((2, 1), marks=pytest.mark.layouts)], ids=str
)
def test_the_training_goes_on_as_without(layout, demo, tmp_path):
    """Bit by bit; three steps, evaluated after the second and at the end, and the model learns what it is shown."""
    with_it = asked(demo, tmp_path / "with", tmp_path, layout, {"samples": 5})
    without = asked(demo, tmp_path / "without", tmp_path, layout)
    for wanted in (with_it, without):
        assert set(results(run_training(wanted, tmp_path))) == {0}
    kept = [
        [(m["loss"], m["grad_norm"]) for m in lines(tmp_path / name / "metrics.jsonl")]
        for name in ("with", "without")
    ]
    assert kept[0] == kept[1]
    found = lines(tmp_path / "with/evaluations.jsonl")
    assert [one["step"] for one in found] == [1, 2]
    assert found[0]["samples"] == 5
    assert found[1]["loss"] != found[0]["loss"]
    assert not (tmp_path / "without/evaluations.jsonl").exists()
    clocks = [m["clock_ns"]["evaluation"] > 0 for m in lines(tmp_path / "with/metrics.jsonl")]
    assert clocks == [False, False, True]


def test_an_evaluation_that_meets_a_bad_sample_loses_nothing_that_was_trained(demo, tmp_path):
    """Under `fail`: the step is saved, and once the file is whole again the evaluation comes first."""
    copy = tmp_path / "demo"
    shutil.copytree(demo, copy)
    picture = min((copy / "held_out").rglob("*.jpg"))
    whole = picture.read_bytes()
    picture.write_bytes(whole[: len(whole) // 2])
    python(["-m", "dflop", "profile", "data", "--evaluation"], copy)
    wanted = asked(copy, tmp_path / "run", tmp_path, (1, 1, 1), {"every": 1}) | {"steps": 2}
    ranks = run_training(wanted, tmp_path)
    assert [rank.result for rank in ranks] == [1, 1]
    assert re.search(r"step 0: evaluation: sample `.*` \(\d+\): cannot decode `.*`", ranks[0].stderr)
    assert [path.name for path in (tmp_path / "run/checkpoints").glob("step-*")] == ["step-1"]
    picture.write_bytes(whole)
    python(["-m", "dflop", "profile", "data", "--evaluation"], copy)
    assert set(results(run_training(wanted | {"resume": "auto"}, tmp_path / "again"))) == {0}
    assert [one["step"] for one in lines(tmp_path / "run/evaluations.jsonl")] == [0, 1]
    assert [one["step"] for one in lines(tmp_path / "run/metrics.jsonl")] == [0, 1]


def test_what_is_evaluated_needs_no_label(demo, tmp_path):
    """Nothing is learned from it: a batch of answers without loss ended the run."""
    copy = tmp_path / "demo"
    shutil.copytree(demo, copy)
    says = ({"from": "human", "value": "hello"}, {"from": "gpt", "value": "a word", "loss": False})
    (copy / "held_out/silent.jsonl").write_text(json.dumps({"id": "silent", "conversations": says}) + "\n")
    (copy / "held_out/silent.yaml").write_text("datasets:\n  - path: silent.jsonl\n")
    config = copy / "dflop.yaml"
    config.write_text(re.sub(r"held_out/.*\.yaml", "held_out/silent.yaml", config.read_text()))
    python(["-m", "dflop", "profile", "data", "--evaluation"], copy)
    wanted = asked(copy, tmp_path / "run", tmp_path, (1, 1, 1), {"every": 1}) | {"steps": 1}
    assert set(results(run_training(wanted, tmp_path))) == {0}
    (one,) = lines(tmp_path / "run/evaluations.jsonl")
    assert (one["loss"], one["label_tokens"], one["samples"]) == (0.0, 0, 1)


@pytest.mark.more
def test_an_evaluation_that_a_signal_cut_off_comes_first_when_the_run_goes_on(demo, tmp_path):
    """Between two of its batches; the run then has the evaluations, each once, that it has without the signal."""

    def request_of(out, **more):
        return asked(demo, tmp_path / out, tmp_path, (1, 1, 1), {"every": 1}) | more

    def before(index):
        if index == 1:
            forward = Evaluation._forward

            def stopping(self, turn, step, *more):
                os.kill(os.getpid(), signal.SIGTERM)
                return forward(self, turn, step, *more)

            Evaluation._forward = stopping

    assert set(results(run_training(request_of("whole", steps=2), tmp_path / "0"))) == {0}
    ranks = run_training(request_of("run", steps=2), tmp_path / "1", before)
    assert [rank.result for rank in ranks] == [143, 143]
    assert not (tmp_path / "run/evaluations.jsonl").exists()
    for steps in (2, 3):
        wanted = request_of("run", steps=steps, resume="auto")
        assert set(results(run_training(wanted, tmp_path / str(steps)))) == {0}
    expected, found = (
        [(e["step"], e["loss"]) for e in lines(tmp_path / run / "evaluations.jsonl")]
        for run in ("whole", "run")
    )
    assert found[:2] == expected
    assert [step for step, _ in found] == [0, 1, 2]


def test_samples_are_drawn_once_and_each_is_in_one_batch():
    held_out = HeldOut(100, 20, 8, seed=4)
    batches = [held_out.batch(k) for k in range(held_out.num_batches)]
    assert [len(batch) for batch in batches] == [8, 8, 4]
    drawn = [sample for batch in batches for sample in batch]
    assert len(set(drawn)) == 20
    assert drawn == HeldOut(100, 20, 5, seed=4).samples
    assert drawn != HeldOut(100, 20, 8, seed=5).samples
    assert HeldOut(7, None, 8, seed=4).samples == list(range(7))
    assert HeldOut(7, 50, 8, seed=4).samples == list(range(7))
