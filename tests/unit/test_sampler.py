"""`BalancedBatchSampler`: each sample once, even work, as many batches on each replica, and no torch."""

from __future__ import annotations

import json
import random
import subprocess
import sys

import pytest
from drawn_costs import costs, epoch, with_giants

from dflop import BalancedBatchSampler, balance
from dflop import costs as costs_of


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
    sampler = BalancedBatchSampler(shapes, 8, num_replicas=8, shuffle=False, meets="pipeline")
    for number in range(8):
        balanced += slowest(sampler.buckets(number))
        arrival += slowest([range(64 * number + 8 * k, 64 * number + 8 * k + 8) for k in range(8)])
    assert balanced < 0.75 * arrival


def test_replicas_that_run_together_have_neighbouring_buckets():
    """With several buckets a replica, each slot takes the next heaviest: none waits for a giant."""
    shapes = costs(64, seed=4)
    for meets in ("phase", "pipeline"):
        options = {"num_buckets": 8, "shuffle": False, "meets": meets}
        sampler = BalancedBatchSampler(shapes, 4, num_replicas=2, **options)
        loads = [sum(sum(shapes[i]) for i in bucket) for bucket in sampler.buckets(0)]
        if meets == "pipeline":
            assert loads == sorted(loads, reverse=True)
        replicas = epoch(shapes, 2, batch_size=4, **options)
        together = [b for pair in zip(*replicas, strict=True) for b in pair]
        assert together[:8] == sampler.buckets(0)


def waits(shapes, buckets, num_replicas, meets):
    """What replicas wait for in a global batch, by the definition of each layout."""
    loads = [[sum(shapes[i][k] for i in bucket) for k in (0, 1)] for bucket in buckets]
    if meets == "step":
        return max(sum(sum(load) for load in loads[rank::num_replicas]) for rank in range(num_replicas))
    slots = [loads[at : at + num_replicas] for at in range(0, len(loads), num_replicas)]
    most = [[max(load[k] for load in slot) for k in (0, 1)] for slot in slots]
    return sum(map(sum, most)) if meets == "phase" else max(map(max, most))


@pytest.mark.parametrize(("batch_size", "num_replicas", "num_buckets"), [(4, 16, 16), (4, 4, 16)])
def test_each_objective_is_the_best_of_the_three_for_its_layout(batch_size, num_replicas, num_buckets):
    """Lognormal costs, one bucket a replica and four: the sum over three global batches."""
    shapes = costs(3 * batch_size * num_buckets, seed=21)
    options = {"num_replicas": num_replicas, "num_buckets": num_buckets}
    layouts = ("step", "phase", "pipeline")
    samplers = {meets: BalancedBatchSampler(shapes, batch_size, meets=meets, **options) for meets in layouts}
    for layout in layouts:
        waited = {
            meets: sum(waits(shapes, sampler.buckets(k), num_replicas, layout) for k in range(3))
            for meets, sampler in samplers.items()
        }
        # A pipeline's search weighs more exchanges: with microbatches of giants it may come as near by
        # chance.
        assert waited[layout] <= 1.02 * min(waited.values()), (layout, waited)
        if layout == "step":
            # No replica waits for more than the work itself, or the largest sample.
            works = [[sum(shapes[i]) for b in samplers["step"].buckets(k) for i in b] for k in range(3)]
            assert waited["step"] < 1.01 * sum(max(sum(work) / num_replicas, max(work)) for work in works)
            assert waited["pipeline"] > 1.01 * waited["step"]


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


# 100 samples: whole batches alone, a rest of its own (4 of 16), one that is added (4 of 24 in 8 buckets).
@pytest.mark.parametrize(("batch_size", "num_buckets"), [(25, 2), (4, 4), (3, 8)])
@pytest.mark.parametrize("shuffle", [True, False])
@pytest.mark.parametrize("steps_max", [0, 2, 50])
def test_giants_wait_for_each_other_and_no_longer_than_promised(batch_size, num_buckets, shuffle, steps_max):
    """Each sample once; a giant not before the plain order has it, at most so many batches after."""
    shapes, giants = with_giants(100, seed=11)
    options = {"num_buckets": num_buckets, "shuffle": shuffle, "seed": 4}
    plain = BalancedBatchSampler(shapes, batch_size, **options)
    waiting = BalancedBatchSampler(
        shapes, batch_size, **options, giant_llm_cost=10**6, giant_steps_max=steps_max
    )
    assert len(waiting) == len(plain)
    for epoch_index in (0, 3):
        placed = []
        for sampler in (plain, waiting):
            sampler.set_epoch(epoch_index)
            num_batches = len(sampler) // num_buckets
            of_step = [sorted(i for b in sampler.buckets(k) for i in b) for k in range(num_batches)]
            placed.append({i: k for k, samples in enumerate(of_step) for i in samples})
            assert sorted(i for samples in of_step for i in samples) == list(range(100))
            sizes = [len(samples) for samples in of_step]
            placed.append(sizes)
        came, plain_sizes, stands, sizes = placed
        assert sizes == plain_sizes
        for sample in range(100):
            late = stands[sample] - came[sample]
            assert 0 <= late <= steps_max if sample in giants else late <= 0
        gathered = {stands[giant] for giant in giants}
        if steps_max == 50:
            # Eight of them fit the last batch, or the last two where that is a rest.
            assert len(gathered) <= 2


def test_giants_are_left_out_no_more_often_than_others():
    """With `drop_last` those that come last go, not giants that were made to wait: the same as without."""
    shapes, _ = with_giants(100, seed=12)
    kept = []
    for giant_llm_cost in (None, 10**6):
        sampler = BalancedBatchSampler(
            shapes, 4, num_buckets=8, drop_last=True, giant_llm_cost=giant_llm_cost, giant_steps_max=9
        )
        kept.append([sorted(i for batch in sampler for i in batch) for _ in range(3)])
    assert kept[0] == kept[1]
    assert len(kept[0][0]) == 96


def test_waiting_giants_shorten_an_epoch():
    """The sum over global batches of the longest bucket, one bucket a replica."""
    shapes, _ = with_giants(768, seed=13, every=96)

    def length(**options):
        sampler = BalancedBatchSampler(shapes, 8, num_replicas=8, meets="pipeline", **options)
        steps = [max(sum(shapes[i][1] for i in bucket) for bucket in sampler.buckets(k)) for k in range(12)]
        return sum(steps)

    assert length(giant_llm_cost=10**6, giant_steps_max=11) < 0.9 * length()


def test_no_bucket_passes_its_caps():
    """With a batch size they are hard: kept, or an error that names value and limit."""
    shapes = costs(96, seed=16)
    draw = random.Random(16)
    tokens, sizes = [draw.randint(1, 60) for _ in shapes], [draw.randint(1, 9) for _ in shapes]
    found = costs_of(shapes, tokens=tokens, bytes=sizes)
    for meets in ("step", "phase", "pipeline"):
        options = {"max_tokens": 140, "max_bytes": 26, "num_buckets": 8, "meets": meets}
        batches = [b for replica in epoch(found, 2, batch_size=4, **options) for b in replica]
        assert sorted(i for batch in batches for i in batch) == list(range(96))
        assert max(sum(tokens[i] for i in batch) for batch in batches) <= 140
        assert max(sum(sizes[i] for i in batch) for batch in batches) <= 26
    with pytest.raises(ValueError, match="sample .* needs .* tokens, a bucket holds at most 50"):
        BalancedBatchSampler(found, 4, max_tokens=50)
    with pytest.raises(ValueError, match="tokens in the fullest of 8 buckets, a bucket holds at most 60"):
        list(BalancedBatchSampler(found, 4, num_buckets=8, max_tokens=60))
    with pytest.raises(ValueError, match="cannot keep `max_tokens` 60: `tokens` is missing") as error:
        BalancedBatchSampler(shapes, 4, max_tokens=60)
    assert error.value.__notes__ == ["give them with `dflop.costs(..., tokens=...)`"]
    with pytest.raises(ValueError, match="a bucket holds at most 50") as error:
        BalancedBatchSampler(found, 4, max_tokens=50)
    assert "raise `max_tokens`, or" in error.value.__notes__[0]


@pytest.mark.parametrize("num_replicas", [1, 2, 4])
@pytest.mark.parametrize("shuffle", [True, False])
def test_without_a_batch_size_as_many_come_as_fit(num_replicas, shuffle):
    """Each sample once, no bucket over its cap, nearly full; resumed exactly once on other replicas."""
    shapes = costs(500, seed=17)
    draw = random.Random(17)
    tokens = [draw.randint(1, 400) for _ in shapes]
    found = costs_of(shapes, tokens=tokens)
    options = {"max_tokens": 1000, "num_buckets": 4, "shuffle": shuffle}
    samplers = [
        BalancedBatchSampler(found, num_replicas=num_replicas, rank=r, **options) for r in range(num_replicas)
    ]
    lengths = [len(sampler) for sampler in samplers]
    replicas = [list(sampler) for sampler in samplers]
    assert [len(batches) for batches in replicas] == lengths
    assert len(set(lengths)) == 1
    batches = [batch for batches in replicas for batch in batches]
    assert sorted(i for batch in batches for i in batch) == list(range(500))
    assert max(sum(tokens[i] for i in batch) for batch in batches) <= 1000
    # Nearly full: what one sample more would not fit.
    assert len(batches) <= 1.06 * sum(tokens) / 1000 + 4
    again = [
        BalancedBatchSampler(found, num_replicas=num_replicas, rank=r, **options) for r in range(num_replicas)
    ]
    slots = 4 // num_replicas
    state = again[0].state_dict(num_batches=3 * slots + slots // 2)
    seen = [b for batches in replicas for b in batches[: 3 * slots + slots // 2]]
    rest = []
    for rank in range(2):
        if state["buckets_taken"] % 2:
            break
        other = BalancedBatchSampler(found, num_replicas=2, rank=rank, **options)
        other.load_state_dict(json.loads(json.dumps(state)))
        rest += list(other)
    else:
        assert sorted(i for batch in seen + rest for i in batch) == list(range(500))


def test_eight_samples_of_seven_tokens_take_eight_buckets_of_eight():
    """By the sum of their tokens seven would do (56 / 8); no bucket holds two."""
    found = costs_of([(0, 7)] * 8, tokens=[7] * 8)
    for num_buckets in (1, 2, 4, 8):
        batches = list(BalancedBatchSampler(found, num_buckets=num_buckets, max_tokens=8))
        assert sorted(map(len, batches)) == [1] * 8
    answer = balance([0] * 8, [7] * 8, None, tokens=[7] * 8, bucket_tokens_max=8)
    assert sorted(answer.assignment) == list(range(8))
    with pytest.raises(
        ValueError, match="8 samples need at least 14 tokens in the fullest of 7 buckets, .* at most 8"
    ):
        balance([0] * 8, [7] * 8, 7, tokens=[7] * 8, bucket_tokens_max=8)
    with pytest.raises(ValueError, match="cannot choose a number of buckets for 8 samples: there is no cap"):
        balance([0] * 8, [7] * 8, None)


def test_an_uneven_tail_leaves_no_batch_empty():
    """It takes samples of the global batch before it; where that has none to spare, it is an error."""
    # 4 buckets of at most 3 samples: 12, 12, and 2 left, which take two of those before them.
    found = costs_of([(0, 1)] * 26, tokens=[1] * 26)
    for num_replicas in (1, 2, 4):
        replicas = epoch(found, num_replicas, num_buckets=4, max_tokens=3)
        assert sorted(i for batches in replicas for batch in batches for i in batch) == list(range(26))
        assert all(batch for batches in replicas for batch in batches)
        sizes = [sum(len(batches[k]) for batches in replicas) for k in range(len(replicas[0]))]
        assert sum(sizes[: len(sizes) // 3]) == 12
        assert sum(sizes[-len(sizes) // 3 :]) == 4
    nine = costs_of([(0, 7)] * 9, tokens=[7] * 9)
    with pytest.raises(
        ValueError, match=r"the last 1 samples of epoch 0 cannot fill 8 buckets.*`drop_last=True`"
    ):
        list(BalancedBatchSampler(nine, num_buckets=8, max_tokens=8))
    assert len(list(BalancedBatchSampler(nine, num_buckets=8, max_tokens=8, drop_last=True))) == 8
    assert len(BalancedBatchSampler(nine, num_buckets=8, max_tokens=8, drop_last=True)) == 8


def test_numbers_that_cannot_work_are_refused():
    """Each with its name and rule."""
    shapes = costs(10, seed=8)
    for options, message in [
        ({"batch_size": 0}, "`batch_size` is 0, must be at least 1"),
        ({"batch_size": 2, "rank": 2, "num_replicas": 2}, "`rank` is 2, must be from 0 to 1"),
        ({"batch_size": 2, "num_replicas": 2, "num_buckets": 3}, "must be a multiple of `num_replicas` 2"),
        ({"batch_size": 1, "num_replicas": 11}, "10 samples for 11 buckets, each needs at least one"),
        ({"batch_size": 11, "drop_last": True}, "fewer than one global batch of 11"),
        ({"batch_size": 1, "seed": -1}, "`seed` is -1, must be from 0 to 18446744073709551615"),
        ({"batch_size": 1, "seed": 2**64}, "`seed` is 18446744073709551616, must be from 0"),
        ({"batch_size": 1, "giant_steps_max": -1}, "`giant_steps_max` is -1, must be from 0 to 4294967295"),
        ({"batch_size": 1, "meets": "often"}, "`meets` is 'often', must be one of: step, phase, pipeline"),
        ({"batch_size": 1.5}, "`batch_size` is 1.5, must be an integer at least 1"),
        ({"batch_size": None}, "`batch_size` is None, must be at least 1 where there is no `max_tokens`"),
        ({"batch_size": 1, "max_tokens": 0}, "`max_tokens` is 0, must be from 1"),
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
    subprocess.run([sys.executable, "-c", code], check=True, timeout=300)


def test_a_plain_dataloader_takes_it():
    """The real DataLoader, no worker processes: its batches are the sampler's."""
    torch = pytest.importorskip("torch")
    shapes = costs(40, seed=10)
    sampler = BalancedBatchSampler(shapes, 5, num_replicas=2, rank=1)
    expected = list(BalancedBatchSampler(shapes, 5, num_replicas=2, rank=1))
    loader = torch.utils.data.DataLoader(range(40), batch_sampler=sampler)
    assert len(loader) == 4
    assert [batch.tolist() for batch in loader] == expected


def padded_work(shapes, bucket):
    """What a bucket takes if its rows are padded to its longest."""
    return sum(shapes[i][0] for i in bucket) + len(bucket) * max(shapes[i][1] for i in bucket)


@pytest.mark.parametrize("num_buckets", [4, 8])
def test_padded_rows_are_balanced_as_padded(num_buckets):
    """Each sample once, the same global batches, and far less waiting than with buckets even in real tokens."""
    shapes = costs(256, seed=8)
    options = {"batch_size": 4, "num_buckets": num_buckets}
    ours = epoch(shapes, 4, is_padded=True, **options)
    assert sorted(i for batches in ours for batch in batches for i in batch) == list(range(256))
    plain, padded = (
        BalancedBatchSampler(shapes, is_padded=is_padded, **options) for is_padded in (False, True)
    )

    def waits(sampler):
        every = range(256 // (4 * num_buckets))
        ranks = [[sampler.buckets(step)[rank::4] for rank in range(4)] for step in every]
        return sum(max(sum(padded_work(shapes, b) for b in rank) for rank in step) for step in ranks)

    for step in range(256 // (4 * num_buckets)):
        together = [sorted(i for bucket in s.buckets(step) for i in bucket) for s in (plain, padded)]
        assert together[0] == together[1]
    assert waits(padded) < 0.8 * waits(plain)


def test_caps_hold_for_padded_rows():
    """With a batch size a cap that cannot be kept is an error; without one as many samples come as fit."""
    lengths = [90, 10, 10, 10, 10, 10, 10, 90] * 8
    found = costs_of([(0, length) for length in lengths], tokens=lengths)
    for batch_size in (None, 4):
        sampler = BalancedBatchSampler(found, batch_size, num_buckets=2, max_tokens=360, is_padded=True)
        buckets = list(sampler)
        assert sorted(i for bucket in buckets for i in bucket) == list(range(64))
        assert all(len(bucket) * max(lengths[i] for i in bucket) <= 360 for bucket in buckets)
    sampler = BalancedBatchSampler(found, 4, num_buckets=2, max_tokens=90, is_padded=True)
    with pytest.raises(ValueError, match="no packing found: 8 samples into 2 buckets of 90 tokens"):
        sampler.buckets(0)
