"""Checkpoints of rehearsals: a rank that dies at night, Ctrl-C, other ranks the next day; never taken for training's."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import threading
import time

import pytest
import torch.utils.tensorboard  # noqa: F401  (imported once, for all forked ranks)
from demo_run import ENVIRONMENT, lines, request, run_training, write_demo
from ranks import results
from toy_run import write_plan

import warm
from dflop import ProfileError
from dflop._native import GlobalBatches
from dflop._native.testing import load_config
from dflop.runtime.export import export
from dflop.runtime.failure import RankError
from dflop.runtime.rehearse import summary
from dflop.runtime.resume import MANIFEST, find, step_dir

NUM_SAMPLES, BATCH, MICROBATCHES = 20, 8, 4
"""An epoch is three steps, of 8, 8 and 4 samples."""
EVERY, SPEED = 2, 20.0
LEARNED = 12
"""Steps from which the usual time of a component is learned (`crates/step/src/adapt/watch.rs`)."""
JOURNALS = ("metrics", "trace", "schedules")


@pytest.fixture(scope="module")
def demo(tmp_path_factory):
    """Data, profiles and a plan of two ranks, with a checkpoint every second step."""
    demo = write_demo(tmp_path_factory.mktemp("rehearsed") / "demo", NUM_SAMPLES, BATCH, MICROBATCHES)
    config = demo / "dflop.yaml"
    config.write_text(config.read_text() + f"checkpoint:\n  every: {EVERY}\n  keep: 10\n")
    return demo


def rehearsal(demo, out, steps, kill=None, **changes):
    """What the command line would ask for."""
    wanted = {"speed": SPEED, "slow_ranks": [], "slow_shapes": None, "network_latency_ns": 0, "kill": kill}
    return request(demo, out, **{"steps": steps, "rehearsal": wanted, **changes})


@pytest.fixture(scope="module")
def whole(demo, tmp_path_factory):
    """A rehearsal of four steps that nothing stopped; nothing else may write there."""
    directory = tmp_path_factory.mktemp("whole")
    asked = rehearsal(demo, directory / "rehearsal", 4)
    assert results(run_training(asked, directory)) == [0, 0]
    return directory / "rehearsal"


def manifest(out, step):
    return json.loads((step_dir(out, step) / MANIFEST).read_bytes())


def check_each_step_once(out, num_steps):
    """Every journal has each step once, in order, with the global batch that seed and data decide."""
    for name in JOURNALS:
        assert [line["step"] for line in lines(out / f"{name}.jsonl")] == list(range(num_steps)), name
    batches = GlobalBatches(NUM_SAMPLES, BATCH, 0)
    taken = [line["samples"] for line in lines(out / "schedules.jsonl")]
    assert taken == [batches.batch(step) for step in range(num_steps)]
    # The same without dflop's own answer: an epoch has every sample once, whatever was in between.
    for first in range(0, num_steps - 2, 3):
        of_epoch = [sample for samples in taken[first : first + 3] for sample in samples]
        assert sorted(of_epoch) == list(range(NUM_SAMPLES))


def test_a_checkpoint_says_what_training_would(demo, whole):
    """Every second step and the end; the place in the data, what was learned, and that nothing was computed."""
    assert sorted(path.name for path in (whole / "checkpoints").iterdir()) == ["step-2", "step-4"]
    found = manifest(whole, 4)
    assert found["is_rehearsed"] is True
    assert found["step"] == 4
    assert found["made_from"] == {"plan": "a hash", "data_profile": "another"}
    assert found["place"]["num_samples"] == NUM_SAMPLES
    assert found["place"]["global_batch_size"] == BATCH
    assert found["num_ranks"] == 2
    assert [len(clock["first"]) for clock in found["watch"]["clocks"]] == [4, 4]
    # A file of each rank, which has no tensors but its random state.
    assert sorted(found["files"]) == [".metadata", "__0_0.distcp", "__1_0.distcp"]


@pytest.mark.more
@pytest.mark.timeout(1800)
def test_a_rank_dies_at_night(demo, tmp_path):
    """The command with torchrun: rank 1 dies once, in step 5 of 7; all go on from a checkpoint, and it ends well."""
    out = tmp_path / "rehearsal"
    flags = ["--steps", "7", "--speed", str(SPEED), "--kill", "1:5", "--max-restarts", "1", "--json"]
    done = warm.run(["-m", "dflop", "rehearse", *flags, "--out", str(out)], demo, ENVIRONMENT)
    assert done.returncode == 0, done.stderr
    assert done.stderr.count("rehearse: rank 1 is killed in step 5, as --kill asks") == 1
    causes = [line for line in done.stderr.splitlines() if line.startswith("error: ")]
    assert causes == ["error: rank 1 was killed by SIGKILL"]
    # Nobody has to look for a reason.
    assert "dmesg" not in done.stderr
    (went_on,) = re.findall(r"restart 1 of 1: the ranks go on from step (\d+)\n", done.stderr)
    # The save of step 4 waits for that of step 2, and the kill may come before its own end.
    assert int(went_on) in (2, 4)
    check_each_step_once(out, 7)
    for name in JOURNALS:
        undone = lines(out / f"{name}.undone.jsonl") if int(went_on) < 5 else []
        assert [line["step"] for line in undone] == list(range(int(went_on), 5)), name
    firsts = [line["step"] for line in lines(out / "metrics.jsonl") if line["is_first"]]
    assert firsts == [0, int(went_on)]
    assert manifest(out, 7)["step"] == 7
    # Both first steps are left out.
    found = json.loads(done.stdout)
    assert (found["ranks"], found["steps"]) == (2, 5)


def test_more_ranks_go_on_with_the_next_batch(demo, whole, tmp_path):
    """From step 2, on four ranks and over the end of the epoch: every sample once an epoch, the rest undone."""
    out = tmp_path / "rehearsal"
    shutil.copytree(whole, out)
    path = tmp_path / "plan.json"
    plan = write_plan(path, 2, 2, 1, MICROBATCHES, global_batch_size=BATCH)
    asked = {"plan": str(path), "num_ranks": plan.num_ranks, "resume": str(step_dir(out, 2))}
    asked["made_from"] = {"plan": "of more ranks", "data_profile": "another"}
    ranks = run_training(rehearsal(demo, out, 7, **asked), tmp_path)
    assert results(ranks) == [0] * 4
    assert "going on from" in ranks[0].stderr
    check_each_step_once(out, 7)
    assert [line["step"] for line in lines(out / "schedules.undone.jsonl")] == [2, 3]
    assert {line["made_from"]["plan"] for line in lines(out / "schedules.jsonl")[2:]} == {"of more ranks"}
    assert manifest(out, 7)["num_ranks"] == 4
    # The steps of the plan that came last, without the one in which its ranks connect.
    found = summary(out)
    assert (found["ranks"], found["steps"]) == (4, 4)


def test_ctrl_c_saves_and_the_rehearsal_goes_on(demo, tmp_path):
    """A signal to one rank ends all after the same step; on the same plan nothing is lost and nothing learned anew."""
    out = tmp_path / "rehearsal"

    def interrupt_soon():
        while not (out / "metrics.jsonl").exists() or len(lines(out / "metrics.jsonl")) < 3:
            time.sleep(0.001)
        os.kill(os.getpid(), signal.SIGINT)

    def before(index):
        if index == 0:
            threading.Thread(target=interrupt_soon, daemon=True).start()

    ranks = run_training(rehearsal(demo, out, 100_000), tmp_path / "1", before)
    assert [rank.result for rank in ranks] == [130, 130], [rank.stderr for rank in ranks]
    assert not re.search("loss [0-9]", ranks[0].stderr), "a rehearsal computes none"
    num_steps = len(lines(out / "metrics.jsonl"))
    said = f"interrupted after {num_steps} steps; metrics are in {out}\n"
    assert f"{said}hint: go on from step {num_steps} with `dflop rehearse --resume auto`\n" in ranks[0].stderr
    before_it = manifest(out, num_steps)
    again = rehearsal(demo, out, num_steps + 2, resume="auto")
    assert results(run_training(again, tmp_path / "2")) == [0, 0]
    check_each_step_once(out, num_steps + 2)
    assert not (out / "metrics.undone.jsonl").exists()
    after = manifest(out, num_steps + 2)
    # What is usual is learned from the first steps, here of both starts together.
    learned = [len(clock["first"]) for clock in before_it["watch"]["clocks"]]
    assert learned == [min(num_steps, LEARNED)] * 2
    most = min(num_steps + 2, LEARNED)
    assert [len(clock["first"]) for clock in after["watch"]["clocks"]] == [most] * 2
    # Nothing is left to do, and a step that is over cannot be one to die in.
    idle = run_training(again, tmp_path / "3")
    assert results(idle) == [0, 0]
    assert f"nothing is left: {num_steps + 2} steps are done, `--steps` is {num_steps + 2}" in idle[0].stderr
    late = rehearsal(demo, out, num_steps + 4, {"rank": 1, "step": 1}, resume="auto")
    refused = run_training(late, tmp_path / "4")
    assert [rank.result for rank in refused] == [1, 1]
    goes_on = f"`--kill` names step 1, the rehearsal goes on from step {num_steps + 2}"
    assert goes_on in refused[0].stderr
    assert refused[1].stderr.count("error") == 0
    check_each_step_once(out, num_steps + 2)


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        (
            {"made_from": {"plan": "a hash", "data_profile": "new"}},
            "`data_profile` another, this run has new",
        ),
        ({"seed": 5}, "`seed` 0, this run has 5"),
    ],
)
def test_other_samples_are_refused(changes, told, demo, whole, tmp_path):
    """As training refuses them: by all ranks, before anything is written."""
    out = tmp_path / "rehearsal"
    shutil.copytree(whole, out)
    config = load_config(str(demo / "dflop.yaml"))
    config["train"]["seed"] = changes.pop("seed", 0)
    ranks = run_training(rehearsal(demo, out, 6, resume="auto", config=config, **changes), tmp_path)
    assert [rank.result for rank in ranks] == [1, 1]
    assert f"has {told}: other samples would come next" in ranks[0].stderr
    assert (out / "metrics.jsonl").read_bytes() == (whole / "metrics.jsonl").read_bytes()


def test_training_refuses_a_rehearsal(demo, whole, tmp_path):
    """Named, and found by `auto`; without a checkpoint too, as its steps would become undone steps of training."""
    named = run_training(request(demo, tmp_path / "run", resume=str(whole)), tmp_path / "1")
    assert [rank.result for rank in named] == [1, 1]
    said = named[0].stderr
    assert f"`{step_dir(whole, 4)}` is of a rehearsal, which has no weights: training cannot go on" in said
    assert "hint: name a checkpoint of `dflop train`, or train in another directory with `--out`" in said
    # It was made, and locked.
    assert list((tmp_path / "run").iterdir()) == []
    place = manifest(whole, 4)["place"]
    assert find("auto", whole, place, is_rehearsed=True).step == 4
    with pytest.raises(RankError, match="is of a rehearsal"):
        find("auto", whole, place)
    out = tmp_path / "early"
    shutil.copytree(whole, out, ignore=shutil.ignore_patterns("checkpoints"))
    with pytest.raises(RankError, match="`.*early` holds a rehearsal, which has no weights"):
        find("auto", out, place)
    assert find("auto", out, place, is_rehearsed=True).path is None
    asked = {"run": str(whole), "out": str(tmp_path / "model"), "step": None, "dtype": None}
    with pytest.raises(ProfileError, match="step-4` is of a rehearsal, which has no weights"):
        export(asked | {"shard_bytes_max": 1 << 30, "adapter": False})
    assert not (tmp_path / "model").exists()


@pytest.mark.parametrize("is_old", [False, True])
def test_a_rehearsal_refuses_training(is_old, whole, tmp_path):
    """A checkpoint that training wrote says so; one of an earlier version says nothing, and was training's."""
    out = tmp_path / "run"
    shutil.copytree(whole, out)
    about = manifest(out, 4)
    del about["is_rehearsed"]
    about |= {} if is_old else {"is_rehearsed": False}
    (step_dir(out, 4) / MANIFEST).write_text(json.dumps(about))
    with pytest.raises(RankError, match="step-4` is of training: a rehearsal cannot go on from it") as caught:
        find("auto", out, about["place"], is_rehearsed=True)
    hint = "name a checkpoint of `dflop rehearse`, or rehearse in another directory with `--out`"
    assert caught.value.__notes__ == [hint]
    assert find("auto", out, about["place"]).step == 4


def test_nobody_rehearsed_has_no_numbers(tmp_path):
    """A new directory, and a checkpoint that has all steps already."""
    found = summary(tmp_path)
    assert found.pop("steps") == 0
    assert set(found.values()) == {None}
