"""The training loop of one rank.

A step:      pack samples | agree (barrier) | actions | sum and clip gradients | AdamW | write
             data_wait_ns                   |<------------- step_ns ------------------>|
A run:       while step k runs, schedule k + 2 is computed and the samples of k + 1 are decoded; a checkpoint
             every few steps, at the end, and where a signal ends the run
Comparison:  schedules and samples of a round are made ready, then one arm runs after the other
Replay:      as a run, with the turns and schedules of a log
"""

from __future__ import annotations

import contextlib
import gc
import sys
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

from dflop._native import Dataset, GlobalBatches
from dflop.data.loader import SampleLoader
from dflop.models import load_adapter
from dflop.models.parameters import kept_buffers
from dflop.models.tensor import slices_of
from dflop.runtime.ahead import Ahead
from dflop.runtime.bad_samples import BadSamples
from dflop.runtime.build import border_widths, build_pieces, stages_of
from dflop.runtime.checkpoint import Saver
from dflop.runtime.clock import Clock
from dflop.runtime.evaluate import Evaluation, sample_losses
from dflop.runtime.executor import Executor
from dflop.runtime.failure import RankError, talking
from dflop.runtime.guard import Guard
from dflop.runtime.interrupt import Interrupt
from dflop.runtime.journal import Journal
from dflop.runtime.ledger import Ledger, Start
from dflop.runtime.mesh import Mesh
from dflop.runtime.messages import Messages
from dflop.runtime.optim import Optimizer, undecayed
from dflop.runtime.options import Arm, Options
from dflop.runtime.pack import Packer
from dflop.runtime.peak import OPTIMIZER, PeakMeter
from dflop.runtime.population import Population
from dflop.runtime.schedules import Schedules, Taken
from dflop.runtime.sharded import gradients_of
from dflop.runtime.spans import SpanRecorder
from dflop.runtime.trackers import Trackers
from dflop.runtime.turns import Turn, arms_in_order, log_lines, replayed, steps
from dflop.runtime.work import encoder_shares, read_samples
from dflop.runtime.writer import RankReport, StepWriter

if TYPE_CHECKING:
    from dflop._native import Schedule
    from dflop.data.shares import Share


class Trainer:
    """One rank of a run."""

    def __init__(
        self, options: Options, mesh: Mesh, interrupt: Interrupt, ahead: Ahead | None = None
    ) -> None:
        """Builds this rank's pieces of the model. Every rank must call it; blocks until all have.

        Args:
            options: Of the run.
            mesh: This rank's coordinates.
            interrupt: Set when this process shall stop.
            ahead: Workers and arenas that this rank decodes with; none: its own threads, without a memory
                limit.

        Raises:
            Error: An artifact, the model or the data cannot be used.
            RankError: The checkpoint to go on from cannot be used.
            OSError: A file cannot be read, or the directory cannot be written.
        """
        self._options = options
        self._mesh = mesh
        self._interrupt = interrupt
        self._dtype = {"float32": torch.float32, "bfloat16": torch.bfloat16}[options.dtype]
        self._dataset = Dataset(options.config_path, options.data_profile_path)
        limit = options.giant_llm_tokens if options.giants == "defer" else None
        self._batches = GlobalBatches(
            len(self._dataset),
            mesh.plan.global_batch_size,
            options.seed,
            [] if limit is None else self._dataset.giants(limit),
            options.giant_steps_max,
        )
        self._start = Start.together(options, mesh, len(self._dataset))
        self._schedules = Schedules(mesh, options, self._batches)
        self._population = None if self._schedules.adaptation is None else Population(self._dataset)
        adapter = load_adapter(options.model_dir)
        self._ahead = Ahead() if ahead is None else ahead
        self._loader = SampleLoader(
            self._dataset,
            adapter,
            options.cache_bytes,
            num_threads=options.workers or 2,
            arena=self._ahead.arena,
            workers=self._ahead.workers,
            limit_s=mesh.deadline.decoding_s,
        )
        percent_max = options.bad_samples_max_percent
        self._bad = BadSamples(mesh, self._dataset, options.on_bad_sample, percent_max)
        self._packer = Packer(mesh, self._dataset, self._loader, self._bad, self._dtype, options.recipe)
        self._evaluation = (
            None
            # A comparison evaluates nothing.
            if options.evaluation is None or options.compare
            else Evaluation(options, options.evaluation, mesh, adapter, self._ahead)
        )
        torch.manual_seed(options.seed)
        pieces = build_pieces(adapter, mesh, options, self._dtype, is_resumed=self._start.has_checkpoint)
        without_decay = undecayed(pieces.values())
        self._gradients = gradients_of(pieces, mesh, self._dtype)
        self._optimizer = Optimizer(
            self._gradients.parameters, options.rates, options.weight_decay, without_decay
        )
        self._guard = Guard(options.skipped_steps_max)
        self._recorder = SpanRecorder(mesh.rank, mesh.device)
        self._pieces = pieces
        self._adapter = adapter
        self._stages = stages_of(pieces, mesh, self._gradients, options.recipe)
        messages = Messages(mesh, border_widths(mesh.plan, adapter), self._dtype)
        self._executor = Executor(mesh, self._stages, self._recorder, messages)
        self._log = None if options.replay is None else log_lines(options.replay)
        num_turns = (options.warmup_pairs + options.steps) * max(1, len(options.compare))
        if self._log is not None:
            num_turns = len(self._log)
        slices = {name: part for piece in pieces.values() for name, part in slices_of(piece).items()}
        buffers = {name: one for piece in pieces.values() for name, one in kept_buffers(piece).items()}
        held = {**self._gradients.held, **buffers}
        self._journal: Journal | None = None
        self._writer: StepWriter | None = None
        if mesh.is_leader:
            first_step = self._start.journal_step
            trackers = Trackers(options.out, options.wandb_project, first_step)
            kept = options.kept_files()
            self._journal = Journal(
                options.out, num_turns, options.request_path, trackers, first_step, kept=kept
            )
            scheduler = self._schedules.scheduler
            assert scheduler is not None
            self._writer = StepWriter(
                self._journal,
                options,
                mesh,
                scheduler,
                self._dataset,
                self._batches,
                self._guard,
                self._bad,
                self._schedules.adaptation,
                self._population,
            )
        self._ledger = Ledger(
            options,
            mesh,
            self._start,
            Saver(mesh, options.out, options.checkpoint_keep, held, self._optimizer, slices),
            self._schedules,
            self._guard,
            self._population,
            self._journal,
            self._bad,
        )
        self._clock = Clock()
        self.step: int | None = None
        """The step under way, for error messages."""
        self.stop = 0
        """Number of the signal that ended the run; 0: none."""

    @property
    def action(self) -> str | None:
        """The action under way, for error messages."""
        return self._executor.running

    def run(self) -> bool:
        """Trains to the end; false if an interrupt ended it early, on every rank alike.

        Every rank must call it; blocks until training ends.
        """
        # If Python chose the moment of a garbage collection, it would stop one rank, and all others with it.
        gc.collect()
        gc.freeze()
        gc.disable()
        try:
            is_done = self._run_rounds() if self._options.compare else self._run_turns()
            self._clock.lap("checkpoint")
            if self._journal is not None:
                self._journal.clock(self._clock.totals())
            return is_done
        finally:
            gc.enable()
            self._loader.close()
            if self._evaluation is not None:
                self._evaluation.close()
            self._ahead.close()
            if self._journal is not None:
                self._journal.close()

    @property
    def what_comes(self) -> str:
        """What `run` begins with, for people."""
        done, asked = self._start.step, self._options.steps
        if self._log is None and not self._options.compare and done >= asked:
            return (
                f"nothing to train: the run has {done} steps, and {asked} are asked for (`--steps` and "
                "`train.steps` count from the beginning)"
            )
        return "the first step: its schedule, its media, the step itself"

    def say_interrupted(self) -> None:
        """Tells people, on the leader, that `run` was ended early, and what was saved."""
        self._ledger.say_interrupted()

    def _run_turns(self) -> bool:
        turns = (
            steps(self._options, self._schedules, self._batches, self._start.step)
            if self._log is None
            else replayed(self._log)
        )
        num_trained = self._start.step
        if self._evaluation is not None:
            self._evaluation.draw()
        coming = next(turns, None)
        if coming is not None:
            self._prefetch(coming)
        if self._start.owes_evaluation:
            self._evaluate(num_trained - 1, is_last=True)
        while coming is not None:
            turn, coming = coming, next(turns, None)
            if coming is not None:
                self._prefetch(coming)
            self._clock.lap("schedule")
            if not self._train(turn):
                self._ledger.end(num_trained)
                return False
            num_trained = turn.step + 1
            try:
                self._evaluate(turn.step, is_last=coming is None)
            except RankError as error:
                if error.is_of_all:
                    # What was trained is kept, and the evaluation comes first when the run goes on.
                    self._ledger.evaluation_due = True
                    self._ledger.end(num_trained)
                raise
            self._ledger.after(num_trained)
            self._clock.lap("checkpoint")
        self._ledger.end(num_trained)
        return True

    def _evaluate(self, step: int, *, is_last: bool) -> None:
        """Evaluates after each N-th step and the last. Every rank must call it between the same steps."""
        evaluated = self._options.evaluation
        self._ledger.evaluation_due = False
        if self._evaluation is None or evaluated is None:
            return
        if (step + 1) % evaluated.every != 0 and not is_last:
            return
        self._gradients.gather()
        try:
            record = self._evaluation.run(step, self._executor, self._stages, lambda: self._interrupt.number)
        finally:
            # Else what was gathered here would be taken for the parameters after the next update.
            self._gradients.release()
        self._recorder.begin()
        if self._journal is not None:
            self._ledger.evaluation_due = record is None
        if record is not None and self._journal is not None:
            self._journal.evaluation(record, self._options.arm)
        self._clock.lap("evaluation")

    def _run_rounds(self) -> bool:
        arms, warmup = self._options.compare, self._options.warmup_pairs
        if self._options.evaluation is not None and self._mesh.is_leader:
            sys.stderr.write("note: `--compare` evaluates nothing, `evaluation` is left out\n")
        num_rounds = warmup + self._options.steps
        for arm in arms_in_order(arms, 0):
            self._schedules.submit(0, arm)
        for step in range(num_rounds):
            taken: dict[Arm, Taken] = {}
            for arm in arms_in_order(arms, step):
                taken[arm] = self._schedules.take(step, arm)
            # Media of all arms are decoded before the first one starts: no arm waits for them, and no thread
            # decodes while an arm is timed.
            for one in taken.values():
                samples = read_samples(self._mesh, one.schedule, self._adapter)
                self._loader.fill([(sample, None) for sample in samples], False)
                self._loader.fill(self._shares(one.schedule), True)
            is_recorded = step >= warmup
            pair = step - warmup if is_recorded else None
            samples, deferred = self._batches.batch(step), self._batches.deferred(step)
            for arm, one in taken.items():
                # The next schedule of an arm is computed while this arm runs, so that each pays for its own.
                if step + 1 < num_rounds:
                    self._schedules.submit(step + 1, arm)
                turn = Turn(step, arm, pair, is_recorded, samples, one.schedule, one.waited_ns, deferred)
                if not self._train(turn):
                    return False
        return True

    def _prefetch(self, turn: Turn) -> None:
        samples = read_samples(self._mesh, turn.schedule, self._adapter)
        self._loader.prefetch([(sample, None) for sample in samples], False)
        self._loader.prefetch(self._shares(turn.schedule), True)

    def _shares(self, schedule: Schedule) -> list[Share]:
        """The samples, or parts of them, whose media this rank decodes."""
        return encoder_shares(self._mesh, schedule, self._adapter)

    def _train(self, turn: Turn) -> bool:
        """One training step; false if the ranks agreed to stop before it."""
        self.step = turn.step
        # Has work only before the first step and after an evaluation: a step's tail gathers for the next one.
        self._gradients.gather()
        ready, agreement = self._packer.pack(
            turn,
            self._executor,
            lambda: self._interrupt.number,
            save_failed=self._ledger.has_failed,
            lap=self._clock.lap,
        )
        if agreement.save_failed:
            self._ledger.finish()
        if ready is None:
            self.stop = agreement.stop
            return False
        turn, work, actions, data_wait_ns = ready.turn, ready.work, ready.actions, ready.data_wait_ns
        self._recorder.begin()
        meter = self._meter(turn)
        with contextlib.nullcontext() if meter is None else meter:
            loss = self._executor.run_step(work, actions, None if meter is None else meter.phase)
            tail = self._recorder.now()
            if meter is not None:
                meter.phase(OPTIMIZER)
            self._gradients.reduce()
            grad_norm = self._gradients.clip(self._options.max_grad_norm)
            self._optimizer.step(turn.step, grad_norm)
            self._gradients.zero()
            self._gradients.gather()
            self._recorder.add("tail", tail)
        peak = None if meter is None else meter.peak()
        for stage in self._stages.values():
            stage.copies_inputs = False
        # The first wait for the device since the step began. After it, reading the norm costs nothing.
        losses = sample_losses(self._stages, self._mesh, turn.schedule, self._loader)
        report = RankReport(self._recorder.finish(), loss, data_wait_ns, peak, losses)
        norm = float(grad_norm)
        self._guard.skips(norm)
        self._clock.lap("step")
        reports: list[RankReport | None] | None = None
        if self._mesh.is_leader:
            reports = [None for _ in range(self._mesh.num_ranks)]
        with talking("gather spans"):
            dist.gather_object(report, reports, dst=0, group=self._mesh.control)
        if reports is not None and self._writer is not None:
            self._writer.write(turn, norm, [r for r in reports if r is not None], self._clock.take())
        self._mesh.deadline.shorten()
        # Looks at young objects only, of which a step leaves a few: looking at all would delay the next step.
        gc.collect(0)
        self._clock.lap("write")
        return True

    def _meter(self, turn: Turn) -> PeakMeter | None:
        """What counts the memory of this step; none where it is not to be counted."""
        if turn.step != self._options.measure_memory_step:
            return None
        for stage in self._stages.values():
            stage.copies_inputs = True
        held = self._gradients.held.values()
        return PeakMeter(self._mesh.device, self._pieces.values(), held, self._optimizer.tensors())
