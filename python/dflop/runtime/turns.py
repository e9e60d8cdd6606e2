"""Turns: which global batch is trained with which schedule, one after the other.

a run          batch 0, 1, 2, ...            schedules computed a few batches ahead
a comparison   batch 0 by each arm, then 1   the order of the arms changes from batch to batch
a replay       batches of a log              schedules of the log, nothing computed
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from dflop._native import Schedule

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from pathlib import Path

    from dflop._native import GlobalBatches
    from dflop.runtime.bad_samples import BadSample
    from dflop.runtime.options import Arm, Options
    from dflop.runtime.schedules import Schedules


@dataclass(frozen=True)
class Turn:
    """One training step: a global batch with one arm."""

    step: int
    arm: Arm
    pair: int | None
    """Number of its round in a comparison, after the warm-up; none in a warm-up, and in other runs."""
    is_recorded: bool
    samples: list[int]
    """The global batch, in arrival order."""
    schedule: Schedule
    schedule_wait_ns: int
    deferred: list[tuple[int, int]]
    """Samples of the batch that were drawn for an earlier step, each with the number of steps it waited."""
    correction: dict[str, Any] | None = None
    """As `Taken.correction`."""
    compared_ns: tuple[int, int] | None = None
    """As `Taken.compared_ns`."""
    bad: list[BadSample] = field(default_factory=list)
    """Samples that were to be trained in this turn and cannot be."""


def steps(
    options: Options, schedules: Schedules, batches: GlobalBatches, first_step: int = 0
) -> Iterator[Turn]:
    """The turns of a run with one arm.

    Every rank must take each turn; taking one blocks until its schedule is there.

    Args:
        options: Of the run.
        schedules: Computes them.
        batches: Which samples each step has.
        first_step: Steps trained before.

    Yields:
        One turn a step. By then `options.prefetch_depth` schedules, its own included, are computed or under
        way.
    """
    arm, depth = options.arm, options.prefetch_depth
    for step in range(first_step, min(first_step + depth, options.steps)):
        schedules.submit(step, arm)
    for step in range(first_step, options.steps):
        # The caller takes a turn before it trains the turn before it: from then on one more may be computed.
        if step > first_step and step - 1 + depth < options.steps:
            schedules.submit(step - 1 + depth, arm)
        taken = schedules.take(step, arm)
        samples, deferred = batches.batch(step), batches.deferred(step)
        yield Turn(
            step,
            arm,
            None,
            True,
            samples,
            taken.schedule,
            taken.waited_ns,
            deferred,
            taken.correction,
            taken.compared_ns,
        )


def arms_in_order(arms: Sequence[Arm], step: int) -> list[Arm]:
    """The arms as they take turns on the global batch of `step`.

    An arm may profit or suffer from the state in which the arm before it left the machine. So the order
    changes: over n batches, each of the n arms stands at each place once, and directly after each other arm
    equally often. Where n is odd, that takes 2n batches, and each arm stands at each place twice.

    Args:
        arms: At least one, each once.
        step: From 0.

    Returns:
        All of them.

    References:
        Williams, Experimental designs balanced for the estimation of residual effects of treatments, 1949.
    """
    n = len(arms)
    # 0, 1, n - 1, 2, n - 2, ...: between neighbours each difference (modulo n) occurs once.
    first = [(place + 1) // 2 if place % 2 else (n - place // 2) % n for place in range(n)]
    row = [arms[(place + step) % n] for place in first]
    return row[::-1] if n % 2 and step // n % 2 else row


def log_lines(path: Path) -> list[str]:
    """The lines of a log of schedules; an incomplete last line is left out.

    Args:
        path: A `schedules.jsonl`.

    Returns:
        One line a turn.

    Raises:
        OSError: It cannot be read.
    """
    *whole, _ = path.read_text(encoding="utf-8").split("\n")
    return whole


def replayed(lines: Sequence[str]) -> Iterator[Turn]:
    """The turns of an earlier run, from its log, which the command line has checked against plan and data.

    Args:
        lines: Of the log.

    Yields:
        A turn a line.
    """
    for line in lines:
        record = json.loads(line)
        yield Turn(
            step=record["step"],
            arm=record["arm"],
            pair=record["pair"],
            is_recorded=record["is_recorded"],
            samples=record["samples"],
            schedule=Schedule.from_record(record["schedule"]),
            schedule_wait_ns=0,
            # Taken from the log, since today's options may defer others. Old logs lack the field.
            deferred=[(sample, steps) for sample, steps in record.get("deferred", [])],
            correction=record.get("correction"),
        )
