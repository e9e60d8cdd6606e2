"""Evaluation: the loss of samples that are held out, every few steps, by the layout that trains.

    samples, drawn once --batches as large as a step's--> schedules (kept) --forward actions of each--> sums

A batch goes through the ranks as a training step does, but only with the forwards (F) of its action lists.
The losses of the samples are summed one by one, so the result is that of a single process, in every layout.
Training is not touched: an evaluation has its own samples, loader and schedules, and makes no gradient.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from dflop._native import Dataset, GlobalBatches, ScheduleError
from dflop.data.loader import SampleLoader
from dflop.runtime.bad_samples import BadSamples
from dflop.runtime.failure import RankError, talking
from dflop.runtime.losses import SampleLoss, grouped
from dflop.runtime.pack import Packer
from dflop.runtime.schedules import Schedules
from dflop.runtime.turns import Turn
from dflop.runtime.work import encoder_shares, read_samples

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from dflop._native import Schedule
    from dflop.models.adapter import ModelAdapter
    from dflop.runtime.ahead import Ahead
    from dflop.runtime.executor import Executor
    from dflop.runtime.mesh import Mesh
    from dflop.runtime.options import Evaluated, Options
    from dflop.runtime.stage import Stage


class Evaluation:
    """The evaluations of one run, on one rank."""

    def __init__(
        self, options: Options, evaluated: Evaluated, mesh: Mesh, adapter: ModelAdapter, ahead: Ahead
    ) -> None:
        """Reads the profile and draws the samples.

        Args:
            options: Of the run.
            evaluated: What is evaluated.
            mesh: This rank's coordinates.
            adapter: Of the family.
            ahead: What this rank decodes with.

        Raises:
            Error: The profile cannot be used.
        """
        self._mesh = mesh
        self._dataset = Dataset(options.config_path, evaluated.profile_path, evaluation=True)
        size = mesh.plan.global_batch_size
        self._batches = HeldOut(len(self._dataset), evaluated.samples, size, options.seed)
        self._schedules = Schedules(mesh, options, self._batches, evaluated.profile_path)
        self._arm = options.arm
        self._turns: list[Turn] = []
        self._fails = options.on_bad_sample == "fail"
        # Under `substitute`, too, bad samples are left out: the loss must be that of the drawn samples only.
        # Under `fail` all ranks shall know of a bad one before they end, so that what was trained is saved.
        percent_max = 100.0 if self._fails else options.bad_samples_max_percent
        bad = BadSamples(mesh, self._dataset, "skip", percent_max)
        self._loader = SampleLoader(
            self._dataset,
            adapter,
            cache_bytes=0,
            num_threads=max(1, options.workers or 2),
            arena=ahead.evaluation_arena,
            workers=ahead.workers,
            limit_s=mesh.deadline.decoding_s,
        )
        dtype = {"float32": torch.float32, "bfloat16": torch.bfloat16}[options.dtype]
        self._packer = Packer(mesh, self._dataset, self._loader, bad, dtype, options.recipe)

    def run(
        self, step: int, executor: Executor, stages: Mapping[int, Stage], is_stopped: Callable[[], int]
    ) -> dict[str, Any] | None:
        """Evaluates. Every rank must call it between the same two steps; blocks until all are done.

        Args:
            step: The last that was trained.
            executor: Runs the forwards; parameters must be gathered.
            stages: Of this rank.
            is_stopped: Number of a signal that tells this process to stop, or 0.

        Returns:
            On the leader, a line of `evaluations.jsonl`; elsewhere, and where some rank was told to stop
            before the end, none.

        Raises:
            RankError: A sample cannot be read under `fail`, or too many cannot; on every rank alike.
        """
        began = time.monotonic()
        losses: list[SampleLoss] = []
        bad: list[list[Any]] = []
        for number in range(self._batches.num_batches):
            turn = self._turn(number)
            done = self._forward(turn, step, executor, stages, is_stopped)
            if done is None:
                return None
            turn, found = done
            if turn.bad and self._fails:
                message = f"evaluation: {turn.bad[0].cause}"
                hint = "mend the file, take it out of `evaluation.mixture`, or set `data.on_bad_sample: skip`"
                raise RankError(message, hint, is_of_all=True)
            bad += [[one.sample, one.cause] for one in turn.bad]
            gathered: list[Any] | None = [None] * self._mesh.num_ranks if self._mesh.is_leader else None
            with talking("gather the evaluation"):
                dist.gather_object(found, gathered, dst=0, group=self._mesh.control)
            for part in gathered or []:
                losses += part
        if not self._mesh.is_leader:
            return None
        groups = grouped(losses, self._dataset)
        every = joined_loss(losses, self._dataset)
        return {
            "step": step,
            **every,
            "loss_by": groups,
            "bad": bad,
            "seconds": time.monotonic() - began,
        }

    def draw(self) -> None:
        """Computes the schedules of all batches. Every rank must call it; blocks until they are there.

        Called before the first step, so that a sample which fits no rank ends no run that has trained.

        Raises:
            ScheduleError: No schedule can be made, with `evaluation: ` before the cause.
        """
        try:
            for number in range(self._batches.num_batches):
                self._turn(number)
        except ScheduleError as error:
            error.args = (f"evaluation: {error}",)
            raise

    def close(self) -> None:
        """Stops the threads of its loader."""
        self._loader.close()

    def _turn(self, number: int) -> Turn:
        """Batch `number`. Its schedule is computed once and kept."""
        while len(self._turns) <= number:
            step = len(self._turns)
            self._schedules.submit(step, self._arm)
            taken = self._schedules.take(step, self._arm)
            samples = self._batches.batch(step)
            self._turns.append(
                Turn(step, self._arm, None, True, samples, taken.schedule, taken.waited_ns, [])
            )
        return self._turns[number]

    def _forward(
        self,
        turn: Turn,
        step: int,
        executor: Executor,
        stages: Mapping[int, Stage],
        is_stopped: Callable[[], int],
    ) -> tuple[Turn, list[SampleLoss]] | None:
        """Runs one batch: its turn, and the losses that this rank computed; none where the run shall stop."""
        schedule = turn.schedule
        mesh, adapter = self._mesh, self._loader.adapter
        self._loader.prefetch([(index, None) for index in read_samples(mesh, schedule, adapter)], False)
        self._loader.prefetch(encoder_shares(mesh, schedule, adapter), True)
        ready, _ = self._packer.pack(turn, executor, is_stopped, step=step, is_evaluated=True)
        if ready is None:
            return None
        with torch.no_grad():
            executor.run_step(ready.work, ready.actions)
        return ready.turn, sample_losses(stages, self._mesh, ready.turn.schedule, self._loader)


class HeldOut:
    """Which samples are evaluated, in batches."""

    def __init__(self, num_samples: int, num_drawn: int | None, batch_size: int, seed: int) -> None:
        """Draws them.

        Args:
            num_samples: How many samples there are.
            num_drawn: How many of them to draw; none: all.
            batch_size: Samples of each batch; the last one may have fewer.
            seed: Decides which are drawn.
        """
        count = num_samples if num_drawn is None else min(num_drawn, num_samples)
        self.samples = sorted(GlobalBatches(num_samples, count, seed).batch(0))
        """The drawn samples, ascending."""
        self._batch_size = batch_size

    @property
    def num_batches(self) -> int:
        """How many batches there are."""
        return -(-len(self.samples) // self._batch_size)

    def batch(self, step: int) -> list[int]:
        """The samples of a batch."""
        return self.samples[step * self._batch_size : (step + 1) * self._batch_size]


def sample_losses(
    stages: Mapping[int, Stage], mesh: Mesh, schedule: Schedule, loader: SampleLoader
) -> list[SampleLoss]:
    """The loss of each sample whose loss this rank has computed in the last step or batch.

    Args:
        stages: Of this rank.
        mesh: This rank's coordinates.
        schedule: Of that step or batch.
        loader: Has the samples of this rank.

    Returns:
        The losses; empty where this rank computes no loss, or is not the first rank of its tensor group: all
        ranks of a tensor group compute the same losses.
    """
    says = mesh.is_last_stage and mesh.tensor == 0
    found = stages[mesh.stages[-1]].sample_losses if says else {}
    return [
        SampleLoss(index, loader.sample(index).kind, loss)
        for j, losses in found.items()
        for index, loss in zip(schedule.llm(j, mesh.replica), losses, strict=True)
    ]


def joined_loss(losses: list[SampleLoss], dataset: Dataset) -> dict[str, Any]:
    """`loss` (mean over label tokens), `label_tokens` and `samples` of all these samples together."""
    label_tokens = sum(dataset.shape(one.sample)[2] for one in losses)
    loss = sum(one.loss for one in losses) / max(1, label_tokens)
    is_number = loss == loss and abs(loss) != float("inf")
    return {"loss": loss if is_number else None, "label_tokens": label_tokens, "samples": len(losses)}
