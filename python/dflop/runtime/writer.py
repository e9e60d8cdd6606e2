"""The lines that the leader writes of each step, from what all ranks report."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from dflop.runtime.losses import grouped
from dflop.runtime.peak import compare, summary
from dflop.runtime.progress import say
from dflop.runtime.records import step_metrics
from dflop.runtime.spans import align
from dflop.runtime.utilization import Utilization

if TYPE_CHECKING:
    from dflop._native import Dataset, GlobalBatches, StepScheduler
    from dflop.runtime.adaptation import Adaptation
    from dflop.runtime.bad_samples import BadSamples
    from dflop.runtime.guard import Guard
    from dflop.runtime.journal import Journal
    from dflop.runtime.losses import SampleLoss
    from dflop.runtime.mesh import Mesh
    from dflop.runtime.options import Options
    from dflop.runtime.peak import StepPeak
    from dflop.runtime.population import Population
    from dflop.runtime.spans import RankSpans
    from dflop.runtime.turns import Turn


@dataclass(frozen=True)
class RankReport:
    """What one rank tells the leader about a step."""

    spans: RankSpans
    loss: float
    """Its share of the loss."""
    data_wait_ns: int
    peak: StepPeak | None
    """Where the memory of the step was counted; else none."""
    sample_losses: list[SampleLoss]
    """Losses of the samples whose loss this rank computed."""


class StepWriter:
    """Writes the steps of a run into its journal, on the leader."""

    def __init__(
        self,
        journal: Journal,
        options: Options,
        mesh: Mesh,
        scheduler: StepScheduler,
        dataset: Dataset,
        batches: GlobalBatches,
        guard: Guard,
        bad: BadSamples,
        adaptation: Adaptation | None,
        population: Population | None,
    ) -> None:
        """Reads the sizes of the model, of which a step's rates (MFU) are made.

        Args:
            journal: Takes the lines.
            options: Of the run.
            mesh: Coordinates of the leader.
            scheduler: Predicts each step, and learns from it.
            dataset: Of the run.
            batches: Of the run; they know the epoch of a step.
            guard: Knows whether a step was skipped.
            bad: Bad samples met so far.
            adaptation: Decides whether schedules are corrected.
            population: Watches which samples come.
        """
        self._journal = journal
        self._options = options
        self._mesh = mesh
        self._scheduler = scheduler
        self._dataset = dataset
        self._batches = batches
        self._guard = guard
        self._bad = bad
        self._adaptation = adaptation
        self._population = population
        self._utilization = Utilization(
            options.model_dir, options.recipe, options.lora_rank, options.dtype, mesh.device, mesh.num_ranks
        )
        if self._utilization.reason is not None and mesh.device.type == "cuda":
            say(f"no MFU: {self._utilization.reason}")

    def write(
        self, turn: Turn, grad_norm: float, reports: list[RankReport], clock_ns: dict[str, int]
    ) -> None:
        """Writes a step; the scheduler learns from it.

        Args:
            turn: The step.
            grad_norm: Of the gradients of the whole model, before they were clipped.
            reports: Of all ranks, by rank.
            clock_ns: Parts of the wall clock that passed since the step before was written.
        """
        journal, scheduler, guard = self._journal, self._scheduler, self._guard
        spans, tails, step_ns = align([r.spans for r in reports])
        # A step starts when the last rank has its samples, so all ranks have waited as long as that one.
        data_wait_ns = max(r.data_wait_ns for r in reports)
        metrics, events = step_metrics(
            scheduler,
            self._dataset,
            turn,
            spans,
            step_ns,
            self._mesh.num_ranks,
            data_wait_ns,
            self._adaptation,
        )
        metrics |= {
            "epoch": self._batches.epoch(turn.step),
            "bad_samples": len(turn.bad),
            "init": self._options.init,
            "loss": _finite(sum(r.loss for r in reports)),
            "loss_by": grouped([one for r in reports for one in r.sample_losses], self._dataset),
            "grad_norm": _finite(grad_norm),
            "was_skipped": guard.in_row > 0,
            "learning_rates": self._options.rates.at(turn.step),
            "clock_ns": clock_ns,
            **self._utilization.of(self._dataset, turn.samples, clock_ns),
        }
        if self._population is not None:
            events += self._population.step(turn.samples)
        journal.events(turn.step, events)
        if metrics["deferred"]:
            waited = ", ".join(f"{sample} ({steps})" for sample, steps in metrics["deferred"])
            journal.note(f"step {turn.step}: giants trained later than they came (steps): {waited}")
        if turn.schedule.giants:
            ids = ", ".join(map(str, turn.schedule.giants))
            journal.note(f"step {turn.step}: the pipeline runs empty around samples too large for it: {ids}")
        if guard.in_row > 0:
            journal.note(
                f"step {turn.step}: the norm of the gradients is {grad_norm}, must be finite: "
                f"the step is skipped, {guard.num_skipped} so far"
            )
        if turn.schedule.was_stopped:
            journal.note(f"step {turn.step}: the search for a schedule was stopped by its wall limit")
        key: dict[str, Any] = {"step": turn.step, "arm": turn.arm}
        # Steps of the warm-up are logged too: without them a replay would not come to the same weights.
        place = {
            "pair": turn.pair,
            "is_recorded": turn.is_recorded,
            "made_from": self._options.made_from,
            "ranks_per_node": self._options.ranks_per_node,
            "deferred": turn.deferred,
            "correction": turn.correction,
            "bad": [[one.sample, one.substitute] for one in turn.bad],
        }
        schedule = turn.schedule.record()
        journal.schedule({**key, **place, "samples": turn.samples, "schedule": schedule})
        for one in turn.bad:
            line = {**key, "sample": one.sample, "substitute": one.substitute, "cause": one.cause}
            journal.bad_sample(line, self._bad.num_known)
        if turn.is_recorded:
            journal.write(metrics, {**key, "makespan_ns": step_ns, "spans": spans, "tails": tails})
        peaks = [r.peak for r in reports if r.peak is not None]
        if peaks:
            plan = self._mesh.plan
            ranks = compare(plan, scheduler, turn.schedule, peaks)
            journal.memory({"step": turn.step, "arm": turn.arm, "ranks": ranks}, summary(plan, ranks))
        journal.progress(metrics, turn.is_recorded)


def _finite(value: float) -> float | None:
    """The value; none for NaN and infinity, which JSON does not have."""
    return value if math.isfinite(value) else None
