"""Learning rates by the step, worked out by hand; a gradient that is no number; the parts of the clock."""

from __future__ import annotations

import math

import pytest

from dflop.runtime.clock import PARTS, Clock
from dflop.runtime.failure import RankError
from dflop.runtime.guard import Guard
from dflop.runtime.rates import Rates

PEAK = {"encoder": 2.0, "projector": 4.0, "llm": 1.0}


def factors(schedule: str, warmup_steps: int = 2, decay_steps: int = 3) -> list[float]:
    """Over ten steps."""
    rates = Rates(PEAK, schedule, 10, warmup_steps, decay_steps)
    return [rates.factor(step) for step in range(10)]


def test_rates_rise_and_fall_as_their_schedule_says() -> None:
    """Warm-up in equal parts, then eight steps; the first of them has the whole rate, the one behind the last none."""
    assert factors("constant") == [0.5] + [1.0] * 9
    assert factors("linear") == pytest.approx([0.5, 1.0] + [1 - k / 8 for k in range(8)])
    assert factors("cosine") == pytest.approx(
        [0.5, 1.0] + [(1 + math.cos(math.pi * k / 8)) / 2 for k in range(8)]
    )
    assert factors("constant-then-decay") == pytest.approx([0.5] + [1.0] * 7 + [2 / 3, 1 / 3])
    assert factors("cosine", warmup_steps=0)[0] == 1.0


def test_each_component_has_its_own_peak() -> None:
    """A factor for all of them."""
    assert Rates(PEAK, "linear", 4, 0, 1).at(1) == {"encoder": 1.5, "projector": 3.0, "llm": 0.75}


def test_steps_are_skipped_until_too_many_in_a_row() -> None:
    """A finite norm between them begins the count anew; a checkpoint keeps it."""
    guard = Guard(2)
    assert [guard.skips(norm) for norm in (1.0, math.inf, math.nan, 0.0, math.nan)] == [
        False,
        True,
        True,
        False,
        True,
    ]
    again = Guard(2)
    again.load(guard.state())
    assert (again.in_row, again.num_skipped) == (1, 3)
    assert again.skips(math.nan)
    with pytest.raises(RankError, match="the norm of the gradients is nan, must be finite"):
        again.skips(math.nan)


def test_no_time_is_lost_between_the_parts_of_the_clock() -> None:
    """All laps of all answers are the time from the start to the last lap."""
    clock, total, answer = Clock(), 0, {"end": 0}
    for _ in range(3):
        for part in (*PARTS, "pack"):
            clock.lap(part)
        answer = clock.take()
        total += sum(answer[part] for part in PARTS)
    assert total == answer["end"] > 0
