"""`BalancedStream`: a window at a time, each sample once, in order, with a state that can be loaded."""

from __future__ import annotations

import json
import pickle
import random

import pytest

torch = pytest.importorskip("torch")

from dflop import BalancedBatchSampler, BalancedStream  # noqa: E402


def samples(count, seed=1):
    """(index, encoder cost, LLM cost) of each sample."""
    draw = random.Random(seed)
    return [(i, int(draw.lognormvariate(10, 1)), int(draw.lognormvariate(11, 0.8))) for i in range(count)]


def cost(sample):
    return sample[1:]


def stream(source, rank=0, num_replicas=2, **options):
    return BalancedStream(source, cost, 4, num_replicas, rank, num_buckets=4, **options)


def indices(batches):
    return [sample[0] for batch in batches for sample in batch]


# Windows of 16: whole ones alone, a smaller one of its own, one that is added (3 samples for 4 buckets).
@pytest.mark.parametrize("count", [64, 71, 67, 16, 19, 4])
@pytest.mark.parametrize("drop_last", [False, True])
def test_each_sample_comes_once_in_its_window(count, drop_last):
    """Over all replicas, as many batches on each, none empty; the windows are those of the stream."""
    of_replicas = [list(stream(iter_of(count), rank, drop_last=drop_last)) for rank in range(2)]
    kept = count // 16 * 16 if drop_last else count
    assert sorted(indices(of_replicas[0] + of_replicas[1])) == list(range(kept))
    assert len(of_replicas[0]) == len(of_replicas[1])
    assert all(batch for batches in of_replicas for batch in batches)
    for window in range(count // 16 - 1):
        together = [batch for batches in of_replicas for batch in batches[2 * window : 2 * window + 2]]
        assert sorted(indices(together)) == list(range(16 * window, 16 * window + 16))


def iter_of(count):
    return samples(count)


def test_a_window_is_balanced_as_the_sampler_does_it():
    """The buckets of the sampler on the same samples in order."""
    rows = samples(64)
    sampler = BalancedBatchSampler(
        [cost(row) for row in rows], 4, num_buckets=4, shuffle=False, num_replicas=2
    )
    assert [[row[0] for row in batch] for batch in stream(rows)] == list(sampler)


def test_a_padded_window_is_that_of_the_sampler():
    """And a state of it goes on with padded rows alone; older states knew none."""
    rows = samples(64)
    sampler = BalancedBatchSampler(
        [cost(row) for row in rows], 4, num_buckets=4, shuffle=False, num_replicas=2, is_padded=True
    )
    padded = stream(rows, is_padded=True)
    batches = iter(padded)
    first = next(batches)
    state = padded.state_dict()
    assert [[row[0] for row in batch] for batch in [first, *batches]] == list(sampler)
    with pytest.raises(ValueError, match="has `is_padded` 1, this stream 0"):
        stream(rows).load_state_dict(state)
    plain = stream(rows)
    next(iter(plain))
    old = {name: value for name, value in plain.state_dict().items() if name != "is_padded"}
    stream(rows).load_state_dict(old)
    with pytest.raises(ValueError, match="has `is_padded` 0, this stream 1"):
        padded.load_state_dict(old)


def test_the_window_is_bounded():
    """One global batch and as many samples ahead as it has buckets: an endless stream begins at once."""
    read = []

    def endless():
        index = 0
        while True:
            read.append(index)
            yield index, 1 + index % 7, 5
            index += 1

    batches = iter(stream(endless()))
    for number in range(1, 7):
        next(batches)
        assert len(read) <= 16 * ((number + 1) // 2) + 4


class Stateful:
    """A stream that knows its place, as those of `datasets` do, and counts what it reads."""

    def __init__(self, rows):
        self.rows, self.place, self.num_read = rows, 0, 0

    def __iter__(self):
        while self.place < len(self.rows):
            self.place += 1
            self.num_read += 1
            yield self.rows[self.place - 1]

    def state_dict(self):  # noqa: D102
        return {"place": self.place}

    def load_state_dict(self, state):  # noqa: D102
        self.place = state["place"]


@pytest.mark.parametrize("make", [list, Stateful])
@pytest.mark.parametrize("new_replicas", [1, 2, 4])
@pytest.mark.parametrize("trained", [0, 1, 2, 3, 8, 9])
def test_a_state_goes_on_exactly_once(make, new_replicas, trained):
    """Stopped on 2 replicas, in a window or not; the rest on 1, 2 or 4. What has a state is not read anew."""
    rows = samples(71)
    seen, states = [], []
    for rank in range(2):
        first = stream(make(rows), rank)
        batches = iter(first)
        seen += [next(batches) for _ in range(trained)]
        states.append(json.loads(json.dumps(first.state_dict())))
    assert states[0] == states[1]
    if trained % 2 and new_replicas == 4:
        with pytest.raises(
            ValueError, match="2 buckets remain of a global batch, they do not divide among 4"
        ):
            stream(make(rows), 0, 4).load_state_dict(states[0])
        return
    rest = []
    for rank in range(new_replicas):
        source = make(rows)
        second = stream(source, rank, new_replicas)
        second.load_state_dict(states[0])
        rest += list(second)
        if make is Stateful:
            assert source.num_read == 71 - 16 * (trained // 2)
    assert sorted(indices(seen + rest)) == list(range(71))


def test_a_state_of_something_else_is_refused():
    """Another objective or size, and other costs inside a window."""
    rows = samples(64)
    first = stream(rows)
    batches = iter(first)
    next(batches)
    state = first.state_dict()
    with pytest.raises(ValueError, match="the state has `meets` step, this stream phase, must be equal"):
        stream(rows, meets="phase").load_state_dict(state)
    other = stream([(i, 1, llm) for i, _, llm in rows])
    other.load_state_dict(state)
    with pytest.raises(ValueError, match="inside a global batch that was balanced by other costs"):
        next(iter(other))
    with pytest.raises(ValueError, match="3 samples for 4 buckets, each needs at least one"):
        list(stream(rows[:3]))
    for options, message in [
        ({"meets": "no"}, "`meets` is"),
        ({"rank": 2}, "`rank` is 2, must be from 0 to 1"),
    ]:
        with pytest.raises(ValueError, match=message):
            stream(rows, **options)


def test_caps_are_kept():
    """By a function that gives the tokens of a sample."""
    rows = [(i, 1, 100 - i % 50) for i in range(64)]
    capped = stream(rows, max_tokens=40, tokens=lambda sample: 1 + sample[0] % 15)
    assert max(sum(1 + sample[0] % 15 for sample in batch) for batch in capped) <= 40


@pytest.mark.parametrize("num_workers", [0, 1, 3])
def test_a_dataloader_with_workers_keeps_the_order(num_workers):
    """Each worker reads the stream and yields its turn, from a loaded place on too."""
    rows = samples(71)
    expected = [[row[0] for row in batch] for batch in stream(rows)]

    def loader(of):
        return torch.utils.data.DataLoader(
            of, batch_size=None, num_workers=num_workers, collate_fn=indices_of
        )

    assert list(loader(stream(rows))) == expected
    first = stream(rows)
    batches = iter(first)
    next(batches)
    second = stream(rows)
    second.load_state_dict(first.state_dict())
    assert list(loader(second)) == expected[1:]


def indices_of(batch):
    return [row[0] for row in batch]


@pytest.mark.parametrize("num_workers", [0, 2])
@pytest.mark.parametrize("trained", [1, 4, 7])
def test_a_stateful_dataloader_resumes_it(num_workers, trained):
    """The real torchdata, with workers that read ahead."""
    stateful = pytest.importorskip("torchdata.stateful_dataloader")
    rows = samples(71)
    expected = [[row[0] for row in batch] for batch in stream(rows)]

    def loader():
        return stateful.StatefulDataLoader(
            stream(rows), batch_size=None, num_workers=num_workers, collate_fn=indices_of
        )

    first = loader()
    batches = iter(first)
    seen = [next(batches) for _ in range(trained)]
    state = pickle.loads(pickle.dumps(first.state_dict()))
    del batches
    second = loader()
    second.load_state_dict(state)
    assert seen + list(second) == expected


def test_a_stream_of_hugging_face_keeps_its_own_state():
    """The real `datasets.IterableDataset`: gone on from inside a window, on one replica, not two."""
    datasets = pytest.importorskip("datasets")
    rows = [{"index": i, "encoder": encoder, "llm": llm} for i, encoder, llm in samples(71)]

    def of(rank, num_replicas):
        source = datasets.Dataset.from_list(rows).to_iterable_dataset(num_shards=3)
        return BalancedStream(
            source, lambda row: (row["encoder"], row["llm"]), 4, num_replicas, rank, num_buckets=4
        )

    seen, state = [], {}
    for rank in range(2):
        first = of(rank, 2)
        batches = iter(first)
        seen += [next(batches) for _ in range(5)]
        state = json.loads(json.dumps(first.state_dict()))
    assert (state["samples"], state["buckets_taken"]) == (32, 2)
    assert state["source"] is not None
    second = of(0, 1)
    second.load_state_dict(state)
    assert sorted(row["index"] for batch in [*seen, *second] for row in batch) == list(range(71))
