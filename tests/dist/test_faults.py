"""Real processes that die, hang or find no room: what is lost is trained again, and each error names its cause."""

from __future__ import annotations

import copy
import json
import os
import re
import resource
import shutil
import signal
import time
from pathlib import Path

import pytest
import torch.utils.tensorboard  # noqa: F401  (imported once, for all forked ranks)
from demo_run import lines, request, run_training, write_demo
from test_resume import config, trained

from dflop._native import GlobalBatches
from dflop.runtime import checkpoint, executor, gradients, trainer
from dflop.runtime import rank as rank_process
from dflop.runtime.failure import RankError
from dflop.runtime.resume import MANIFEST, find, step_dir

NUM_SAMPLES, BATCH, MICROBATCHES = 20, 8, 4
RANKS = 2


@pytest.fixture(scope="module")
def demo(tmp_path_factory):
    """20 samples: an epoch of global batches of 8, 8 and 4."""
    return write_demo(tmp_path_factory.mktemp("demo"), NUM_SAMPLES, BATCH, MICROBATCHES)


def dying(owner, method, countdown, rank):
    """Has one rank kill itself, as `kill -9` would, at its n-th call of a method."""

    def before(index):
        if index != rank:
            return
        whole, left = getattr(owner, method), iter(range(countdown - 1, -1, -1))

        def die(*arguments):
            if next(left) == 0:
                os.kill(os.getpid(), signal.SIGKILL)
            return whole(*arguments)

        setattr(owner, method, die)

    return before


def expected_batches(demo, num_steps):
    """The global batches that a run trains, from seed and number of samples alone."""
    seed = config(demo)["train"]["seed"]
    batches = GlobalBatches(NUM_SAMPLES, BATCH, seed)
    return [batches.batch(step) for step in range(num_steps)]


# An action is a forward or a backward of one of four microbatches, so eight a step.
KILLS = [
    dying(executor.Executor, "_run", 2 * 8 + 1, 0),
    dying(checkpoint.Saver, "_commit", 1, 1),
    dying(executor.Executor, "_run", 8 + 7, 1),
    dying(gradients.Gradients, "reduce", 2, 1),
]
"""In the forward of step 2, in the first save after that, in a backward, in a reduction."""


@pytest.mark.more
def test_a_run_that_is_killed_again_and_again_trains_each_sample_once(demo, tmp_path):
    """`kill -9` in forward, save, backward and reduction, then `--resume auto` to the end: two epochs."""
    out, num_steps = tmp_path / "run", 6
    asked = request(demo, out, steps=num_steps, config=config(demo, every=1), resume="auto")
    for turn, before in enumerate([*KILLS, None]):
        ranks = run_training(asked, tmp_path / str(turn), before)
        is_killed = [rank.status == -signal.SIGKILL for rank in ranks]
        assert sum(is_killed) == (before is not None), [rank.stderr for rank in ranks]
        if before is not None:
            # The other finds its connection closed, and names who has gone.
            (other,) = (rank for rank in ranks if rank.status != -signal.SIGKILL)
            assert other.result == 1
            assert "error: " in other.stderr
    assert trained(out) == expected_batches(demo, num_steps)
    epochs = [trained(out)[:3], trained(out)[3:]]
    for epoch in epochs:
        assert sorted(s for batch in epoch for s in batch) == list(range(NUM_SAMPLES))
    assert [m["step"] for m in lines(out / "metrics.jsonl")] == list(range(num_steps))
    assert not list((out / "checkpoints").glob("*.new"))


@pytest.mark.parametrize(
    ("in_step", "first_timeout_s"), [(0, 12.0), pytest.param(1, 1e5, marks=pytest.mark.more)]
)
def test_a_rank_that_hangs_is_named_with_step_and_action(in_step, first_timeout_s, demo, tmp_path):
    """The other gives up at its deadline, that of the first step apart, and says who stands where."""
    given_up = tmp_path / "given up"

    def before(index):
        if index == 0:
            complain = rank_process.complain

            def complaining(*arguments):
                complain(*arguments)
                given_up.touch()

            rank_process.complain = complaining
            return
        run = executor.Executor._run

        def hanging(self, action, *arguments):
            if self.step == in_step and action.letter == "B":
                while not given_up.exists():
                    time.sleep(0.02)
                os._exit(0)
            return run(self, action, *arguments)

        run_step = executor.Executor.run_step

        def counting(self, work, *arguments):
            self.step = work.step
            return run_step(self, work, *arguments)

        executor.Executor._run, executor.Executor.run_step = hanging, counting

    asked = request(demo, tmp_path / "run", timeout_s=5.0, first_timeout_s=first_timeout_s)
    first, _ = run_training(asked, tmp_path / "ranks", before)
    assert first.result == 1
    assert f"error: [encoder dp 0/1] step {in_step}, action 0B" in first.stderr
    assert "no message from rank 1 (llm stage 1, replica 0), it stopped or is too slow" in first.stderr
    assert f"; rank 1 (llm stage 1, replica 0) is at step {in_step}, action 1B" in first.stderr
    # What it had begun, for whoever looks into it.
    flight = json.loads((tmp_path / "run/flight-recorder/rank-0.json").read_text())
    assert any("all_gather" in entry["profiling_name"] for entry in flight["entries"])


def test_a_disk_that_is_full_while_saving_leaves_the_checkpoint_before(demo, tmp_path):
    """As of a file that may not grow: the run ends with the cause, and goes on from what is there."""
    out = tmp_path / "run"

    def before(index):
        save = checkpoint.Saver.save

        def saving(self, step, about):
            if step == 2 and index == 1:
                resource.setrlimit(resource.RLIMIT_FSIZE, (1000, resource.RLIM_INFINITY))
            save(self, step, about)

        checkpoint.Saver.save = saving

    asked = request(demo, out, steps=4, config=config(demo, every=1))
    ranks = run_training(asked, tmp_path / "full", before)
    assert [rank.result for rank in ranks] == [1, 1]
    assert "cannot save `" in ranks[0].stderr
    # Of PyTorch alone: `unexpected pos 704 vs 598`.
    assert "step-2`: a file may have at most 1,000 bytes (`ulimit -f`) (" in ranks[0].stderr
    assert "hint: raise that limit, or make room, then go on from the checkpoint before it" in ranks[0].stderr
    assert sorted(path.name for path in (out / "checkpoints").iterdir()) == ["step-1"]
    run_training({**asked, "resume": "auto"}, tmp_path / "again")
    assert trained(out) == expected_batches(demo, 4)


@pytest.mark.skipif(not Path("/proc/self").exists(), reason="this machine has no file system without room")
def test_a_full_disk_is_named_where_pytorch_does_not(tmp_path):
    """PyTorch says `unexpected pos 704 vs 598`. `/proc` has no bytes free."""
    assert checkpoint._no_room(Path("/proc")) == "the disk is full, 0 bytes are free"
    assert checkpoint._no_room(tmp_path) is None


def test_a_damaged_file_is_refused_by_name_and_the_checkpoint_before_it_offered(demo, tmp_path):
    """One byte of a shard; a missing one; and other samples than the checkpoint's."""
    out = tmp_path / "run"
    asked = request(demo, out, steps=4, config=config(demo, every=2))
    assert {rank.result for rank in run_training(asked, tmp_path / "whole")} == {0}
    shard = out / "checkpoints/step-4/__1_0.distcp"
    whole = shard.read_bytes()
    shard.write_bytes(whole[:500] + bytes([whole[500] ^ 1]) + whole[501:])
    asked |= {"resume": "auto", "steps": 5}
    ranks = run_training(asked, tmp_path / "damaged")
    assert [rank.result for rank in ranks] == [1, 1]
    assert "step-4`: `__1_0.distcp` has another SHA-256 than when it was written" in ranks[0].stderr
    before = out / "checkpoints/step-2"
    assert f"hint: go on from the checkpoint before it: `--resume {before}`" in ranks[0].stderr
    assert ranks[1].stderr == ""
    shard.unlink()
    ranks = run_training(asked, tmp_path / "missing")
    assert "step-4`: `__1_0.distcp` is missing" in ranks[0].stderr
    asked["resume"] = str(before)
    other = copy.deepcopy(asked["config"])
    other["train"]["seed"] = 77
    ranks = run_training({**asked, "config": other}, tmp_path / "other")
    assert "step-2` has `seed` " in ranks[0].stderr
    # What was offered is good, by whatever name; the damaged one is put aside.
    asked["resume"] = str(before.rename(before.with_name("best")))
    assert {rank.result for rank in run_training(asked, tmp_path / "good")} == {0}
    assert trained(out) == expected_batches(demo, 5)
    assert (out / "checkpoints/step-4.undone").is_dir()


@pytest.mark.parametrize(
    ("content", "cause"),
    [
        ("", "Expecting value"),
        ("null", "'NoneType'"),
        ('{"format_version": 1}', "`step` is missing"),
        ('{"format_version": 1, "step": 4, "place": null}', "`place` is None"),
    ],
)
def test_a_damaged_manifest_is_refused_and_the_checkpoint_before_it_offered(content, cause, tmp_path):
    """Not JSON, and JSON that says too little."""
    for step in (2, 4):
        step_dir(tmp_path, step).mkdir(parents=True)
    manifest = step_dir(tmp_path, 4) / MANIFEST
    manifest.write_text(content)
    with pytest.raises(
        RankError, match=re.escape(f"cannot read `{manifest}`, it is damaged: {cause}")
    ) as error:
        find("auto", tmp_path, {})
    before = step_dir(tmp_path, 2)
    assert error.value.__notes__ == [f"go on from the checkpoint before it: `--resume {before}`"]


@pytest.mark.some(1)
@pytest.mark.parametrize(("number", "status"), [(signal.SIGTERM, 143), (signal.SIGUSR1, 138)])
def test_a_signal_to_a_rank_saves(number, status, demo, tmp_path):
    """To one rank alone, as an external torchrun or a cluster sends it; SLURM warns so: both save, and tell it."""
    out = tmp_path / "run"

    def before(index):
        if index == 1:
            step = trainer.Optimizer.step

            def stepping(self, index, *more):
                step(self, index, *more)
                if index == 1:
                    os.kill(os.getpid(), number)

            trainer.Optimizer.step = stepping

    ranks = run_training(request(demo, out, steps=1000), tmp_path / "1", before)
    assert [rank.result for rank in ranks] == [status, status]
    assert "hint: go on from step 2 with `dflop train --resume auto`" in ranks[0].stderr
    assert [path.name for path in (out / "checkpoints").iterdir()] == ["step-2"]
    shutil.rmtree(out / "tensorboard")
    ranks = run_training(request(demo, out, steps=3, resume="auto"), tmp_path / "2")
    assert {rank.result for rank in ranks} == {0}
    assert trained(out) == expected_batches(demo, 3)
    assert Path(out / "checkpoints/step-3").is_dir()
