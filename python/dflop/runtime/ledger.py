"""The ledger of a run's checkpoints: where the run goes on, when it saves, and what a checkpoint says.

start    the checkpoint that `--resume` names, found by the leader and compared with this run
load     its tensors on each rank; on the leader also what was learned from steps
save     every few steps, at the end, and where a signal ends the run

Training and rehearsals keep the same ledger. In a rehearsal no rank has tensors, and neither goes on from the
other's checkpoints.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch.distributed as dist

from dflop.runtime.failure import RankError, talking
from dflop.runtime.progress import say
from dflop.runtime.records import kept, restore
from dflop.runtime.resume import Resume, find

if TYPE_CHECKING:
    from collections.abc import Mapping

    from dflop.runtime.bad_samples import BadSamples
    from dflop.runtime.checkpoint import Saver
    from dflop.runtime.guard import Guard
    from dflop.runtime.journal import Journal
    from dflop.runtime.mesh import Mesh
    from dflop.runtime.options import Options
    from dflop.runtime.population import Population
    from dflop.runtime.schedules import Schedules


@dataclass(frozen=True)
class Start:
    """Where the steps of these ranks begin."""

    place: Mapping[str, Any]
    """All that decides which samples each step has, as in the manifest of a checkpoint."""
    resume: Resume | None
    """Where an earlier start is gone on from; none: the run begins anew."""
    step: int
    """The first step."""
    journal_step: int | None
    """The step from which lines are added to the journals of `out`; none: they begin anew."""
    is_rehearsed: bool
    """Whether this is a rehearsal."""
    owes_evaluation: bool = False
    """Whether a signal cut off the evaluation after the step before, so that it comes first."""

    @property
    def has_checkpoint(self) -> bool:
        """Whether a checkpoint gives the parameters."""
        return self.resume is not None and self.resume.path is not None

    @property
    def verb(self) -> str:
        """The command's name."""
        return "rehearse" if self.is_rehearsed else "train"

    @staticmethod
    def together(options: Options, mesh: Mesh, num_samples: int, *, is_rehearsed: bool = False) -> Start:
        """Finds where to begin. Every rank must call it; the leader looks and tells all; blocks.

        Args:
            options: Of the run.
            mesh: This rank's coordinates.
            num_samples: Of the data.
            is_rehearsed: Whether this is a rehearsal.

        Returns:
            The same on every rank.

        Raises:
            RankError: The checkpoint to go on from cannot be used; on every rank alike.
        """
        limit = options.giant_llm_tokens if options.giants == "defer" else None
        place = {
            "data_profile": options.made_from["data_profile"],
            "num_samples": num_samples,
            "seed": options.seed,
            "global_batch_size": mesh.plan.global_batch_size,
            "giant_llm_tokens": limit,
            "giant_steps_max": None if limit is None else options.giant_steps_max,
        }
        if options.resume is None:
            return Start(place, None, 0, None, is_rehearsed)
        found: list[Resume | RankError | None] = [None]
        if mesh.is_leader:
            try:
                model = None if is_rehearsed else options.model
                found = [find(options.resume, options.out, place, model, is_rehearsed=is_rehearsed)]
            except RankError as error:
                found = [error]
        with talking("find the checkpoint"):
            dist.broadcast_object_list(found, src=0, group=mesh.control)
        resume = found[0]
        if isinstance(resume, RankError):
            raise resume
        assert resume is not None, "the leader has found it or said why not"
        journal_step = resume.step if resume.continues(options.out) else None
        owes = [resume.owes_evaluation(options.out) if mesh.is_leader else False]
        with talking("find the checkpoint"):
            dist.broadcast_object_list(owes, src=0, group=mesh.control)
        return Start(place, resume, resume.step, journal_step, is_rehearsed, owes[0])


class Ledger:
    """The checkpoints of one run, as one rank writes them."""

    def __init__(
        self,
        options: Options,
        mesh: Mesh,
        start: Start,
        saver: Saver,
        schedules: Schedules,
        guard: Guard,
        population: Population | None,
        journal: Journal | None,
        bad: BadSamples | None = None,
    ) -> None:
        """Goes on from the start's checkpoint. Every rank must call it; blocks until all have read theirs.

        Args:
            options: Of the run.
            mesh: This rank's coordinates.
            start: Where the steps begin.
            saver: Has the tensors of this rank.
            schedules: Of the run; on the leader with what was learned from steps.
            guard: Counts the steps that were skipped.
            population: Watches which samples come; none: nothing does, as on ranks other than the leader.
            journal: Of the run, on the leader; else none.
            bad: Counts the bad samples; none: nothing is read, as in rehearsals.

        Raises:
            RankError: A file of the checkpoint is damaged or missing; on every rank alike.
            ScheduleError: The checkpoint holds what was learned from other steps.
        """
        self._options = options
        self._mesh = mesh
        self._start = start
        self._saver = saver
        self._schedules = schedules
        self._guard = guard
        self._population = population
        self._journal = journal
        self._bad = bad
        self.evaluation_due = False
        """On the leader: whether a signal cut off the evaluation after the last step."""
        if start.resume is not None:
            self._load(start.resume)

    @property
    def has_failed(self) -> bool:
        """Whether the save under way has failed on this rank: then `finish` says why, on all."""
        return self._saver.has_failed

    def finish(self) -> None:
        """Waits for the save under way. Every rank must call it; blocks until all files are written.

        Raises:
            RankError: It failed, on every rank alike.
        """
        self._saver.finish()

    def after(self, num_trained: int) -> None:
        """Begins a checkpoint where one is due. Every rank must call it between the same two steps.

        Args:
            num_trained: Steps trained.

        Raises:
            RankError: The save before it failed.
        """
        every = self._options.checkpoint_every
        if every is not None and num_trained % every == 0:
            self._save(num_trained)

    def end(self, num_trained: int) -> None:
        """Saves a last checkpoint and waits for it. Every rank must call it; blocks until it is written.

        Args:
            num_trained: Steps trained.

        Raises:
            RankError: It failed, on every rank alike.
        """
        self._save(num_trained)
        self._saver.finish()

    def say_interrupted(self) -> None:
        """Tells people, on the leader, that the run was ended early, and what was saved."""
        journal = self._journal
        if journal is None:
            return
        if journal.has_begun:
            words = f"after {journal.num_written} steps; metrics are in {self._options.out}"
            if self._saver.last_step is not None:
                again = f"dflop {self._start.verb} --resume auto"
                words += f"\nhint: go on from step {self._saver.last_step} with `{again}`"
        elif self._options.request_path is None:
            words = "before the first step; nothing is written"
        else:
            # The command that started the ranks says this itself, here as for a signal before the ranks met.
            return
        sys.stderr.write(f"interrupted {words}\n")
        sys.stderr.flush()

    def _load(self, resume: Resume) -> None:
        if resume.path is None:
            say("no checkpoint yet: beginning anew", self._start.verb)
            return
        say(f"going on from {resume.path}", self._start.verb)
        recipe = resume.manifest.get("model", {}).get("recipe", self._options.recipe)
        if recipe != self._options.recipe and self._mesh.is_leader and not self._start.is_rehearsed:
            sys.stderr.write(
                f"note: `{resume.path}` was trained with `train.recipe: {recipe}`, "
                f"this run has `{self._options.recipe}`: the rest stays as it is there\n"
            )
        self._saver.load(resume.path, resume.step)
        self._guard.load(resume.manifest["guard"])
        # Checkpoints before 2026-12 do not know them.
        if self._bad is not None and (known := resume.manifest.get("bad_samples")) is not None:
            self._bad.load(known)
        scheduler = self._schedules.scheduler
        # Times that were measured under one plan say nothing about ranks of another plan.
        if scheduler is not None and resume.manifest["made_from"] == self._options.made_from:
            restore(resume.manifest, scheduler, self._schedules.adaptation, self._population)

    def _save(self, num_trained: int) -> None:
        """Saves a checkpoint, unless it exists. A replay saves none: it trains what another run has."""
        if num_trained == (self._saver.last_step or 0) or self._options.replay is not None:
            return
        about: dict[str, Any] = {}
        scheduler, journal = self._schedules.scheduler, self._journal
        if scheduler is not None and journal is not None:
            journal.sync()
            about = {
                "is_rehearsed": self._start.is_rehearsed,
                "place": self._start.place,
                "made_from": self._options.made_from,
                "model": self._options.model,
                "num_ranks": self._mesh.num_ranks,
                "precision": self._options.dtype,
                "learning_rates": self._options.rates.at(num_trained),
                "guard": self._guard.state(),
                **({} if self._bad is None else {"bad_samples": self._bad.state()}),
                "evaluation_due": self.evaluation_due,
                **kept(scheduler, self._schedules.adaptation, self._population),
            }
        self._saver.save(num_trained, about)
