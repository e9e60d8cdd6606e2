"""The loop of one rank of a rehearsal: that of `trainer.py`, with nothing to decode and nothing to compute.

leader: schedule -> times of each rank's actions | all: agree (barrier) | actions | tail | leader: write
"""

from __future__ import annotations

import json
import statistics
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from dflop._native import Dataset, GlobalBatches, Plan
from dflop.runtime.agreement import Statement, agree
from dflop.runtime.device_clock import DeviceRecorder, device_clock, meet, start_together
from dflop.runtime.executor import Executor
from dflop.runtime.failure import RankError, complain, describe, talking
from dflop.runtime.interrupt import INTERRUPTED, Interrupt
from dflop.runtime.journal import Journal
from dflop.runtime.meeting import Meeting
from dflop.runtime.mesh import Mesh, join
from dflop.runtime.options import Options
from dflop.runtime.progress import say
from dflop.runtime.records import step_metrics
from dflop.runtime.rehearsal import (
    Fate,
    Rehearsal,
    RehearsedMessages,
    RehearsedStage,
    StepTimes,
    rehearsed_work,
    times_by_rank,
)
from dflop.runtime.schedules import Schedules
from dflop.runtime.spans import RankSpans, align
from dflop.runtime.trackers import Trackers
from dflop.runtime.turns import Turn, steps

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path


GATHERS_LAYERS = 3
"""The ZeRO level at which layers are gathered in each action, so that ranks meet there."""


def gathers_layers(plan: Plan) -> bool:
    """Whether all ranks meet in each action, since layers are gathered there (colocated ZeRO-3).

    That holds for hybrid shards too, although only a part of the ranks gathers a layer: in each backward,
    gradients are also summed over the copies of a shard, so all ranks still wait for each other.

    Args:
        plan: The layout.

    Returns:
        True if they do.
    """
    return plan.placement == "colocated" and plan.zero >= GATHERS_LAYERS


class Rehearser:
    """One rank of a rehearsal."""

    def __init__(self, options: Options, rehearsal: Rehearsal, mesh: Mesh, interrupt: Interrupt) -> None:
        """Makes this rank ready. Every rank must call it; blocks until all have.

        Args:
            options: Of the run; options of the model are not used.
            rehearsal: What was asked for.
            mesh: This rank's coordinates.
            interrupt: Set when this process shall stop.

        Raises:
            Error: An artifact or the data cannot be used.
            OSError: A file cannot be read.
        """
        self._options = options
        self._rehearsal = rehearsal
        self._mesh = mesh
        self._interrupt = interrupt
        # Only the leader reads the data profile: 32 copies of a large one would not fit into one machine.
        self._dataset = Dataset(options.config_path, options.data_profile_path) if mesh.is_leader else None
        self._batches = self._agreed_batches()
        self._schedules = Schedules(mesh, options, self._batches)
        plan, everyone = mesh.plan, range(mesh.num_ranks)
        own_component = plan.coordinates(mesh.rank)[0]
        of_component = [rank for rank in everyone if plan.coordinates(rank)[0] == own_component]
        self._all_ranks = Meeting(everyone, mesh.rank, mesh.control)
        # They sum gradients, so none may update before all have come.
        self._component = Meeting(of_component, mesh.rank, mesh.control, 1)
        meeting = Meeting(everyone, mesh.rank, mesh.control, 2) if gathers_layers(plan) else None
        self._clock = clock = device_clock(mesh)
        self._fate = fate = Fate(mesh.rank, rehearsal.kill)
        self._stages = {stage: RehearsedStage(mesh, clock, stage, fate, meeting) for stage in mesh.stages}
        self._messages = RehearsedMessages(mesh, clock)
        self._recorder = DeviceRecorder(mesh.rank, clock)
        self._executor = Executor(mesh, self._stages, self._recorder, self._messages)
        self._journal = (
            Journal(options.out, options.steps, options.request_path, Trackers(options.out), verb="rehearse")
            if mesh.is_leader
            else None
        )
        self.step: int | None = None
        """The step under way, for error messages."""

    @property
    def action(self) -> str | None:
        """The action under way, for error messages."""
        return self._executor.running

    def run(self) -> bool:
        """Rehearses to the end; false if an interrupt ended it early, on every rank alike.

        Every rank must call it; blocks until the rehearsal ends.
        """
        try:
            return all(self._rehearse(turn) for turn in steps(self._options, self._schedules, self._batches))
        finally:
            if self._journal is not None:
                self._journal.close()

    def _agreed_batches(self) -> GlobalBatches:
        """The global batches; the leader, which alone has the dataset, tells its size and giants to all."""
        told: list[Any] = [None]
        if self._dataset is not None:
            limit = self._options.giant_llm_tokens if self._options.giants == "defer" else None
            told = [(len(self._dataset), [] if limit is None else self._dataset.giants(limit))]
        with talking("tell the number of samples"):
            dist.broadcast_object_list(told, src=0, group=self._mesh.control)
        num_samples, giants = told[0]
        options = self._options
        size = self._mesh.plan.global_batch_size
        return GlobalBatches(num_samples, size, options.seed, giants, options.giant_steps_max)

    def _times(self, turn: Turn) -> StepTimes:
        """How long this rank's actions take, from the leader."""
        of_ranks: list[Any] | None = None
        if self._schedules.scheduler is not None:
            of_ranks = times_by_rank(self._schedules.scheduler, turn.schedule, self._rehearsal)
        own: list[Any] = [None]
        with talking("receive the times of the step"):
            dist.scatter_object_list(own, of_ranks, src=0, group=self._mesh.control)
        return own[0]

    def _rehearse(self, turn: Turn) -> bool:
        """One step; false if the ranks agreed to stop before it."""
        self.step = turn.step
        times = self._times(turn)
        work = rehearsed_work(self._mesh, turn.schedule)
        actions = self._executor.prepare(work, turn.schedule)
        for stage in self._stages.values():
            stage.take(work, times)
        self._messages.transfer_ns = times.transfer
        stop = self._interrupt.number
        # No rank but the leader has the data profile, so only the schedules are compared.
        statement = Statement(turn.step, turn.schedule.digest(), "", work.num_targets, stop)
        if agree(self._mesh, statement, turn.schedule.label_tokens).stop:
            return False
        start_together(self._clock, self._mesh, self._all_ranks)
        self._recorder.begin()
        self._fate.begin(turn.step, len(times.actions))
        self._executor.run_step(work, actions)
        self._fate.end()
        tail = self._recorder.now()
        with talking("end the backward together"):
            meet(self._clock, self._component)
        self._clock.run(times.tail)
        self._recorder.add("tail", tail)
        self._clock.wait()
        own = self._recorder.finish()
        reports: list[Any] | None = [None] * self._mesh.num_ranks if self._mesh.is_leader else None
        with talking("gather spans"):
            dist.gather_object(own, reports, dst=0, group=self._mesh.control)
        if reports is not None:
            self._record(turn, reports)
        return True

    def _record(self, turn: Turn, ranks: list[RankSpans]) -> None:
        """Writes a step, on the leader. All times are multiplied by `speed`, as if it were 1."""
        scheduler, dataset, journal = self._schedules.scheduler, self._dataset, self._journal
        assert scheduler is not None
        assert dataset is not None
        assert journal is not None
        spans, tails, step_ns = align(ranks)
        speed = self._rehearsal.speed

        def slowed(ns: int) -> int:
            return round(ns * speed)

        spans = [(rank, action, slowed(start), slowed(end)) for rank, action, start, end in spans]
        tails = [(rank, slowed(start), slowed(end)) for rank, start, end in tails]
        step_ns = slowed(step_ns)
        metrics, events = step_metrics(
            scheduler,
            dataset,
            turn,
            spans,
            step_ns,
            self._mesh.num_ranks,
            adaptation=self._schedules.adaptation,
        )
        journal.events(turn.step, events)
        metrics |= {"epoch": self._batches.epoch(turn.step), "is_rehearsed": True}
        key: dict[str, Any] = {"step": turn.step, "arm": turn.arm}
        place = {
            "pair": None,
            "is_recorded": True,
            "made_from": self._options.made_from,
            "ranks_per_node": self._options.ranks_per_node,
            "deferred": turn.deferred,
            "correction": turn.correction,
        }
        schedule = turn.schedule.record()
        journal.schedule({**key, **place, "samples": turn.samples, "schedule": schedule})
        journal.write(metrics, {**key, "makespan_ns": step_ns, "spans": spans, "tails": tails})
        journal.progress(metrics, True)


def rehearse(request: Mapping[str, Any]) -> int:
    """Runs this process as one rank of a rehearsal; torchrun's environment says which.

    Every rank must call it; blocks until the rehearsal ends. Errors go to stderr, with rank, step and action.

    Args:
        request: As the command line makes it.

    Returns:
        The exit status: 0 done, 1 failed, 130 interrupted (all steps up to then are written).
    """
    coordinates, is_leader = "rank not placed yet", True
    rehearser: Rehearser | None = None
    try:
        options = Options.of_request(request)
        plan = Plan.read(options.plan_path)
        say("waiting for all ranks", "rehearse")
        # A rehearsal for GPUs needs no GPU.
        mesh = join(plan, torch.device("cpu"), options.timeout_s)
        coordinates, is_leader = mesh.coordinates, mesh.is_leader
        interrupt = Interrupt()
        rehearser = Rehearser(options, Rehearsal.of_request(request["rehearsal"]), mesh, interrupt)
        say("the first step", "rehearse")
        is_done = rehearser.run()
        with talking("end together"):
            dist.barrier(group=mesh.control)
        dist.destroy_process_group()
    except Exception as error:  # noqa: BLE001
        step, action = (None, None) if rehearser is None else (rehearser.step, rehearser.action)
        if isinstance(error, RankError) and error.is_of_all:
            coordinates = "all ranks"
            if not is_leader:
                return 1
        complain(describe(coordinates, step, action, error), error)
        return 1
    return 0 if is_done else INTERRUPTED


def summary(out: Path) -> dict[str, Any]:
    """How far rehearsed steps were from simulated ones. The first is left out, since ranks connect in it.

    Args:
        out: Directory of the rehearsal.

    Returns:
        `ranks`, `steps` (how many count), `step_ms_median`, `simulated_ms_median`; and `error_median` and
        `error_p95` of |rehearsed - simulated| / simulated.

    Raises:
        OSError: The files cannot be read.
    """
    lines = (out / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    metrics = [json.loads(line) for line in lines]
    counted = metrics[1:] or metrics
    errors = sorted(abs(m["step_ns"] - m["predicted_ns"]) / m["predicted_ns"] for m in counted)
    with (out / "trace.jsonl").open(encoding="utf-8") as trace:
        ranks = 1 + max(tail[0] for tail in json.loads(trace.readline())["tails"])
    return {
        "ranks": ranks,
        "steps": len(counted),
        "step_ms_median": statistics.median(m["step_ns"] for m in counted) / 1e6,
        "simulated_ms_median": statistics.median(m["predicted_ns"] for m in counted) / 1e6,
        "error_median": statistics.median(errors),
        # The smallest error such that 95 % of the steps have at most this one.
        "error_p95": errors[max(0, -(-95 * len(errors) // 100) - 1)],
    }
