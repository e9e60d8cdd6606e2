"""`BalancedBatchSampler`: each sample once, even work, as many batches on each replica, and no torch."""

from __future__ import annotations

import copy
import json
import pickle
import random
import subprocess
import sys
import tracemalloc
import warnings
from types import SimpleNamespace

import pytest
from pyarrow import parquet

from dflop import ArtifactError, BalancedBatchSampler, balance
from dflop import costs as costs_of
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


@pytest.mark.parametrize(
    ("entries", "message"),
    [
        (
            [(1, 2, 999)] * 4,
            r"sample 0 is \(1, 2, 999\), must be a pair \(encoder cost, LLM cost\) or a shape",
        ),
        ([(1, 2), (1, 2, 3)], r"sample 1 is \(1, 2, 3\), must be a pair .*, as sample 0 is"),
        ([(1, 2), {"llm_tokens": 3}], "sample 1 is .*, must be a pair .*, as sample 0 is"),
        ([{"llm_tokens": 3, "encoder_tokens": 0}, (1, 2)], "sample 1 is .*, must be a shape .*, as sample 0"),
        (
            [(1, 2), (1, float("nan"))],
            r"the costs of sample 1 are \(1, nan\), must be numbers, finite and not",
        ),
        ([(1, 2), ("3", 4)], "the costs of sample 1 are .*, must be numbers, finite and not negative"),
    ],
)
def test_a_wrong_entry_is_named(entries, message):
    """By its index, its value and the rule; nothing of it is dropped in silence."""
    with pytest.raises(ValueError, match=message):
        BalancedBatchSampler(entries, batch_size=1)


class Rows:
    """What arrays and tensors have in common."""

    def __init__(self, rows):
        self.rows = rows

    def tolist(self):  # noqa: D102
        return self.rows


def test_an_array_is_the_list_of_its_rows():
    """Of tensor shape (samples, 2); another one is refused."""
    pairs = costs(40, seed=3)
    expected = epoch(pairs, 2, batch_size=4)
    assert epoch(Rows([list(pair) for pair in pairs]), 2, batch_size=4) == expected
    torch = pytest.importorskip("torch")
    for array in (torch.tensor(pairs), torch.tensor(pairs).numpy()):
        assert epoch(array, 2, batch_size=4) == expected
    with pytest.raises(ValueError, match=r"sample 0 is \[1, 2, 3\], must be a pair"):
        BalancedBatchSampler(torch.tensor([[1, 2, 3]]), 1)


def bad_demo(folder, policy):
    """A demo whose records 0, 2 and 3 of the first source cannot be read; its profile."""
    assert run_cli(["dflop", "demo-data", str(folder), "--samples", "24"]) == (0, None)
    config = folder / "dflop.yaml"
    config.write_text(config.read_text().replace("on_bad_sample: fail", f"on_bad_sample: {policy}"))
    images = folder / "data/images.jsonl"
    lines = images.read_text().splitlines()
    lines = ["{" if index in {0, 2, 3} else line for index, line in enumerate(lines)]
    images.write_text("\n".join(lines) + "\n")
    assert run_cli(["dflop", "profile", "data", "-c", str(config)]) == (0, None)
    return folder / "data_profile.parquet"


@pytest.mark.parametrize("policy", ["skip", "substitute"])
def test_indices_of_a_profile_are_positions_in_the_dataset(policy, tmp_path):
    """Bad samples keep their place and never come; each index has the sizes of its own record."""
    path = bad_demo(tmp_path / "demo", policy)
    with pytest.warns(UserWarning, match="data_profile.parquet`: 3 of 24 samples are bad and never come"):
        sampler = BalancedBatchSampler(path, 4, shuffle=False)
    good = [index for index in range(24) if index not in {0, 2, 3}]
    assert sorted(i for batch in sampler for i in batch) == good
    # A record's id says where it stands; ids of the second source are others.
    rows = {row["id"]: row for row in parquet.read_table(path).to_pylist()}
    records = []
    lines = (tmp_path / "demo/data/images.jsonl").read_text().splitlines()
    records += [None if line == "{" else json.loads(line) for line in lines]
    records += json.loads((tmp_path / "demo/data/videos.json").read_text())
    assert len(records) == 24
    of_record = {i: rows[records[i]["id"]] for i in good}
    found = costs_of(path)
    assert list(found.positions) == good
    cost = dict(zip(good, zip(found.encoder_ns, found.llm_ns, strict=True), strict=True))
    largest = max(good, key=lambda i: of_record[i]["llm_tokens"])
    assert max(good, key=lambda i: cost[i][1]) == largest
    assert [cost[i][0] > 0 for i in good] == [of_record[i]["encoder_tokens"] > 0 for i in good]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        BalancedBatchSampler(path, 4, num_replicas=2, rank=1)


def test_a_profile_that_is_not_of_all_records_is_refused(tmp_path):
    """A part, a random sample, a mixture that draws: a row stands for another sample of the dataset."""
    folder = tmp_path / "demo"
    assert run_cli(["dflop", "demo-data", str(folder), "--samples", "24"]) == (0, None)
    config, path = str(folder / "dflop.yaml"), folder / "data_profile.parquet"
    assert run_cli(["dflop", "profile", "data", "-c", config, "--sample", "10"]) == (0, None)
    with pytest.raises(ArtifactError, match="holds 10 samples drawn of 24") as caught:
        BalancedBatchSampler(path, 4)
    assert "without `--sample`" in caught.value.__notes__[0]
    assert run_cli(["dflop", "profile", "data", "-c", config, "--shard", "0/2"]) == (0, None)
    with pytest.raises(ArtifactError, match="is part 0 of 2"):
        BalancedBatchSampler(folder / "data_profile-0-of-2.parquet", 4)
    mixture = folder / "data/mixture.yaml"
    text = mixture.read_text()
    assert "images.jsonl" in text
    mixture.write_text(
        text[: text.index("  - json_path: videos")].replace("strategy: all", "strategy: end:5")
    )
    assert run_cli(["dflop", "profile", "data", "-c", config]) == (0, None)
    with pytest.raises(ArtifactError, match="no record 0 of source `images.jsonl`, which the mixture leaves"):
        BalancedBatchSampler(path, 1)


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
        assert waited[layout] == min(waited.values()), (layout, waited)
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


def with_giants(count, seed, every=12):
    """Costs and the giants among them: one sample in `every`, longer than ten others."""
    shapes = costs(count, seed)
    giants = set(random.Random(seed).sample(range(count), count // every))
    return [(e, 10**6 + t if i in giants else min(t, 10**6)) for i, (e, t) in enumerate(shapes)], giants


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


def test_giants_are_named_in_the_unit_that_was_given(profile):
    """Tokens of shapes and of a data profile, before anything is scaled."""
    rows = parquet.read_table(profile).to_pylist()
    limit = sorted(row["llm_tokens"] for row in rows)[-4]
    options = {"num_replicas": 2, "giant_llm_cost": limit}
    expected = list(BalancedBatchSampler(rows, 3, **options))
    assert list(BalancedBatchSampler(profile, 3, **options)) == expected
    assert BalancedBatchSampler(rows, 3, **options).state_dict()["num_giants"] == 3
    assert expected != list(BalancedBatchSampler(rows, 3, num_replicas=2))
    # Nothing above it: as if there were no limit.
    none = BalancedBatchSampler(rows, 3, num_replicas=2, giant_llm_cost=10**9)
    assert list(none) == list(BalancedBatchSampler(rows, 3, num_replicas=2))


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


@pytest.mark.parametrize(
    ("entries", "message"),
    [
        ([(2**62, 2**62)] * 8, r"costs are too large: `encoder_ns \+ llm_ns` of the 4 largest samples is"),
        (
            [{"llm_tokens": float("nan"), "encoder_tokens": 0}] * 8,
            "`llm_tokens` of sample 0 is nan, must be a whole",
        ),
        (
            [{"llm_tokens": 3, "encoder_tokens": float("inf")}] * 8,
            "`encoder_tokens` of sample 0 is inf, must be",
        ),
        ([{"llm_tokens": -3, "encoder_tokens": 0}] * 8, "`llm_tokens` of sample 0 is -3, must be"),
        ([{"llm_tokens": 2.5, "encoder_tokens": 0}] * 8, "`llm_tokens` of sample 0 is 2.5, must be"),
    ],
)
def test_costs_that_cannot_be_added_up_are_refused_at_once(entries, message):
    """Before the first batch, by sample, value and rule."""
    with pytest.raises(ValueError, match=message):
        BalancedBatchSampler(entries, 2, num_replicas=2)


def test_arrays_are_read_from_memory():
    """Of every kind of number, contiguous or not: the batches of the same lists."""
    numpy = pytest.importorskip("numpy")
    torch = pytest.importorskip("torch")
    pairs = [(e % 200, t % 120) for e, t in costs(40, seed=3)]
    expected = epoch(pairs, 2, batch_size=4)
    for kind in ("int8", "uint8", "int16", "uint16", "int32", "uint32", "int64", "uint64"):
        small = numpy.array([(e % 100, t) for e, t in pairs] if kind == "int8" else pairs)
        array = small.astype(kind)
        assert epoch(array, 2, batch_size=4) == epoch(
            [tuple(map(int, row)) for row in small], 2, batch_size=4
        )
        wide = numpy.zeros((80, 4), dtype=kind)
        wide[::2, 1:3] = small
        assert epoch(wide[::2, 1:3], 2, batch_size=4) == epoch(array, 2, batch_size=4)
    halves = numpy.array(pairs) / 2
    of_floats = epoch([tuple(map(float, row)) for row in halves], 2, batch_size=4)
    for kind in ("float32", "float64", ">f8", "float16"):
        assert epoch(halves.astype(kind), 2, batch_size=4) == of_floats
    assert epoch(torch.tensor(pairs), 2, batch_size=4) == expected
    assert epoch(torch.tensor(halves, dtype=torch.bfloat16).float(), 2, batch_size=4)
    for array, message in [
        (numpy.array([[1, -2]] * 4), r"the costs of sample 0 are \(1, -2\), must be numbers, finite and not"),
        (numpy.array([[1, 2], [1, numpy.nan]]), r"the costs of sample 1 are \(1.0, NaN\), must be numbers"),
        (numpy.zeros((0, 2)), "there are no samples"),
        (numpy.array([1, 2, 3]), "sample 0 is 1, must be a pair"),
    ]:
        with pytest.raises(ValueError, match=message):
            BalancedBatchSampler(array, 1)


def test_costs_are_a_function_of_the_index():
    """Called once for each sample; without their number it is an error."""
    pairs = costs(40, seed=3)
    calls = []

    def cost(index):
        calls.append(index)
        return pairs[index]

    expected = list(BalancedBatchSampler(pairs, 4))
    assert list(BalancedBatchSampler(cost, 4, num_samples=40)) == expected
    assert calls == list(range(40))
    with pytest.raises(
        ValueError, match="`num_samples` is None, must be at least 1 where costs are a function"
    ):
        BalancedBatchSampler(cost, 4)


def test_costs_are_columns_that_others_can_read(profile):
    """Of a profile with its tokens; the answer is a source again."""
    rows = parquet.read_table(profile).to_pylist()
    found = costs_of(profile)
    assert len(found) == len(found.encoder_ns) == 24
    assert list(found.tokens) == [row["llm_tokens"] for row in rows]
    assert (found.positions, found.num_bad, found.bytes) == (None, 0, None)
    assert list(BalancedBatchSampler(found, 3)) == list(BalancedBatchSampler(profile, 3))
    pairs = costs(10, seed=1)
    assert list(zip(costs_of(pairs).encoder_ns, costs_of(pairs).llm_ns, strict=True)) == pairs
    sized = costs_of(pairs, tokens=range(10), bytes=[7] * 10)
    assert (list(sized.tokens), list(sized.bytes)) == (list(range(10)), [7] * 10)
    for given, message in [
        ([1] * 9, "`tokens` has 9 samples, the costs have 10"),
        ([1] * 9 + [-1], "`tokens` of sample 9 is -1, must be a whole number"),
    ]:
        with pytest.raises(ValueError, match=message):
            costs_of(pairs, tokens=given)


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
    with pytest.raises(ValueError, match="cannot keep `bucket_tokens_max` 60: `tokens` is missing"):
        BalancedBatchSampler(shapes, 4, max_tokens=60)


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


def test_a_large_dataset_is_held_outside_python():
    """A million samples of an array: their costs and order, and no Python object for each."""
    numpy = pytest.importorskip("numpy")
    array = numpy.random.default_rng(1).lognormal(0, 1, (1_000_000, 2))
    sampler = BalancedBatchSampler(array, 4, num_replicas=64)
    tracemalloc.start()
    batch = next(iter(sampler))
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert len(batch) > 0
    assert peak < 200_000
    assert len(sampler) == 3907


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
