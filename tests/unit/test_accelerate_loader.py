"""The loader of accelerate goes on where its sampler stands, and warns where steps would not be those of the sampler."""

from __future__ import annotations

import warnings

import pytest
from accelerate import Accelerator, skip_first_batches
from accelerate.state import AcceleratorState, GradientState
from accelerate.utils import GradientAccumulationPlugin

from dflop.integrations.accelerate import balanced

COSTS = [(0, 1 + 7 * i % 50) for i in range(24)]


@pytest.fixture(autouse=True)
def _alone():
    """Nothing that accelerate kept of another test, nor leaves to one."""
    yield
    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()


def made(**options):
    accelerator = Accelerator(cpu=True, **options)
    loader = balanced(accelerator, list(range(24)), COSTS, batch_size=4, collate_fn=list)
    return accelerator.prepare(loader)


def epochs(loader, count):
    return [list(loader) for _ in range(count)]


def test_a_loaded_place_is_gone_on_from():
    """In an epoch that accelerate has not counted, and in the one after it."""
    first, second, third = epochs(made(), 3)
    assert sorted(sum(second, [])) == list(range(24))
    assert second != first
    loader = made()
    assert list(loader) == first
    taken = iter(loader)
    assert [next(taken), next(taken)] == second[:2]
    state = loader.batch_sampler.state_dict(num_batches=2)
    resumed = made()
    resumed.batch_sampler.load_state_dict(state)
    assert epochs(resumed, 2) == [second[2:], third]
    chosen = made()
    chosen.batch_sampler.set_epoch(1)
    assert list(chosen) == second
    chosen.set_epoch(0)
    assert list(chosen) == first


def test_skipped_batches_are_of_the_epoch_and_the_next_one_follows():
    """As accelerate's own examples resume: the rest by a loader of its own, then the whole ones."""
    _, second, third = epochs(made(), 3)
    loader = made()
    loader.set_epoch(1)
    assert list(skip_first_batches(loader, 2)) == second[2:]
    assert list(loader) == third


@pytest.mark.parametrize(
    ("num_steps", "is_on", "warns"), [(3, True, True), (3, False, False), (1, True, False)]
)
def test_steps_that_end_with_the_loader_are_warned_of(num_steps, is_on, warns):
    """Each microbatch of the last step would be one, as all of them are taken before the first is computed."""
    plugin = GradientAccumulationPlugin(num_steps=num_steps, sync_with_dataloader=is_on)
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        made(gradient_accumulation_plugin=plugin)
    found = [str(one.message) for one in told if "sync_with_dataloader" in str(one.message)]
    assert [f"num_steps={num_steps}, sync_with_dataloader=False" in text for text in found] == [True] * warns
