"""Checkpoints: a run that goes on is the run that was not stopped, on the same ranks and on others."""

from __future__ import annotations

import json
import shutil
import time

import pytest
import torch
import torch.distributed.checkpoint as dcp
import torch.utils.tensorboard  # noqa: F401  (imported once, for all forked ranks)
from demo_run import lines, request, run_training, write_demo
from toy_run import write_colocated, write_plan

from dflop._native import profile_shapes
from dflop._native.testing import load_config
from dflop.runtime import trainer

NUM_SAMPLES, BATCH, MICROBATCHES, STEPS = 20, 8, 4, 5


@pytest.fixture(scope="module")
def demo(tmp_path_factory):
    """20 samples: an epoch of global batches of 8, 8 and 4."""
    return write_demo(tmp_path_factory.mktemp("demo"), NUM_SAMPLES, BATCH, MICROBATCHES)


def config(demo, every=2, keep=10, **train):
    """The configuration with checkpoints, and other fields of `train`."""
    read = load_config(str(demo / "dflop.yaml"))
    read["train"] |= {"learning_rate": 1e-3, "weight_decay": 0.1, "max_grad_norm": 0.5, **train}
    read["checkpoint"] = {"every": every, "keep": keep}
    return read


def run(demo, out, directory, before=None, statuses=(0,), **changes):
    """A run with checkpoints; its ranks."""
    ranks = run_training(
        request(demo, out, **{"config": config(demo), "steps": STEPS, **changes}), directory, before
    )
    assert {rank.result if rank.status == 0 else rank.status for rank in ranks} == set(statuses), [
        rank.stderr for rank in ranks
    ]
    return ranks


def kept(out):
    """What must be the same of each step, whatever happened in between."""
    fields = ("step", "epoch", "loss", "grad_norm", "learning_rates", "tokens")
    return [{field: m[field] for field in fields} for m in lines(out / "metrics.jsonl")]


def trained(out):
    """The samples of each step, as placed by the schedules of a run; each step once, in order."""
    turns = lines(out / "schedules.jsonl")
    assert [turn["step"] for turn in turns] == list(range(len(turns)))
    for turn in turns:
        placed = [s for row in turn["schedule"]["llm"] for replica in row for s in replica]
        assert sorted(placed) == sorted(turn["samples"])
    return [turn["samples"] for turn in turns]


@pytest.fixture(scope="module")
def whole(demo, tmp_path_factory):
    """A run of five steps that nothing stopped; nothing else may write there."""
    directory = tmp_path_factory.mktemp("whole")
    run(demo, directory / "run", directory, config=config(demo, learning_rate_schedule="cosine"))
    return directory / "run"


def tensors(path):
    """All that a checkpoint holds, by name, read in this process alone."""
    held = dcp.FileSystemReader(path).read_metadata().state_dict_metadata
    state = {name: torch.empty(about.size, dtype=about.properties.dtype) for name, about in held.items()}
    dcp.load(state, checkpoint_id=path, no_dist=True)
    return state


def test_the_parts_of_the_clock_add_up(whole):
    """Waits, packing, steps, checkpoints and writing: of each line, and of all lines before it."""
    total = 0
    for m in lines(whole / "metrics.jsonl"):
        end = m["clock_ns"].pop("end")
        total += sum(m["clock_ns"].values())
        assert total == end
        # From the barrier to the end of this rank's step, of which that of all ranks is a little more or less.
        assert m["clock_ns"]["step"] > 0


def test_the_clock_is_the_wall_clock_of_the_run(demo, tmp_path):
    """Held against a watch of its own, from the building of the model to the last that is timed, its last checkpoint."""

    def before(index):
        clock = trainer.Clock

        def note(moment, now):
            (tmp_path / f"{moment} {index}").write_text(str(now))

        # Nothing stands between the two readings: what a busy disk takes for the note counts on both clocks or on none.
        def begun(self):
            now = time.monotonic_ns()
            clock.__init__(self)
            note("begun", now)

        def ended(self):
            totals, now = clock.totals(self), time.monotonic_ns()
            note("ended", now)
            return totals

        trainer.Clock = type("Noted", (clock,), {"__init__": begun, "totals": ended})

    run(demo, tmp_path / "run", tmp_path, before, steps=2)
    begun, ended = (int((tmp_path / f"{moment} 0").read_text()) for moment in ("begun", "ended"))
    totals = json.loads((tmp_path / "run/clock.json").read_text())
    end = totals.pop("end")
    assert sum(totals.values()) == end
    assert totals["evaluation"] == 0
    assert min(totals[part] for part in ("schedule", "pack", "agree", "step", "checkpoint", "write")) > 0
    # Nothing is done in between, whatever else the machine does.
    assert 0.8 * (ended - begun) < end < ended - begun
    metrics = lines(tmp_path / "run/metrics.jsonl")
    for m in metrics:
        work_s = sum(m["clock_ns"][part] for part in ("schedule", "pack", "agree", "step", "write")) / 1e9
        assert m["samples_per_s"] == pytest.approx(m["samples"] / work_s)
        assert m["tokens_per_s"] == pytest.approx(m["tokens"] / work_s)
        # A CPU has no rate that its vendor names: no share of it is made up.
        assert m["mfu"] is None
        assert m["model_flops"] > 0


def test_a_run_goes_on_bit_by_bit(demo, whole, tmp_path):
    """From its checkpoint of step 2: losses, norms, schedules, weights and moments of the steps after it."""
    out = tmp_path / "run"
    shutil.copytree(whole, out)
    for path in (out / "checkpoints").glob("step-[45]"):
        shutil.rmtree(path)
    # As a kill within the write of a line leaves it.
    (out / "metrics.jsonl").open("a").write('{"step": 5, "lo')
    asked = {"config": config(demo, learning_rate_schedule="cosine"), "resume": "auto"}
    ranks = run(demo, out, tmp_path, **asked)
    assert "going on from" in ranks[0].stderr
    assert kept(out) == kept(whole)
    assert lines(out / "schedules.jsonl") == lines(whole / "schedules.jsonl")
    undone = (out / "metrics.undone.jsonl").read_text().splitlines()
    assert [json.loads(line)["step"] for line in undone[:-1]] == [2, 3, 4]
    ends = [tensors(where / "checkpoints/step-5") for where in (out, whole)]
    assert set(ends[0]) == set(ends[1])
    for name, tensor in ends[0].items():
        assert torch.equal(tensor, ends[1][name]), name
    # Asked for again, there is nothing to do, and the run says so.
    again = run(demo, out, tmp_path, **asked)
    assert "nothing to train: the run has 5 steps, and 5 are asked for" in again[0].stderr
    assert lines(out / "schedules.jsonl") == lines(whole / "schedules.jsonl")
    assert float(ends[0]["optimizer.lm_head.weight.step"]) == STEPS
    # Nothing is left to do.
    run(demo, out, tmp_path / "again", **asked)
    assert kept(out) == kept(whole)


@pytest.mark.parametrize("is_text", [False, True])
def test_what_was_watched_goes_on(is_text, demo, whole, tmp_path):
    """A run that goes on neither learns anew what is usual nor raises an alarm twice: its checkpoints say so.

    Checkpoints of earlier versions hold what was watched as JSON text.
    """
    out = tmp_path / "run"

    def manifest_of(run, step):
        return run / "checkpoints" / f"step-{step}" / "checkpoint.json"

    shutil.copytree(whole, out)
    for step in (4, 5):
        shutil.rmtree(out / f"checkpoints/step-{step}")
    if is_text:
        path = manifest_of(out, 2)
        about = json.loads(path.read_bytes())
        path.write_text(json.dumps(about | {"watch": json.dumps(about["watch"])}))
    run(demo, out, tmp_path, config=config(demo, learning_rate_schedule="cosine"), resume="auto", steps=4)
    ours, theirs = (json.loads(manifest_of(where, 4).read_bytes()) for where in (out, whole))
    assert ours["population"] == theirs["population"]
    assert any(side["num_steps"] > 2 for sides in ours["population"].values() for side in sides.values())
    for found in (ours, theirs):
        # Steps of which the usual time of a component is learned, before and after the checkpoint of step 2.
        assert [len(clock["first"]) for clock in found["watch"]["clocks"]] == [4, 4]
        assert found["adaptation"]["mode"] == "off"


@pytest.fixture(scope="module")
def deferring(demo, tmp_path_factory):
    """What is asked of a run that defers giants, and its directory; nothing else may write there."""
    shapes, _ = profile_shapes(str(demo / "data_profile.parquet"))
    limit = sorted(llm_tokens for *_, llm_tokens in shapes)[-5]
    giants = {"giants": "defer", "giant_llm_tokens": limit, "giant_steps_max": 2}
    asked = {"config": config(demo, **giants)}
    directory = tmp_path_factory.mktemp("deferring")
    run(demo, directory / "run", directory, **asked)
    assert any(m["deferred"] for m in lines(directory / "run/metrics.jsonl")[2:])
    return asked, directory / "run"


@pytest.mark.some(1, 4)
@pytest.mark.parametrize(
    "layout", [(2, 2, 1), (1, 1, 2), (2, 2), (3, 3), (1, 1, {"llm_tp": 2}), (2, 3, {"llm_tp": 2})], ids=str
)
def test_another_layout_goes_on_with_the_same_samples(layout, demo, deferring, tmp_path):
    """Other replicas, or another cut of the LLM: the samples that come next, and what they teach, are the same.

    Both components on each rank too: (replicas, zero), with states, and parameters, cut among them; whole encoders
    on ranks that cut the LLM. Deferred giants wait for the step that they would have waited for.
    """
    asked, first = deferring
    second = tmp_path / "second"
    path = tmp_path / "plan.json"
    if len(layout) == 2 or isinstance(layout[2], dict):
        dp, zero, degrees = (*layout, {})[:3]
        plan = write_colocated(path, dp, MICROBATCHES, zero=zero, global_batch_size=BATCH, **degrees)
    else:
        plan = write_plan(path, *layout, MICROBATCHES, global_batch_size=BATCH)
    asked = asked | {"plan": str(path), "num_ranks": plan.num_ranks}
    asked |= {"made_from": {"plan": "of other ranks", "data_profile": "another"}}
    shutil.copytree(first, second)
    run(demo, second, tmp_path / "2", resume=str(first / "checkpoints/step-2"), **asked)
    # Into another directory: its journals begin there.
    turns = lines(second / "schedules.jsonl")
    assert [turn["step"] for turn in turns] == [2, 3, 4]
    assert [turn["samples"] for turn in turns] == trained(first)[2:]
    for there, here in zip(kept(second), kept(first)[2:], strict=True):
        assert there["loss"] == pytest.approx(here["loss"], rel=1e-5)
        assert there["grad_norm"] == pytest.approx(here["grad_norm"], rel=1e-4)
    before, after = (tensors(where / "checkpoints/step-5") for where in (first, second))
    assert {n for n in before if not n.startswith("random")} == {
        n for n in after if not n.startswith("random")
    }
    moved = tensors(first / "checkpoints/step-2")
    for name in (name for name in before if name.startswith("model.")):
        way = float((before[name] - moved[name]).norm())
        if not name.endswith("k_proj.bias"):
            assert float((before[name] - after[name]).norm()) <= 1e-3 * way, name


@pytest.mark.some(1)
@pytest.mark.parametrize("layout", [(1, 1, 1, {}), (2, 2, 1, {"placement": "colocated", "zero": 2})], ids=str)
def test_updates_that_bfloat16_cannot_hold_are_kept(layout, demo, tmp_path):
    """A step of AdamW at a rate of 1e-6 moves each weight by about that, far less than bfloat16 can tell.

    Whole weights have float32 masters; shards are such themselves.
    """
    *degrees, sharding = layout
    path, rate, out = tmp_path / "plan.json", 1e-6, tmp_path / "run"
    plan = write_plan(path, *degrees, MICROBATCHES, global_batch_size=BATCH, **sharding)
    asked = config(demo, every=1, learning_rate=rate, weight_decay=0.0)
    asked["model"]["dtype"] = "bfloat16"
    run(demo, out, tmp_path / "1", config=asked, steps=2, plan=str(path), num_ranks=plan.num_ranks)
    before, after = (tensors(out / f"checkpoints/step-{step}") for step in (1, 2))
    for name in ("model.lm_head.weight", "model.model.multi_modal_projector.linear_1.weight"):
        assert before[name].dtype == torch.float32
        moved = (after[name] - before[name]).abs()
        assert float(moved.max()) < 2 * rate
        assert float((moved > rate / 10).float().mean()) > 0.5, name
        same = after[name].bfloat16() == before[name].bfloat16()
        assert float(same.float().mean()) > 0.9, name
