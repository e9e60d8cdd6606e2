"""What `BalancedBatchSampler` takes: pairs, shapes, arrays, functions and data profiles; the rest by name."""

from __future__ import annotations

import json
import tracemalloc
import warnings
from types import SimpleNamespace

import pytest
from drawn_costs import costs, epoch
from pyarrow import parquet

from dflop import ArtifactError, BalancedBatchSampler
from dflop import costs as costs_of
from dflop._native import run_cli
from dflop.integrations import balanced_loader


@pytest.fixture(scope="module")
def profile(tmp_path_factory):
    """The path of a data profile, as the command line writes it."""
    folder = tmp_path_factory.mktemp("sampler") / "demo"
    assert run_cli(["dflop", "demo-data", str(folder), "--samples", "24"]) == (0, None)
    assert run_cli(["dflop", "profile", "data", "-c", str(folder / "dflop.yaml")]) == (0, None)
    return folder / "data_profile.parquet"


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
        (None, "costs are None, must be a pair .* for each sample, or the path of a data profile"),
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


@pytest.mark.filterwarnings("ignore:.*are bad and never come")
def test_a_loader_is_given_the_dataset_that_the_costs_are_of(tmp_path):
    """Bad records count; a longer dataset would have samples that nobody trains, a shorter one would end in between."""
    path = bad_demo(tmp_path / "demo", "skip")
    loader = balanced_loader(list(range(24)), path, 4, collate_fn=list)
    assert sorted(i for batch in loader for i in batch) == [i for i in range(24) if i not in {0, 2, 3}]
    for length in (21, 25):
        message = rf"costs of 21 samples and 3 bad ones, and `dataset` has {length}, must be equal"
        with pytest.raises(ValueError, match=message):
            balanced_loader(list(range(length)), path, 4)
    with pytest.raises(ValueError, match="costs of 8 samples, and `dataset` has 9, must be equal"):
        balanced_loader(list(range(9)), [(1, 1)] * 8, 4)


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
