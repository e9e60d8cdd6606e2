"""Whether the samples that come are those of the data profile."""

from __future__ import annotations

import json
import random

import pytest

from dflop.runtime.population import LIMIT, Population, _add, _nothing

KINDS = ["image"] * 50 + ["text"] * 30 + ["video"] * 15 + ["multi_image"] * 4 + ["audio"]
SOURCES = ["web", "web", "web", "books", "clips"]


class MadeUp:
    """A dataset of 10,000 samples, of each kind and source its share."""

    def __len__(self):
        return 10_000

    def kind(self, sample):
        return KINDS[sample % 100]

    def source(self, sample):
        return SOURCES[sample // 100 % 5]


def draw(num_steps, seed, keeps=lambda dataset, sample: True, batch=64):
    """Steps of samples as an epoch gives them, without replacement; those that `keeps` refuses are left out."""
    dataset, drawn = MadeUp(), random.Random(seed)
    order: list[int] = []
    for _ in range(num_steps):
        if len(order) < batch:
            order = drawn.sample(range(len(dataset)), len(dataset))
        yield [s for s in (order.pop() for _ in range(batch)) if keeps(dataset, s)]


@pytest.mark.parametrize("seed", range(5))
def test_a_thousand_steps_of_the_profile_raise_no_alarm(seed):
    """Kinds of one sample in a hundred among them."""
    population = Population(MadeUp())
    assert [event for samples in draw(1_000, seed) for event in population.step(samples)] == []


def test_a_source_that_is_gone_is_named_once():
    """Named within a few steps with the shares of both; its kinds are as they were."""
    population = Population(MadeUp())
    for samples in draw(50, 1):
        assert population.step(samples) == []
    gone = draw(200, 2, lambda dataset, sample: dataset.source(sample) != "clips")
    found = [(step, event) for step, samples in enumerate(gone) for event in population.step(samples)]
    # The other sources have more, which is sure later.
    first_step, first = found[0]
    assert first_step < 12
    assert first["cause"] == "population"
    assert "samples of source `clips` are 0.0 % of those trained in the last" in first["words"]
    assert "20.0 % of the data profile" in first["words"]
    assert all("source" in event["words"] for _, event in found)
    names = [event["words"].split("`")[1] for _, event in found]
    assert len(names) == len(set(names)) <= 3
    # Back as it was, and gone again: a new alarm.
    for samples in draw(100, 3):
        population.step(samples)
    again = draw(20, 4, lambda dataset, sample: dataset.source(sample) != "clips")
    assert any("`clips`" in event["words"] for samples in again for event in population.step(samples))


def test_a_kind_that_comes_more_often_is_named():
    """Three times as many videos: 15 % become 35 %."""
    population = Population(MadeUp())
    thinned = draw(
        400, 5, lambda dataset, sample: dataset.kind(sample) == "video" or sample % 3 == 0, batch=128
    )
    words = [event["words"] for samples in thinned for event in population.step(samples)]
    assert any("kind `video` are 3" in text for text in words), words


def test_a_population_that_was_kept_raises_no_alarm_twice():
    """The same events with and without a checkpoint in between, at each step."""
    steps = list(draw(60, 6, lambda dataset, sample: dataset.source(sample) != "clips"))
    whole, kept = Population(MadeUp()), Population(MadeUp())
    for samples in steps:
        state = json.loads(json.dumps(kept.state()))
        kept = Population(MadeUp())
        kept.load(state)
        assert kept.step(samples) == whole.step(samples)


def test_evidence_is_the_likelihood_ratio():
    """By hand: share 0.5, odds of 1.5 are a share of 0.6; three of four samples."""
    change = _nothing()["more"]
    assert not _add(change, 3, 4, 0.5, 1.5)
    # 0.6^3 0.4 / 0.5^4 = 1.3824, whose logarithm is 0.32382.
    assert change["sum"] == pytest.approx(0.3238213, abs=1e-6)
    assert not _add(change, 0, 8, 0.5, 1.5)
    assert change["sum"] == 0.0
    assert _add(change, 400, 400, 0.5, 1.5)
    assert change["sum"] == 2 * LIMIT
