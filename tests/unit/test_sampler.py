"""`BalancedBatchSampler`: each sample once, even work, as many batches on each replica, and no torch."""

from __future__ import annotations

import json
import random
import subprocess
import sys
from types import SimpleNamespace

import pytest
from pyarrow import parquet

from dflop import ArtifactError, BalancedBatchSampler
from dflop._native import run_cli


@pytest.fixture(scope="module")
def profile(tmp_path_factory):
    """The path of a data profile, as the command line writes it."""
    folder = tmp_path_factory.mktemp("sampler") / "demo"
    assert run_cli(["dflop", "demo-data", str(folder), "--samples", "24"]) == (0, None)
    assert run_cli(["dflop", "profile", "data", "-c", str(folder / "dflop.yaml")]) == (0, None)
    return folder / "data_profile.parquet"


def costs(count, seed):
    """Heavy-tailed costs: a third has no encoder work at all."""
    draw = random.Random(seed)
    return [
        (0 if draw.random() < 0.33 else int(draw.lognormvariate(10, 1)), int(draw.lognormvariate(11, 0.8)))
        for _ in range(count)
    ]


@pytest.mark.parametrize("entry", [7, "text", {"tokens": 3}, None])
def test_entries_that_are_no_costs_are_refused(entry):
    """One number a sample, the first thing many try, is told what it must be."""
    with pytest.raises(
        ValueError, match=r"sample 0 is .*, must be a pair \(encoder cost, LLM cost\) or a shape"
    ):
        BalancedBatchSampler([entry] * 4, batch_size=2, num_buckets=2)


def epoch(shapes, num_replicas, **options):
    """Batches of all replicas: [replica][batch]."""
    return [
        list(BalancedBatchSampler(shapes, num_replicas=num_replicas, rank=rank, **options))
        for rank in range(num_replicas)
    ]


# 100 samples: global batches of 16 (rest 4 = buckets), 24 (rest 4 < 8 buckets: added), 50 (no rest), 128, ...
@pytest.mark.parametrize(
    ("batch_size", "num_replicas", "num_buckets"),
    [(4, 4, 4), (3, 4, 8), (25, 2, 2), (32, 4, 4), (1, 1, 1), (7, 1, 3)],
)
@pytest.mark.parametrize("shuffle", [True, False])
def test_each_sample_comes_once_an_epoch(batch_size, num_replicas, num_buckets, shuffle):
    """Over all replicas; every replica yields `len` batches, none of them empty."""
    shapes = costs(100, seed=1)
    options = {"batch_size": batch_size, "num_buckets": num_buckets, "shuffle": shuffle}
    replicas = epoch(shapes, num_replicas, **options)
    assert sorted(i for batches in replicas for batch in batches for i in batch) == list(range(100))
    expected = len(BalancedBatchSampler(shapes, num_replicas=num_replicas, **options))
    assert [len(batches) for batches in replicas] == [expected] * num_replicas
    assert all(batch for batches in replicas for batch in batches)


def test_global_batches_are_those_of_the_unbalanced_order():
    """Balancing moves samples between buckets of one global batch, never between global batches."""
    shapes = costs(96, seed=2)
    replicas = epoch(shapes, 4, batch_size=6, shuffle=False)
    for number in range(4):
        together = sorted(i for batches in replicas for i in batches[number])
        assert together == list(range(24 * number, 24 * number + 24))


def test_work_is_more_even_than_in_arrival_order():
    """The slowest replica of each global batch, on either component, against equal counts in order."""
    shapes = costs(512, seed=3)

    def slowest(buckets):
        return max(max(sum(shapes[i][k] for i in bucket) for bucket in buckets) for k in (0, 1))

    balanced = arrival = 0
    sampler = BalancedBatchSampler(shapes, 8, num_replicas=8, shuffle=False)
    for number in range(8):
        balanced += slowest(sampler.buckets(number))
        arrival += slowest([range(64 * number + 8 * k, 64 * number + 8 * k + 8) for k in range(8)])
    assert balanced < 0.75 * arrival


def test_replicas_that_run_together_have_neighbouring_buckets():
    """With several buckets a replica, each slot takes the next heaviest: none waits for a giant."""
    shapes = costs(64, seed=4)
    sampler = BalancedBatchSampler(shapes, 4, num_replicas=2, num_buckets=8, shuffle=False)
    loads = [sum(sum(shapes[i]) for i in bucket) for bucket in sampler.buckets(0)]
    assert loads == sorted(loads, reverse=True)
    replicas = epoch(shapes, 2, batch_size=4, num_buckets=8, shuffle=False)
    together = [b for pair in zip(*replicas, strict=True) for b in pair]
    assert together[:8] == sampler.buckets(0)


def test_the_order_changes_with_epoch_and_seed_alone():
    """Same seed and epoch, same batches; a finished epoch moves on by itself; `set_epoch` goes anywhere."""
    shapes = costs(60, seed=5)
    one, two = BalancedBatchSampler(shapes, 5), BalancedBatchSampler(shapes, 5)
    first = list(one)
    assert first == list(two)
    second = list(one)
    assert second != first
    two.set_epoch(1)
    assert list(two) == second
    one.set_epoch(0)
    assert list(one) == first
    assert list(BalancedBatchSampler(shapes, 5, seed=1)) != first


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


def test_costs_come_from_pairs_and_shapes():
    """The same sizes give the same batches in every form."""
    pairs = costs(48, seed=7)
    shapes = [
        {"encoder_segments": [{"count": 2, "tokens": e}] if e else [], "llm_tokens": 2 * t} for e, t in pairs
    ]
    objects = [SimpleNamespace(encoder_tokens=2 * e, llm_tokens=2 * t) for e, t in pairs]
    expected = list(BalancedBatchSampler(shapes, 6, num_replicas=2))
    assert list(BalancedBatchSampler(objects, 6, num_replicas=2)) == expected
    seconds = [(e / 1e9, t / 1e9) for e, t in pairs]
    assert len(list(BalancedBatchSampler(seconds, 6, num_replicas=2))) == 4


def test_costs_come_from_a_data_profile(profile):
    """The sizes in its columns, by path or text."""
    rows = parquet.read_table(profile).to_pylist()
    expected = list(BalancedBatchSampler(rows, 6, num_replicas=2))
    assert list(BalancedBatchSampler(profile, 6, num_replicas=2)) == expected
    assert list(BalancedBatchSampler(str(profile), 6, num_replicas=2)) == expected


def test_what_is_no_data_profile_is_refused(profile, tmp_path):
    """By its kind, its format or its damage."""
    path = tmp_path / "data_profile.parquet"
    with pytest.raises(FileNotFoundError):
        BalancedBatchSampler(path, 6)
    whole = profile.read_bytes()
    for content, message in [
        (b'{"dflop": "plan", "format_version": 1}', "is not a data_profile: its field `dflop` says `plan`"),
        (b'{"dflop": "data_profile", "format_version": 1, "samples": []}', "is a data profile of format 1"),
        (whole[:-9] + bytes([whole[-9] ^ 1]) + whole[-8:], "its footer is damaged"),
        (whole[:100] + bytes([whole[100] ^ 1]) + whole[101:], "its rows are damaged"),
    ]:
        path.write_bytes(content)
        with pytest.raises(ArtifactError, match=message):
            BalancedBatchSampler(path, 6)


def test_numbers_that_cannot_work_are_refused():
    """Each with its name and rule."""
    shapes = costs(10, seed=8)
    for options, message in [
        ({"batch_size": 0}, "`batch_size` is 0, must be at least 1"),
        ({"batch_size": 2, "rank": 2, "num_replicas": 2}, "`rank` is 2, must be from 0 to 1"),
        ({"batch_size": 2, "num_replicas": 2, "num_buckets": 3}, "must be a multiple of `num_replicas` 2"),
        ({"batch_size": 1, "num_replicas": 11}, "10 samples for 11 buckets, each needs at least one"),
        ({"batch_size": 11, "drop_last": True}, "fewer than one global batch of 11"),
    ]:
        with pytest.raises(ValueError, match=message):
            BalancedBatchSampler(shapes, **options)
    with pytest.raises(ValueError, match="the costs of sample 0"):
        BalancedBatchSampler([(-1, 2)], 1)


def test_samples_without_cost_leave_no_batch_empty():
    """A DataLoader cannot collate nothing."""
    batches = epoch([(0, 0)] * 9 + [(0, 10**9)], 5, batch_size=2)
    assert all(batch for replica in batches for batch in replica)


def test_drop_last_drops_the_smaller_global_batch_alone():
    """100 samples in global batches of 24: 96 come."""
    replicas = epoch(costs(100, seed=9), 4, batch_size=6, drop_last=True)
    seen = [i for batches in replicas for batch in batches for i in batch]
    assert len(seen) == len(set(seen)) == 96


def test_the_sampler_needs_no_torch():
    """Importing dflop, balancing and iterating leaves torch and numpy alone."""
    code = (
        "import sys; sys.modules['torch'] = None\n"
        "from dflop import BalancedBatchSampler\n"
        "batches = list(BalancedBatchSampler([(1, 2)] * 8, 2, num_replicas=2))\n"
        "assert len(batches) == 2 and 'numpy' not in sys.modules and 'transformers' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


def test_a_plain_dataloader_takes_it():
    """The real DataLoader, no worker processes: its batches are the sampler's."""
    torch = pytest.importorskip("torch")
    shapes = costs(40, seed=10)
    sampler = BalancedBatchSampler(shapes, 5, num_replicas=2, rank=1)
    expected = list(BalancedBatchSampler(shapes, 5, num_replicas=2, rank=1))
    loader = torch.utils.data.DataLoader(range(40), batch_sampler=sampler)
    assert len(loader) == 4
    assert [batch.tolist() for batch in loader] == expected
