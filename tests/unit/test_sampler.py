"""`BalancedBatchSampler`: each sample once, even work, as many batches on each replica, and no torch."""

from __future__ import annotations

import json
import random
import subprocess
import sys
import warnings
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
    cost = dict(zip(good, zip(sampler._encoder_cost, sampler._llm_cost, strict=True), strict=True))
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
        sampler = BalancedBatchSampler(shapes, 8, num_replicas=8, **options)
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
        ({"batch_size": 1, "seed": -1}, "`seed` is -1, must be from 0 to 18446744073709551615"),
        ({"batch_size": 1, "seed": 2**64}, "`seed` is 18446744073709551616, must be from 0"),
        ({"batch_size": 1, "giant_steps_max": -1}, "`giant_steps_max` is -1, must be at least 0"),
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
