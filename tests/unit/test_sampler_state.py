"""`BalancedBatchSampler` goes on where it stood, on other replicas, with workers, copied: a sample once."""

from __future__ import annotations

import copy
import json
import pickle

import pytest
from drawn_costs import costs, with_giants

from dflop import BalancedBatchSampler
from dflop import costs as costs_of
from dflop._native import run_cli


@pytest.fixture(scope="module")
def profile(tmp_path_factory):
    """The path of a data profile, as the command line writes it."""
    folder = tmp_path_factory.mktemp("sampler") / "demo"
    assert run_cli(["dflop", "demo-data", str(folder), "--samples", "24"]) == (0, None)
    assert run_cli(["dflop", "profile", "data", "-c", str(folder / "dflop.yaml")]) == (0, None)
    return folder / "data_profile.parquet"


@pytest.mark.parametrize("new_replicas", [1, 2, 4])
def test_a_run_with_waiting_giants_goes_on_exactly_once(new_replicas):
    """Stopped inside a window on 2 replicas; the state is refused where giants are others."""
    shapes, _ = with_giants(80, seed=6)
    options = {"batch_size": 2, "num_buckets": 8, "giant_llm_cost": 10**6, "giant_steps_max": 3}
    seen, state = [], {}
    for rank in range(2):
        sampler = BalancedBatchSampler(shapes, num_replicas=2, rank=rank, **options)
        batches = iter(sampler)
        seen += [next(batches) for _ in range(6)]
        state = sampler.state_dict()
    rest = []
    for rank in range(new_replicas):
        sampler = BalancedBatchSampler(shapes, num_replicas=new_replicas, rank=rank, **options)
        sampler.load_state_dict(json.loads(json.dumps(state)))
        rest += list(sampler)
    assert sorted(i for batch in seen + rest for i in batch) == list(range(80))
    for change in ({"giant_steps_max": 2}, {"giant_llm_cost": None}, {"shuffle": False}, {"drop_last": True}):
        with pytest.raises(ValueError, match="must be equal"):
            BalancedBatchSampler(shapes, **{**options, **change}).load_state_dict(state)


def test_states_of_the_first_version_are_taken():
    """They say nothing of order and giants: such a run had none that waited."""
    shapes, _ = with_giants(80, seed=6)
    state = BalancedBatchSampler(shapes, 2).state_dict()
    for name in ("shuffle", "drop_last", "num_giants", "giant_steps_max"):
        del state[name]
    BalancedBatchSampler(shapes, 2).load_state_dict(state)
    with pytest.raises(ValueError, match="the state has `num_giants` 0, this sampler 6"):
        BalancedBatchSampler(shapes, 2, giant_llm_cost=10**6).load_state_dict(state)


@pytest.mark.parametrize("new_replicas", [1, 2, 4])
def test_a_loaded_state_goes_on_exactly_once(new_replicas):
    """Stopped inside a global batch on 2 replicas, resumed on 1, 2 or 4: the rest, each sample once."""
    shapes = costs(80, seed=6)
    options = {"batch_size": 2, "num_buckets": 8, "seed": 3}
    before = [BalancedBatchSampler(shapes, num_replicas=2, rank=rank, **options) for rank in range(2)]
    seen, states = [], []
    for sampler in before:
        sampler.set_epoch(4)
        batches = iter(sampler)
        seen += [next(batches) for _ in range(6)]
        states.append(sampler.state_dict())
    assert states[0] == states[1], "no buffer of a rank is in the state"
    assert states[0] == before[0].state_dict(num_batches=6)
    assert (states[0]["global_batch"], states[0]["buckets_taken"]) == (1, 4)
    assert not {"rank", "num_replicas"} & set(states[0])
    rest = []
    for rank in range(new_replicas):
        sampler = BalancedBatchSampler(shapes, num_replicas=new_replicas, rank=rank, **options)
        sampler.load_state_dict(json.loads(json.dumps(states[0])))
        sampler.set_epoch(4)
        rest += list(sampler)
    assert sorted(i for batch in seen + rest for i in batch) == list(range(80))


def test_a_state_of_something_else_is_refused():
    """Other data, sizes or seeds would skip and repeat samples in silence."""
    state = BalancedBatchSampler(costs(80, 6), 2, num_replicas=4).state_dict()
    same = costs(80, 6)
    for shapes, options in [(costs(81, 6), {}), (same, {"seed": 1}), (same, {"num_buckets": 8})]:
        with pytest.raises(ValueError, match="must be equal"):
            BalancedBatchSampler(shapes, 2, num_replicas=4, **options).load_state_dict(state)
    with pytest.raises(ValueError, match="do not divide among 4 replicas"):
        BalancedBatchSampler(costs(80, 6), 2, num_replicas=4).load_state_dict(state | {"buckets_taken": 2})


def test_a_state_of_other_ranks_says_how_it_can_be_loaded():
    """By default there are as many buckets as ranks; what the error asks for loads."""
    state = BalancedBatchSampler(costs(80, 6), 2, num_replicas=4).state_dict()
    for size, replicas in [(2, 2), (4, 2), (2, 8)]:
        with pytest.raises(ValueError, match="must be equal") as error:
            BalancedBatchSampler(costs(80, 6), size, num_replicas=replicas).load_state_dict(state)
        if replicas == 8:
            assert "its 4 buckets do not divide among 8 replicas" in str(error.value)
            continue
        assert "give `batch_size=2, num_buckets=4` (`balanced_loader`: `accumulation=2`)" in str(error.value)
    BalancedBatchSampler(costs(80, 6), 2, num_replicas=2, num_buckets=4).load_state_dict(state)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"buckets_taken": 8}, "`buckets_taken` is 8, must be from 0 to 7"),
        ({"buckets_taken": -2}, "`buckets_taken` is -2, must be from 0 to 7"),
        ({"buckets_taken": 3}, "5 buckets remain of a global batch, they do not divide among 2 replicas"),
        ({"buckets_taken": "4"}, "`buckets_taken` is '4', must be an integer"),
        ({"buckets_taken": 4, "balanced_for": 3}, "`balanced_for` is 3, must divide the 8 buckets"),
        ({"global_batch": 6}, "`global_batch` is 6, must be from 0 to 5"),
        ({"epoch": -1}, "`epoch` is -1, must be from 0"),
        ({"epoch": None}, "`epoch` is None, must be an integer"),
    ],
)
def test_a_place_that_is_none_is_refused(change, message):
    """A state of 80 samples in five global batches of eight buckets, changed."""
    sampler = BalancedBatchSampler(costs(80, 6), 2, num_replicas=2, num_buckets=8)
    with pytest.raises(ValueError, match=message):
        sampler.load_state_dict(sampler.state_dict(num_batches=6) | change)
    with pytest.raises(ValueError, match="the state has no `epoch`, it is none of"):
        sampler.load_state_dict({"step": 3})


def test_padding_is_part_of_a_state_inside_a_global_batch():
    """Padded and unpadded buckets differ; states from before there was padding are of unpadded ones."""
    shapes = costs(64, seed=4)
    plain, padded = (
        BalancedBatchSampler(shapes, 4, num_buckets=4, is_padded=is_padded) for is_padded in (False, True)
    )
    next(iter(plain))
    next(iter(padded))
    state = plain.state_dict()
    with pytest.raises(ValueError, match="balanced with `is_padded` 0, this sampler has 1"):
        padded.load_state_dict(state)
    old = {name: value for name, value in state.items() if name != "is_padded"}
    plain.load_state_dict(old)
    with pytest.raises(ValueError, match="`is_padded` 0"):
        padded.load_state_dict(old)


def test_other_costs_are_refused_inside_a_global_batch():
    """They would repeat and lose samples in silence; between global batches they are welcome."""
    old, new = costs(80, 6), costs(80, 7)
    options = {"num_replicas": 2, "num_buckets": 8}
    inside = BalancedBatchSampler(old, 2, **options).state_dict(num_batches=6)
    between = BalancedBatchSampler(old, 2, **options).state_dict(num_batches=8)
    assert (inside["buckets_taken"], between["buckets_taken"]) == (4, 0)
    for shapes, changed, name in [
        (new, {}, "costs"),
        (old, {"meets": "phase"}, "meets"),
        (costs_of(old, tokens=[1] * 80), {"max_tokens": 100}, "costs"),
    ]:
        other = BalancedBatchSampler(shapes, 2, **options, **changed)
        with pytest.raises(ValueError, match=f"inside a global batch that was balanced with `{name}`"):
            other.load_state_dict(inside)
        other.load_state_dict(between)
        # 2 global batches of 16 samples are trained: of the same order, 48 are left.
        assert (
            len({i for rank in (0, 1) for b in rest_of(shapes, rank, between, options | changed) for i in b})
            == 48
        )
    # A state of the first version inside a global batch knew one objective and no digest.
    for name in ("costs", "meets", "max_tokens", "max_bytes", "balanced_for", "first_sample"):
        del inside[name]
    with pytest.raises(ValueError, match="balanced with `costs` None"):
        BalancedBatchSampler(old, 2, **options).load_state_dict(inside)
    BalancedBatchSampler(old, 2, **options, meets="pipeline").load_state_dict(inside)


def rest_of(shapes, rank, state, options):
    """What a replica still yields from a state on."""
    sampler = BalancedBatchSampler(shapes, 2, rank=rank, **options)
    sampler.load_state_dict(state)
    return list(sampler)


@pytest.mark.parametrize("trained", [0, 1, 15, 28, 29, 30, 31, 32])
def test_workers_that_read_ahead_lose_nothing(trained):
    """64 samples, two workers: they have taken all batches of the epoch while the trainer is still in it."""
    torch = pytest.importorskip("torch")
    shapes = costs(64, seed=14)
    sampler = BalancedBatchSampler(shapes, 2)
    loader = torch.utils.data.DataLoader(range(64), batch_sampler=sampler, num_workers=2)
    seen = []
    state = sampler.state_dict(num_batches=0) if trained == 0 else {}
    for number, batch in enumerate(loader, 1):
        seen += batch.tolist()
        if number == trained:
            state = sampler.state_dict(num_batches=number)
            break
    resumed = BalancedBatchSampler(shapes, 2)
    resumed.load_state_dict(state)
    rest = [i for batch in resumed for i in batch]
    if trained < 32:
        assert state["epoch"] == 0
        assert sorted((seen if trained else []) + rest) == list(range(64))
    else:
        # The epoch is over: all of the next one comes.
        assert (state["epoch"], state["global_batch"]) == (1, 0)
        assert sorted(rest) == list(range(64))


def test_num_batches_counts_from_where_the_loop_began():
    """As `enumerate` in the resumed loop does; more than there are is an error."""
    shapes = costs(64, seed=14)
    first = BalancedBatchSampler(shapes, 2, num_buckets=4)
    second = BalancedBatchSampler(shapes, 2, num_buckets=4)
    second.load_state_dict(first.state_dict(num_batches=5))
    batches = iter(second)
    for _ in range(7):
        next(batches)
    assert second.state_dict(num_batches=6) == first.state_dict(num_batches=11)
    assert second.state_dict() == first.state_dict(num_batches=12)
    assert second.state_dict(num_batches=27)["epoch"] == 1
    with pytest.raises(
        ValueError, match="`num_batches` is 28, must be at most 27, all that the epoch had left"
    ):
        second.state_dict(num_batches=28)


def test_iterators_and_set_epoch_do_not_mix():
    """Two of one epoch, and one that goes on while another epoch is chosen: each has its own order."""
    shapes = costs(64, seed=15)
    sampler = BalancedBatchSampler(shapes, 4)
    zero = list(sampler)
    one = list(sampler)
    sampler.set_epoch(0)
    pairs = list(zip(iter(sampler), iter(sampler), strict=True))
    assert [a for a, _ in pairs] == [b for _, b in pairs] == zero
    assert list(sampler) == one
    sampler.set_epoch(0)
    batches = iter(sampler)
    seen = [next(batches) for _ in range(6)]
    sampler.set_epoch(1)
    assert seen + list(batches) == zero
    assert list(sampler) == one
    # An iterator that nobody read took nothing.
    sampler.load_state_dict(sampler.state_dict())
    iter(sampler)
    assert list(sampler) == list_of(shapes, 2)


def list_of(shapes, epoch_index):
    sampler = BalancedBatchSampler(shapes, 4)
    sampler.set_epoch(epoch_index)
    return list(sampler)


@pytest.mark.parametrize("how", ["pickle", "copy", "deepcopy"])
def test_a_sampler_can_be_copied(how, profile):
    """The copy yields the same, with giants and bad samples, from the place where it was."""
    ways = {"pickle": lambda s: pickle.loads(pickle.dumps(s)), "copy": copy.copy, "deepcopy": copy.deepcopy}
    shapes, _ = with_giants(80, seed=6)
    for source, options in [
        (shapes, {"giant_llm_cost": 10**6, "meets": "phase"}),
        ([(e / 7, t / 7) for e, t in shapes], {"shuffle": False}),
        (profile, {"max_tokens": 100_000}),
    ]:
        sampler = BalancedBatchSampler(source, 2, num_replicas=2, **options)
        sampler.set_epoch(3)
        sampler.load_state_dict(sampler.state_dict(num_batches=2))
        copied = ways[how](sampler)
        assert copied.state_dict() == sampler.state_dict()
        assert list(copied) == list(sampler)
        assert list(copied) == list(sampler)


@pytest.mark.parametrize("num_workers", [0, 2])
@pytest.mark.parametrize("trained", [0, 1, 7, 15, 16])
def test_a_stateful_dataloader_resumes_it(num_workers, trained):
    """The real torchdata: its state alone is enough, though workers read ahead; the next epoch is whole."""
    stateful = pytest.importorskip("torchdata.stateful_dataloader")
    shapes = costs(64, seed=18)

    def loader():
        sampler = BalancedBatchSampler(shapes, 4, num_buckets=2)
        return stateful.StatefulDataLoader(range(64), batch_sampler=sampler, num_workers=num_workers)

    first = loader()
    batches = iter(first)
    seen = [next(batches).tolist() for _ in range(trained)]
    state = pickle.loads(pickle.dumps(first.state_dict()))
    del batches
    second = loader()
    second.load_state_dict(state)
    seen += [batch.tolist() for batch in second]
    assert sorted(i for batch in seen for i in batch) == list(range(64))
    following = BalancedBatchSampler(shapes, 4, num_buckets=2)
    following.set_epoch(1)
    assert [batch.tolist() for batch in second] == list(following)
