"""Who computes which samples of a step that were read already: microbatches in rows of ranks, under a limit."""

from __future__ import annotations

import copy
import pickle
import random
import subprocess
import sys
from importlib.util import find_spec
from types import SimpleNamespace

import pytest
import torch

from dflop import ScheduleError
from dflop.integrations.read_rows import ReadRows
from dflop.integrations.read_spread import ReadSpread, as_read
from dflop.integrations.spread import even_buckets
from dflop.integrations.veomni import _BalancedLoader, _check, _Microbatch
from dflop.integrations.veomni_spread import _limit, _meets, _shares_encoder


def drawn(count, seed=0):
    """Costs of samples of which two thirds have media."""
    draw = random.Random(seed)
    return [
        (draw.choice([0, draw.lognormvariate(3, 1), draw.lognormvariate(3, 1)]), draw.lognormvariate(4, 1))
        for _ in range(count)
    ]


def waits(pairs, buckets, num_ranks):
    """Time of a step in which ranks meet behind the encoder and behind the LLM of each microbatch."""
    rows = [buckets[start : start + num_ranks] for start in range(0, len(buckets), num_ranks)]
    return sum(max(sum(pairs[s][part] for s in bucket) for bucket in row) for row in rows for part in (0, 1))


@pytest.mark.parametrize("seed", range(5))
def test_samples_of_like_work_meet_where_each_is_a_microbatch(seed):
    """As many samples as microbatches: `per_device_train_batch_size` 1, and what is chosen is who meets whom."""
    num_ranks, num_buckets = 8, 32
    pairs = drawn(num_buckets, seed)
    buckets = even_buckets(pairs, num_ranks, num_buckets, "phase", 0)
    assert sorted(map(tuple, buckets)) == [(sample,) for sample in range(num_buckets)]
    as_read = waits(pairs, [[sample] for sample in range(num_buckets)], num_ranks)
    by_work = sorted(range(num_buckets), key=lambda sample: -sum(pairs[sample]))
    assert waits(pairs, buckets, num_ranks) <= 0.8 * as_read
    assert waits(pairs, buckets, num_ranks) <= waits(pairs, [[sample] for sample in by_work], num_ranks)


def test_too_few_samples_leave_microbatches_empty():
    assert even_buckets([(1, 1), (2, 2)], 2, 4, "phase", 0) == [[0], [1], [], []]


def test_a_limit_on_tokens_is_kept_or_refused():
    pairs, tokens = [(0, 9), (0, 1), (0, 1), (0, 1)], [4, 4, 4, 4]
    buckets = even_buckets(pairs, 2, 2, "phase", 0, tokens=tokens, max_tokens=8)
    assert sorted(map(len, buckets)) == [2, 2]
    free = even_buckets(pairs, 2, 2, "phase", 0, tokens=tokens, max_tokens=100)
    assert sorted(map(len, free)) == [1, 3]
    with pytest.raises(ScheduleError, match="a bucket holds at most 7"):
        even_buckets(pairs, 2, 2, "phase", 0, tokens=tokens, max_tokens=7)


def test_rows_come_from_a_worker_with_their_own_numbers_alone():
    """As bytes, of its own type, and without the tensor that a row is a part of."""

    class Kind(ReadRows):
        pass

    globals()["Kind"] = Kind
    Kind.__qualname__ = "Kind"
    large = torch.arange(100_000)
    rows = [{"input_ids": large[:3]}, {"input_ids": large[3:5]}]
    sent = pickle.dumps(Kind(rows))
    assert len(sent) < 5_000
    for found in (pickle.loads(sent), copy.deepcopy(Kind(rows))):
        assert type(found) is Kind
        assert [row["input_ids"].tolist() for row in found.rows] == [[0, 1, 2], [3, 4]]


class Loader:
    """A loader of VeOmni's that reads two steps, and may be told where it stands."""

    def __init__(self):
        self._collate_fn = list
        self.state = None

    def __iter__(self):
        return iter([[_Microbatch([{"input_ids": torch.arange(4)}])]] * 2)

    def state_dict(self):
        return {"step": 2}

    def load_state_dict(self, state):
        self.state = state

    def set_epoch(self, epoch):
        self.epoch = epoch


def loader_of_veomni(num_ranks=2, train_steps=100):
    """Dflop's in its place, before it knows a model or ranks."""
    found = _BalancedLoader.__new__(_BalancedLoader)
    found._trainer = SimpleNamespace(
        args=SimpleNamespace(train_steps=train_steps), start_epoch=0, start_step=0
    )
    found._theirs, found._num_ranks = Loader(), num_ranks
    found._has_ended = found._is_over = False
    found._epoch, found._num_steps, found._loaded = 0, 0, None
    found._spread = SimpleNamespace(begin=lambda: None)
    found._balanced = list
    return found


def place(loader):
    return loader._trainer.start_epoch, loader._trainer.start_step


def test_a_rank_of_veomni_whose_samples_have_ended_stays_ended():
    """Other ranks may train on theirs; a run that resumes there must not read this one's again."""
    loader = loader_of_veomni()
    # They have four steps.
    loader._balanced = lambda step: step or ["of another rank"] * (loader._num_steps < 4)
    steps = iter(loader)
    assert [next(steps) != [], next(steps) != []] == [True, True]
    assert not loader.state_dict()["_dflop"]["has_ended"]
    assert next(steps) == ["of another rank"]
    state = loader.state_dict()
    expected = {"has_ended": True, "num_ranks": 2, "epoch": 0, "num_steps": 3}
    assert state == {"step": 2, "_dflop": expected}
    resumed = loader_of_veomni()
    resumed.load_state_dict(state)
    # Until samples are read: VeOmni's loader with workers would read on in the order of another epoch.
    assert resumed._theirs.state is None
    assert resumed.state_dict() == state
    assert place(resumed) == (0, 3)
    assert list(resumed) == []
    # VeOmni's own says one step less, of which `bsz_warmup` makes microbatches.
    assert resumed._theirs.state == {"step": 3}
    # The next epoch has samples, there and where nothing was loaded.
    assert len(list(resumed)) == len(list(loader_of_veomni())) == 2
    resumed = loader_of_veomni()
    resumed.load_state_dict({"step": 2})
    assert len(list(resumed)) == 2


@pytest.mark.parametrize(
    ("train_steps", "num_read", "expected"), [(2, 2, (4, 0)), (100, 3, (4, 0)), (100, 1, (3, 1))]
)
def test_a_run_of_veomni_goes_on_in_the_epoch_that_was_saved(train_steps, num_read, expected):
    """Behind as many steps as VeOmni counts to an epoch, behind one that ended before, and within one."""
    loader = loader_of_veomni(train_steps=train_steps)
    loader.set_epoch(3)
    steps = iter(loader)
    for _ in range(num_read):
        next(steps, None)
    resumed = loader_of_veomni(train_steps=train_steps)
    resumed.load_state_dict(loader.state_dict())
    assert place(resumed) == expected


def test_a_checkpoint_of_another_number_of_ranks_is_refused():
    """Each rank would go on behind as many samples as another one has read."""
    state = loader_of_veomni(num_ranks=4).state_dict()
    with pytest.raises(ValueError, match="is of 4 data-parallel ranks, this run has 2.* Go on with 4"):
        loader_of_veomni().load_state_dict(state)


def test_copies_that_veomni_makes_behind_the_last_step_are_no_samples():
    """It marks them by an item of the microbatch, and trains none of them."""
    batch = copy.deepcopy(_Microbatch([{"input_ids": torch.arange(4)}]))
    batch["padding_flag"] = True
    assert batch.rows == []
    with pytest.raises(ValueError, match="VeOmni's loader sets `other` of a microbatch"):
        batch["other"] = 1


@pytest.mark.parametrize(
    ("given", "limit"),
    [
        ({}, 300),
        ({"pad_to_length": 300}, 300),
        ({"dyn_bsz": False}, None),
        ({"dyn_bsz_count_mode": "effective"}, 450),
        ({"dyn_bsz_count_mode": "effective", "dyn_bsz_physical_overflow_ratio": 1.1111}, 334),
    ],
)
def test_the_limit_of_a_microbatch_is_that_of_veomni(given, limit):
    train = {"dyn_bsz": True, "micro_batch_size": 2, "dyn_bsz_count_mode": "total", "pad_to_length": False}
    train |= {"dyn_bsz_physical_overflow_ratio": 1.5, **given}
    args = SimpleNamespace(train=SimpleNamespace(**train), data=SimpleNamespace(max_seq_len=150))
    assert _limit(args) == limit


def test_microbatches_can_be_kept_as_they_were_read():
    """The first of each rank, then the second."""
    assert as_read([[0, 0, 1], [0, 1]], 2) == [[0, 1], [3], [2], [4]]


@pytest.mark.parametrize("is_padded", [False, True])
def test_microbatches_that_were_read_may_pass_the_limit(is_padded):
    """Two of them, with six samples: the fullest is the limit, by its tokens or by those of its padded rows."""
    spread = ReadSpread("A framework", 1, None, torch.device("cpu"), "phase", 0, is_padded, max_tokens=10)
    read = [[(8.0, 9.0, 9), (0.0, 5.0, 5)], [(0.0, 4.0, 4), (0.0, 4.0, 4), (2.0, 3.0, 3), (0.0, 2.0, 2)]]
    parts, sizes = spread.split(read)
    assert sizes[:, 2].tolist() == [9, 5, 4, 4, 3, 2]
    assert sorted(sample for bucket in parts.buckets for sample in bucket) == list(range(6))

    def tokens(bucket):
        held = [int(sizes[sample, 2]) for sample in bucket]
        return max(held) * len(held) if is_padded else sum(held)

    assert max(map(tokens, parts.buckets)) <= max(map(tokens, ([0, 1], [2, 3, 4, 5])))


def test_microbatches_are_as_read_where_no_others_keep_the_limit(monkeypatch):
    """A warning says so, once."""

    def none(*_, **__):
        raise ScheduleError("none")

    monkeypatch.setattr("dflop.integrations.read_spread.even_buckets", none)
    spread = ReadSpread("A framework", 1, None, torch.device("cpu"), "phase", 0)
    read = [[(1.0, 1.0, 1, 7.0)], [(1.0, 1.0, 1, 8.0), (1.0, 1.0, 1, 9.0)]]
    with pytest.warns(UserWarning, match="A framework's own are taken"):
        parts, sizes = spread.split(read, 1)
    assert parts.buckets == [[0], [1, 2]]
    assert sizes[:, 3].tolist() == [7, 8, 9]
    assert spread.split(read, 1)[0].buckets == parts.buckets


@pytest.mark.parametrize(
    ("given", "meets"),
    [
        ({}, "phase"),
        ({"dp_mode": "ddp"}, "step"),
        # Replicas of a whole model add up their gradients behind the last microbatch.
        ({"dp_shard_size": 1}, "step"),
        # HSDP: those of a shard meet in each layer.
        ({"dp_shard_size": 2}, "phase"),
        # Experts are shared out inside of a shard.
        ({"dp_shard_size": 1, "any_extra_parallel_enabled": True}, "step"),
        ({"dp_mode": "ddp", "any_extra_parallel_enabled": True}, "phase"),
    ],
)
def test_ranks_of_veomni_wait_for_those_that_hold_other_parts_of_the_model(given, meets):
    state = {"dp_mode": "fsdp2", "dp_shard_size": 4, "any_extra_parallel_enabled": False, **given}
    assert _meets(SimpleNamespace(**state)) == meets


def test_an_encoder_is_shared_where_the_model_does_it():
    """A configuration that asks for it is not enough: VeOmni 0.1.12 has no model that reads it."""
    model = torch.nn.Sequential(torch.nn.Linear(1, 1))
    model.config = SimpleNamespace(encoder_data_balance=True)
    assert not _shares_encoder(model)
    model[0].encoder_data_balance = None
    assert not _shares_encoder(model)
    model[0].encoder_data_balance = object()
    assert _shares_encoder(model)


@pytest.mark.parametrize("field", ["output_router_logits", "dsa_indexer_loss_coef"])
def test_a_loss_of_veomni_that_is_a_mean_over_a_microbatch_is_named(field):
    config = SimpleNamespace(**{field: 0.1})
    trainer = SimpleNamespace(args=SimpleNamespace(), model=SimpleNamespace(config=config))
    with pytest.warns(UserWarning, match=f"`{field}` is 0.1: .* is a mean over a microbatch"):
        _check(trainer)


@pytest.mark.skipif(find_spec("veomni") is not None, reason="VeOmni is installed")
def test_the_command_without_veomni_says_what_to_install(tmp_path):
    """And names the script that is not there first."""
    script = tmp_path / "train_vlm.py"
    command = [sys.executable, "-m", "dflop.integrations.veomni", str(script), "config.yaml"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    said = f"`{script}` is no file: name VeOmni's script, such as tasks/train_vlm.py\n"
    assert (done.returncode, done.stderr) == (1, said)
    script.write_text("")
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert (done.returncode, done.stderr) == (
        1,
        "`veomni` is not installed beside dflop: pip install veomni==0.1.12\n",
    )
