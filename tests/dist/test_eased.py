"""Microbatches of colocated ranks that recompute different things: the gradient is that of one process."""

from __future__ import annotations

import itertools

import pytest
from test_layouts import (
    PLACED,
    check,
    frozen_none,
    model_dir,
    oracles,
    schedule_of,
)
from toy_run import write_colocated

from dflop._native import Schedule

__all__ = ["model_dir", "oracles"]


@pytest.mark.some(1)
@pytest.mark.parametrize("zero", [0, 3])
def test_each_microbatch_may_recompute_something_else(zero, model_dir, oracles, tmp_path):
    """What a schedule says of a microbatch and rank holds there alone; the gradient does not see it."""
    llm = PLACED["uneven", 2]
    plan = write_colocated(tmp_path / "plan.json", 2, len(llm), zero=zero, recompute="full")
    modes = itertools.cycle(
        [
            "none",
            "full",
            {"encoder": "full:1", "llm": "full:1"},
            {"encoder": "none", "llm": "selective:1"},
            {"encoder": "selective:1", "llm": "selective"},
        ]
    )
    record = schedule_of(llm).record()
    record["recompute"] = [[next(modes) for _ in replicas] for replicas in llm]
    schedule = Schedule.from_record(record)
    assert schedule.recompute(0, 1) == ("full", "full")
    check(plan, schedule, model_dir, oracles(frozen_none), tmp_path)
