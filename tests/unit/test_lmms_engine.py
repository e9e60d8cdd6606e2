"""What dflop does in lmms-engine that needs no lmms-engine: refusals, samples once an epoch, the state of a loader."""

from __future__ import annotations

import subprocess
import sys
from importlib.util import find_spec
from itertools import islice
from types import SimpleNamespace

import pytest
import torch
from torch import nn
from torch.utils.data import DistributedSampler, IterableDataset

from dflop.integrations.lmms_engine import _balance_hf, _check, _Spread
from dflop.integrations.lmms_labels import Learnt
from dflop.integrations.lmms_loader import BalancedLoader, Once, rows_of
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
        once = Once(theirs, num_samples, drop_last=drop_last)
        indices = list(once)
        assert indices == list(theirs)[: len(indices)]
        assert len(indices) == len(once)
        found += indices
    left_out = num_samples % num_ranks if drop_last else 0
    assert len(found) == len(set(found)) == num_samples - left_out


def loader_of(num_samples=24, num_ranks=2, rank=0, step=0, **args):
    """A balanced loader of a rank, around the one that lmms-engine makes: three steps of two batches of two."""
    stateful = pytest.importorskip("torchdata.stateful_dataloader")
    known = {"gradient_accumulation_steps": 2, "train_batch_size": 2, "dataloader_drop_last": False}
    args = SimpleNamespace(**{**known, "dataloader_pin_memory": False, **args})
    theirs = stateful.StatefulDataLoader(
        range(num_samples),
        batch_size=args.train_batch_size,
        sampler=DistributedSampler(range(num_samples), num_ranks, rank),
        drop_last=args.dataloader_drop_last,
    )
    trainer = SimpleNamespace(args=args, global_step=step, steps_per_epoch=3)
    trainer.dflop_spread = SimpleNamespace(learnt=None, rank=rank, num_ranks=num_ranks, weight=1.0)
    trainer.compute_loss = trainer.training_step = None
    return BalancedLoader(trainer, theirs)


def read(loader, num_batches=None):
    """Samples of the batches that lmms-engine's loader reads below it."""
    return [batch.rows for batch in islice(loader._theirs, num_batches)]


def test_an_epoch_goes_on_where_it_stood():
    """Of three steps: behind the second one with what is left, behind the third with all of the next epoch."""
    whole = read(loader_of())
    for step, num_read in ((2, 4), (3, 6)):
        loader = loader_of(step=step)
        assert read(loader, num_read) == whole[:num_read]
        then = loader_of()
        then.load_state_dict(loader.state_dict())
        assert read(then) == (whole[num_read:] or whole)


def test_a_checkpoint_without_dflop_is_refused():
    """Its ranks had other samples: 23 on two ranks, of which that run trained 24."""
    loader = loader_of(23)
    state = loader._theirs.state_dict()
    with pytest.raises(
        ValueError, match="the checkpoint was written without dflop, must be of a run with it"
    ):
        loader.load_state_dict(state)


def test_an_epoch_without_a_batch_is_refused():
    """15 samples on 8 ranks are one for each, and no batch of two."""
    with pytest.raises(
        ValueError, match="15 samples over 8 ranks fill none of `per_device_train_batch_size` 2"
    ):
        loader_of(15, num_ranks=8, dataloader_drop_last=True)
    assert len(loader_of(15, num_ranks=8)) == 1


class Flat(nn.Module):
    """Says of itself what a patch of lmms-engine says that removes padding."""

    def forward(self, inputs_embeds=None, cu_seq_lens=None):
        return inputs_embeds

    forward.__module__ = "lmms_engine.models.any.any_ops"


def learnt(model, *, kind="any", pad=7):
    """Of a trainer with that model."""
    model.config = SimpleNamespace(model_type=kind)
    processor = SimpleNamespace(tokenizer=SimpleNamespace(pad_token_id=pad))
    return Learnt(SimpleNamespace(model=model, data_collator=SimpleNamespace(processor=processor)))


def test_labels_of_pad_tokens_count_where_the_loss_has_them():
    """Where rows have no padding lmms-engine removes each pad token, in a sample, too; Aero leaves its label out."""
    ids = torch.tensor([7, 1, 2, 7, 3, 7])
    row = {"input_ids": ids, "labels": ids}
    padded, flat, aero = (
        learnt(nn.Linear(1, 1)),
        learnt(nn.Sequential(Flat())),
        learnt(nn.Linear(1, 1), kind="aero"),
    )
    assert padded(row)["labels"].tolist() == [-100, 1, 2, 7, 3, 7]
    for one in (flat, aero):
        found = one(row)
        assert found["labels"].tolist() == [-100, -100, 2, -100, 3, -100]
        assert one.count(row) == 2
        found["labels"][:] = -100
        one.stand_in(found)
        assert found["labels"].tolist() == [-100, -100, -100, -100, 3, -100]
    assert row["labels"] is ids
    assert ids.tolist() == [7, 1, 2, 7, 3, 7]


def test_a_loss_is_weighed_before_it_is_rounded():
    """In 32 bits, and only in training; FSDP2 rounds what the model returns."""
    model = nn.Linear(1, 1)
    spread = SimpleNamespace(weight=1.0009765625)
    loss = torch.tensor(1.0, dtype=torch.bfloat16)
    found = _Spread._weigh(spread, model, None, {"loss": loss})["loss"]
    assert found.tolist() == 1.0009765625
    assert _Spread._weigh(spread, model, None, (loss, 3)) == (found, 3)
    assert _Spread._weigh(spread, model.eval(), None, (loss, 3))[0] is loss


def test_packs_are_taken_apart():
    """And what has no labels is refused: nobody could say what it counts."""
    one, two, three = ({"input_ids": torch.arange(n), "labels": torch.arange(n)} for n in (2, 3, 4))
    assert [len(row["labels"]) for row in rows_of(ReadRows([[one, two], three]))] == [2, 3, 4]
    with pytest.raises(
        ValueError, match="a sample is a `dict`, must be a dictionary with `input_ids` and `labels`"
    ):
        rows_of(ReadRows([{"input_ids": torch.arange(2)}]))


@pytest.mark.skipif(find_spec("lmms_engine") is not None, reason="lmms-engine is installed")
def test_the_command_without_lmms_engine_says_what_to_install():
    command = [sys.executable, "-m", "dflop.integrations.lmms_engine", "config_yaml=train.yaml"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    said = "`lmms_engine` is not installed beside dflop: pip install lmms-engine==0.1.4\n"
    assert (done.returncode, done.stderr) == (1, said)
