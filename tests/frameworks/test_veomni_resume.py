"""Runs of VeOmni that are killed and go on from VeOmni's own checkpoint, on batches that dflop balances.

The oracle is the same run, which nobody kills. `make test-frameworks` runs these tests.
"""

from __future__ import annotations

import pytest
import tiny_vision

pytest.importorskip("veomni", reason="VeOmni is not installed: `make test-frameworks`")
from veomni_runs import keys_of, run, write_chats, write_tasks

# Two epochs of three steps, with a checkpoint of each.
GIVEN = {"train.max_steps": 3, "train.num_train_epochs": 2, "train.checkpoint.save_steps": 1}
WORKER = {"train.dyn_bsz_runtime": "worker", "data.dataloader.num_workers": 1}
KINDS = {
    "packed": {},
    # Workers read on as soon as a loader goes on.
    "ahead": {"data.dataloader.num_workers": 2},
    # Microbatches that grow from step to step.
    "warmup": {"train.bsz_warmup_ratio": 0.9, "train.bsz_warmup_init_mbtoken": 100},
    "fixed": {"train.dyn_bsz": False, "train.global_batch_size": 8, "train.micro_batch_size": 2},
    # A thread goes on behind the last step of an epoch as far as it comes, with dflop or without: of one epoch.
    "thread": {"data.dataloader.use_background_prefetcher": True, "train.num_train_epochs": 1},
    "worker": WORKER,
    # All that there is: one rank's samples end before the other's.
    "end": {**WORKER, "data.dataloader.drop_last": False, "train.max_steps": 100},
}
# In the step before which ranks die: within an epoch, at the end of the first one (where VeOmni begins a loader twice),
# within the second. In `end` a checkpoint says that one rank has no more samples in this epoch (VeOmni counts a step that
# has none), and then one says an epoch that VeOmni would not find by its steps.
DIES = {
    "packed": [3, 4, 6],
    "ahead": [3, 4, 6],
    "warmup": [2, 3],
    "fixed": [4],
    "thread": [3],
    "worker": [3],
    "end": [8, 11],
}
NUM_STEPS = {"thread": 3, "end": 12}


def part(kind, index):
    """One process of each rank: from the last checkpoint to where it dies, or to the end."""
    found = {"name": f"{kind}_{index}", "goes_on": kind, "is_ours": True, "given": {**GIVEN, **KINDS[kind]}}
    if index:
        found["given"]["train.checkpoint.load_path"] = "auto"
    if index < len(DIES[kind]):
        found["dies_in"] = DIES[kind][index]
    return found


def whole(kind):
    return {"name": f"whole_{kind}", "is_ours": True, "given": {**GIVEN, **KINDS[kind]}}


# What the first test waits for, all parts of all runs, takes six minutes of two free cores.
pytestmark = pytest.mark.timeout(1800)


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    """What ranks found in each part; who dies is the last in its process, and so are workers of a loader."""
    folder = tmp_path_factory.mktemp("resume")
    write_chats(folder, 40)
    write_tasks(folder)
    found = {}
    for together in (
        [whole("packed"), whole("fixed"), whole("thread"), part("packed", 0)],
        [part("packed", 1)],
        [part("packed", 2)],
        [part("packed", 3), whole("warmup"), part("warmup", 0)],
        [part("warmup", 1)],
        [part("warmup", 2), part("fixed", 0)],
        [part("fixed", 1), part("thread", 0)],
        [part("thread", 1), part("worker", 0)],
        [part("worker", 1)],
        [whole("worker")],
        [whole("end")],
        *([part("end", index)] for index in range(3)),
        [whole("ahead")],
        *([part("ahead", index)] for index in range(4)),
    ):
        found |= run(folder, *together)[0]
    return found


def steps_of(found, kind):
    """Samples of each step that changed the model, over all parts; each has read the step in which it died."""
    steps = []
    for index in range(len(DIES[kind]) + 1):
        ranks = found[f"{kind}_{index}"]
        of_part = [keys_of(ranks, step) for step in range(len(ranks[0]["steps"]))]
        steps += of_part[:-1] if index < len(DIES[kind]) else of_part
    return steps


@pytest.mark.parametrize("kind", KINDS)
def test_steps_are_those_of_a_run_that_nobody_kills(kind, found):
    """Each sample in the same step, once; and samples that are read for a step are trained in it."""
    ranks = found[f"whole_{kind}"]
    steps = [keys_of(ranks, step) for step in range(len(ranks[0]["steps"]))]
    assert len(steps) == NUM_STEPS.get(kind, 6)
    assert steps_of(found, kind) == steps
    # Samples of an epoch are drawn without one twice.
    of_epoch = [sample for step in steps[: len(steps) // (1 if kind == "thread" else 2)] for sample in step]
    assert len(set(of_epoch)) == len(of_epoch)


@pytest.mark.parametrize("kind", KINDS)
def test_parameters_are_those_of_a_run_that_nobody_kills(kind, found):
    """To the last bits, which the order of sums decides."""
    expected = found[f"whole_{kind}"][0]["state"]
    for rank in found[f"{kind}_{len(DIES[kind])}"]:
        assert tiny_vision.difference(rank["state"], expected) <= 1e-6
