"""The loop of one rank of a rehearsal: that of `trainer.py`, with nothing to decode and nothing to compute.

leader: schedule -> times of each rank's actions | all: agree (barrier) | actions | tail | leader: write
Checkpoints are those of `trainer.py` too, of ranks that have no tensors.
"""

from __future__ import annotations

import json
import statistics
from collections import deque
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from dflop._native import Dataset, GlobalBatches, Plan
from dflop.runtime.agreement import Statement, agree
from dflop.runtime.checkpoint import Saver
from dflop.runtime.device_clock import DeviceRecorder, device_clock, meet, start_together
from dflop.runtime.directory import take_together
from dflop.runtime.executor import Executor
from dflop.runtime.failure import RankError, complain, describe, talking, tell_agent
from dflop.runtime.guard import Guard
from dflop.runtime.interrupt import Interrupt
from dflop.runtime.journal import Journal
from dflop.runtime.ledger import Ledger, Start
from dflop.runtime.meeting import Meeting
from dflop.runtime.mesh import Mesh, join
from dflop.runtime.options import Options
from dflop.runtime.population import Population
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
from dflop.runtime.resume import was_started_again
from dflop.runtime.schedules import Schedules
from dflop.runtime.spans import RankSpans, align
from dflop.runtime.trackers import Trackers
from dflop.runtime.turns import Turn, steps

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from dflop._native import SlowShapes


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
            RankError: The checkpoint to go on from cannot be used, or `--kill` names a step before it.
            OSError: A file cannot be read.
        """
        self._options = options
        self._rehearsal = rehearsal
        self._mesh = mesh
        self._interrupt = interrupt
        # Only the leader reads the data profile: 32 copies of a large one would not fit into one machine.
        self._dataset = Dataset(options.config_path, options.data_profile_path) if mesh.is_leader else None
        self._batches, num_samples = self._agreed_batches()
        self._start = Start.together(options, mesh, num_samples, is_rehearsed=True)
        _check_kill(rehearsal, self._start)
        self._schedules = Schedules(mesh, options, self._batches)
        self._slow_shapes = self._drawn_shapes()
        plan, everyone = mesh.plan, range(mesh.num_ranks)
        own_component = plan.coordinates(mesh.rank)[0]
        of_component = [rank for rank in everyone if plan.coordinates(rank)[0] == own_component]
        self._all_ranks = Meeting(everyone, mesh.rank, mesh.control)
        # They sum gradients, so none may update before all have come.
        self._component = Meeting(of_component, mesh.rank, mesh.control, 1)
        # Hybrid shards meet too: in each backward gradients are also summed over the copies of a shard.
        meeting = Meeting(everyone, mesh.rank, mesh.control, 2) if plan.meets_in_layers else None
        self._clock = clock = device_clock(mesh)
        self._fate = fate = Fate(mesh.rank, rehearsal.kill)
        self._stages = {stage: RehearsedStage(mesh, clock, stage, fate, meeting) for stage in mesh.stages}
        self._messages = RehearsedMessages(mesh, clock)
        self._recorder = DeviceRecorder(mesh.rank, clock)
        self._executor = Executor(mesh, self._stages, self._recorder, self._messages)
        step = self._start.journal_step
        trackers = Trackers(options.out, first_step=step) if mesh.is_leader else None
        self._journal = (
            Journal(
                options.out,
                options.steps,
                options.request_path,
                trackers,
                step,
                self._start.verb,
                options.kept_files(),
            )
            if mesh.is_leader
            else None
        )
        self._population = None if self._dataset is None else Population(self._dataset)
        self._ledger = Ledger(
            options,
            mesh,
            self._start,
            Saver(mesh, options.out, options.checkpoint_keep, {}, None),
            self._schedules,
            # No step is ever skipped here.
            Guard(options.skipped_steps_max),
            self._population,
            self._journal,
        )
        self.step: int | None = None
        """The step under way, for error messages."""
        self.stop = 0
        """Number of the signal that ended the rehearsal; 0: none."""

    @property
    def action(self) -> str | None:
        """The action under way, for error messages."""
        return self._executor.running

    def run(self) -> bool:
        """Rehearses to the end; false if an interrupt ended it early, on every rank alike.

        Every rank must call it; blocks until the rehearsal ends.
        """
        try:
            return self._run_turns()
        finally:
            if self._journal is not None:
                self._journal.close()

    def say_interrupted(self) -> None:
        """Tells people, on the leader, that `run` was ended early, and what was saved."""
        self._ledger.say_interrupted()

    def _run_turns(self) -> bool:
        num_done = self._start.step
        if num_done >= self._options.steps:
            say(f"nothing is left: {num_done} steps are done, `--steps` is {self._options.steps}", "rehearse")
        for turn in steps(self._options, self._schedules, self._batches, num_done):
            if not self._rehearse(turn):
                self._ledger.end(num_done)
                return False
            num_done = turn.step + 1
            self._ledger.after(num_done)
        self._ledger.end(num_done)
        return True

    def _agreed_batches(self) -> tuple[GlobalBatches, int]:
        """The global batches, and the number of samples.

        The leader, which alone has the dataset, tells its size and giants to all.
        """
        told: list[Any] = [None]
        if self._dataset is not None:
            limit = self._options.giant_llm_tokens if self._options.giants == "defer" else None
            told = [(len(self._dataset), [] if limit is None else self._dataset.giants(limit))]
        with talking("tell the number of samples"):
            dist.broadcast_object_list(told, src=0, group=self._mesh.control)
        num_samples, giants = told[0]
        options = self._options
        size = self._mesh.plan.global_batch_size
        return GlobalBatches(num_samples, size, options.seed, giants, options.giant_steps_max), num_samples

    def _drawn_shapes(self) -> SlowShapes | None:
        """The samples that shall be slow, on the leader. They are the same after a restart."""
        scheduler, asked, options = self._schedules.scheduler, self._rehearsal.slow_shapes, self._options
        if scheduler is None or self._dataset is None or asked is None:
            return None
        share, times = asked
        usual = scheduler.schedule(0, self._batches.batch(0), options.arm)
        slow = scheduler.slow_shapes(usual, share, times, options.seed)
        say(
            f"slow shapes: {slow.tokens_min} to {slow.tokens_max} LLM tokens, {slow.num_samples} of "
            f"{len(self._dataset)} samples; each adds {slow.forward_ns / 1e6:.1f} ms to a forward and "
            f"{slow.backward_ns / 1e6:.1f} ms to a backward",
            "rehearse",
        )
        return slow

    def _times(self, turn: Turn) -> StepTimes:
        """How long this rank's actions take, from the leader."""
        of_ranks: list[Any] | None = None
        if self._schedules.scheduler is not None:
            of_ranks = times_by_rank(
                self._schedules.scheduler, turn.schedule, self._rehearsal, self._slow_shapes
            )
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
        stop, save_failed = self._interrupt.number, self._ledger.has_failed
        # No rank but the leader has the data profile, so only the schedules are compared.
        statement = Statement(turn.step, turn.schedule.digest(), "", work.num_targets, stop, save_failed)
        agreement = agree(self._mesh, statement, turn.schedule.label_tokens)
        if agreement.save_failed:
            self._ledger.finish()
        if agreement.stop:
            self.stop = agreement.stop
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
        if self._population is not None:
            events += self._population.step(turn.samples)
        journal.events(turn.step, events)
        metrics |= {
            "epoch": self._batches.epoch(turn.step),
            "is_rehearsed": True,
            "is_first": turn.step == self._start.step,
            "plan": self._options.made_from["plan"],
        }
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
        The exit status: 0 done, 1 failed; 128 plus the number of the signal that ended it (130 after Ctrl-C),
        where all steps up to then and a checkpoint are written.
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
        take_together(options, mesh)
        asked = Rehearsal.of_request(request["rehearsal"], is_started_again=was_started_again())
        rehearser = Rehearser(options, asked, mesh, interrupt)
        say("the first step", "rehearse")
        is_done = rehearser.run()
        if not is_done:
            rehearser.say_interrupted()
        with talking("end together"):
            dist.barrier(group=mesh.control)
        dist.destroy_process_group()
    except Exception as error:  # noqa: BLE001
        step, action = (None, None) if rehearser is None else (rehearser.step, rehearser.action)
        if isinstance(error, RankError) and error.is_of_all:
            coordinates = "all ranks"
            if not is_leader:
                tell_agent("", error)
                return 1
        line = describe(coordinates, step, action, error)
        complain(line, error)
        tell_agent(line, error)
        return 1
    return 0 if is_done else 128 + rehearser.stop


def _check_kill(rehearsal: Rehearsal, start: Start) -> None:
    """Raises, on every rank alike, if the rank to be killed would never be: its step was rehearsed before."""
    if rehearsal.kill is None or rehearsal.kill[1] >= start.step:
        return
    message = f"`--kill` names step {rehearsal.kill[1]}, the rehearsal goes on from step {start.step}"
    raise RankError(message, f"name a step from {start.step} on, or leave `--kill` out", is_of_all=True)


def summary(out: Path) -> dict[str, Any]:
    """How far rehearsed steps were from simulated ones, over the steps of the plan that came last.

    The first step after each start of the ranks is left out, since they connect in it.

    Args:
        out: Directory of the rehearsal.

    Returns:
        `ranks`, `steps` (how many count), `step_ms_median`, `simulated_ms_median`; and `error_median` and
        `error_p95` of |rehearsed - simulated| / simulated. Without any step `steps` is 0 and the others are
        none.

    Raises:
        OSError: The files cannot be read.
    """
    names = ("ranks", "steps", "step_ms_median", "simulated_ms_median", "error_median", "error_p95")
    path = out / "metrics.jsonl"
    if not path.exists():
        return {**dict.fromkeys(names), "steps": 0}
    metrics = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    plan = metrics[-1].get("plan")
    own = [m for m in metrics if m.get("plan") == plan]
    # Rehearsals of earlier versions could not go on: their one first step is not marked.
    counted = [m for place, m in enumerate(own) if not m.get("is_first", place == 0)] or own
    errors = sorted(abs(m["step_ns"] - m["predicted_ns"]) / m["predicted_ns"] for m in counted)
    with (out / "trace.jsonl").open(encoding="utf-8") as trace:
        (last,) = deque(trace, maxlen=1)
    values = (
        1 + max(tail[0] for tail in json.loads(last)["tails"]),
        len(counted),
        statistics.median(m["step_ns"] for m in counted) / 1e6,
        statistics.median(m["predicted_ns"] for m in counted) / 1e6,
        statistics.median(errors),
        # The smallest error such that 95 % of the steps have at most this one.
        errors[max(0, -(-95 * len(errors) // 100) - 1)],
    )
    return dict(zip(names, values, strict=True))
