"""What dflop does in lmms-engine that needs no lmms-engine: refusals, samples once an epoch, the state of a loader."""

from __future__ import annotations

import subprocess
import sys
from importlib.util import find_spec
from types import SimpleNamespace

import pytest
import torch
from torch.utils.data import DistributedSampler, IterableDataset

from dflop.integrations.lmms_engine import _balance_hf, _BalancedLoader, _check, _Once, _rows_of
from dflop.integrations.read_rows import ReadRows


def config(*, trainer_type="fsdp2_trainer", packing=False, patches=None, **args):
    """Of lmms-engine, with its defaults."""
    degrees = dict.fromkeys(("sp_ulysses_degree", "tp_degree", "ep_degree"), 1)
    return SimpleNamespace(
        trainer_type=trainer_type,
        trainer_args=SimpleNamespace(**{**degrees, **args}),
        dataset_config=SimpleNamespace(packing=packing),
        model_config=SimpleNamespace(monkey_patch_kwargs=patches),
    )


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"trainer_type": "sit_trainer"}, "`trainer_type` is 'sit_trainer', must be 'fsdp2_trainer' or"),
        ({"sp_ulysses_degree": 2}, "`sp_ulysses_degree` is 2, must be 1"),
        ({"tp_degree": 4}, "`tp_degree` is 4, must be 1"),
        ({"ep_degree": 8}, "`ep_degree` is 8, must be 1"),
        (
            {"patches": {"patch_type": ["vit_frame_parallel"]}},
            "`patch_type` has 'vit_frame_parallel', leave it",
        ),
        (
            {"trainer_type": "hf_trainer", "packing": True},
            "`packing` is True and `trainer_type` is 'hf_trainer'",
        ),
    ],
)
def test_what_cannot_be_balanced_is_refused(given, message):
    """By the key, before anything is loaded."""
    with pytest.raises(ValueError, match=message):
        _check(config(**given))


def test_what_can_be_balanced_is_not():
    for given in ({}, {"packing": True}, {"trainer_type": "hf_trainer"}, {"patches": {"rope": False}}):
        _check(config(**given))


class Stream(IterableDataset):
    """Of nothing."""

    def __iter__(self):
        return iter(())


def test_a_stream_of_the_trainer_of_transformers_is_refused():
    """By the type of the dataset."""
    trainer = SimpleNamespace(train_dataset=Stream())
    with pytest.raises(ValueError, match=r"a stream \(`Stream`\) and `trainer_type` is 'hf_trainer'"):
        _balance_hf(trainer, shares_encoder=False)


@pytest.mark.parametrize("drop_last", [False, True])
@pytest.mark.parametrize(("num_samples", "num_ranks"), [(23, 2), (24, 2), (10, 4), (3, 4)])
def test_ranks_have_each_sample_once(num_samples, num_ranks, drop_last):
    """Where PyTorch's sampler repeats some so that ranks have as many, and in its order."""
    found = []
    for rank in range(num_ranks):
        theirs = DistributedSampler(range(num_samples), num_ranks, rank)
        once = _Once(theirs, num_samples, drop_last=drop_last)
        indices = list(once)
        assert indices == list(theirs)[: len(indices)]
        assert len(indices) == len(once)
        found += indices
    left_out = num_samples % num_ranks if drop_last else 0
    assert len(found) == len(set(found)) == num_samples - left_out


class Loader:
    """A loader of lmms-engine's that may be told where it stands."""

    state = None

    def state_dict(self):
        return {"yielded": 6}

    def load_state_dict(self, state):
        self.state = state


def test_an_epoch_that_has_ended_is_not_gone_on_with():
    """Of three steps: behind the second one the state is lmms-engine's, behind the third the next epoch begins."""
    for step, expected in ((2, {"yielded": 6}), (3, None)):
        loader = _BalancedLoader.__new__(_BalancedLoader)
        loader._theirs, loader._is_stream = Loader(), False
        loader._trainer = SimpleNamespace(global_step=step, steps_per_epoch=3)
        loader.load_state_dict(loader.state_dict())
        assert loader._theirs.state == expected
    # A checkpoint of a run without dflop.
    loader.load_state_dict({"yielded": 4})
    assert loader._theirs.state == {"yielded": 4}


def test_packs_are_taken_apart():
    """And what has no labels is refused: nobody could say what it counts."""
    one, two, three = ({"input_ids": torch.arange(n), "labels": torch.arange(n)} for n in (2, 3, 4))
    assert [len(row["labels"]) for row in _rows_of(ReadRows([[one, two], three]))] == [2, 3, 4]
    with pytest.raises(
        ValueError, match="a sample is a `dict`, must be a dictionary with `input_ids` and `labels`"
    ):
        _rows_of(ReadRows([{"input_ids": torch.arange(2)}]))


@pytest.mark.skipif(find_spec("lmms_engine") is not None, reason="lmms-engine is installed")
def test_the_command_without_lmms_engine_says_what_to_install():
    command = [sys.executable, "-m", "dflop.integrations.lmms_engine", "config_yaml=train.yaml"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    said = "`lmms_engine` is not installed beside dflop: pip install lmms-engine==0.1.4\n"
    assert (done.returncode, done.stderr) == (1, said)
