"""Schedules for all ranks: a Rust thread on the leader computes them ahead, the other ranks receive them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

import torch.distributed as dist

from dflop._native import Schedule, StepScheduler
from dflop.runtime.adaptation import Adaptation
from dflop.runtime.failure import talking

if TYPE_CHECKING:
    from dflop.runtime.mesh import Mesh
    from dflop.runtime.options import Arm, Options


@dataclass(frozen=True)
class Taken:
    """A schedule, and what the leader alone knows of it."""

    schedule: Schedule
    waited_ns: int
    """How long the leader waited for it; 0 elsewhere."""
    correction: dict[str, Any] | None
    """Factors on predicted times that it was made with; none: the times of the model profile, uncorrected."""
    compared_ns: tuple[int, int] | None
    """Makespans of this batch if scheduled without and with the correction, both with corrected times; none
    where only one schedule was made."""


class Batches(Protocol):
    """Which samples each step has."""

    def batch(self, step: int) -> list[int]:
        """The samples of a step."""
        ...


class Schedules:
    """The schedules of a run, by step and arm."""

    def __init__(
        self, mesh: Mesh, options: Options, batches: Batches, data_profile_path: str | None = None
    ) -> None:
        """Reads the profiles on the leader.

        Args:
            mesh: This rank's coordinates.
            options: Of the run.
            batches: Which samples each step has.
            data_profile_path: Data profile with the shapes of these samples; none: that of the run.

        Raises:
            ArtifactError: A file cannot be used.
        """
        self._mesh = mesh
        self._batches = batches
        self.scheduler = (
            StepScheduler(
                options.plan_path,
                data_profile_path or options.data_profile_path,
                options.model_profile_path,
                options.seed,
                options.memory_budget_bytes,
                options.ranks_per_node,
                giants=options.giants,
                bucket_tokens_max=options.bucket_tokens_max,
            )
            if mesh.is_leader
            else None
        )
        """Computes the schedules; none on ranks other than the leader."""
        # A comparison corrects nothing: what one arm has measured must not change the others.
        is_run = mesh.is_leader and not options.compare
        self.adaptation = Adaptation(options.correction) if is_run else None
        """Decides whether schedules are corrected; none on other ranks, and in a comparison."""

    def submit(self, step: int, arm: Arm) -> None:
        """Queues a schedule on the leader and returns at once; does nothing elsewhere."""
        if self.scheduler is not None:
            corrected, compared = (False, False) if self.adaptation is None else self.adaptation.asks()
            batch = self._batches.batch(step)
            self.scheduler.submit(step, batch, arm, corrected=corrected, compared=compared)

    def take(self, step: int, arm: Arm) -> Taken:
        """A schedule that was submitted.

        Every rank must call it; the leader sends the schedule; blocks until it is there.

        Args:
            step: Step of the global batch.
            arm: The way in which it was scheduled.

        Returns:
            The schedule, and what the leader alone knows of it.

        Raises:
            ScheduleError: No schedule can be made.
            RankError: The leader has gone.
        """
        message: list[Schedule | None] = [None]
        waited_ns, adjustment, compared_ns = 0, None, None
        if self.scheduler is not None:
            message[0], waited_ns, adjustment, compared_ns = self.scheduler.take(step, arm)
        with talking("receive the schedule"):
            dist.broadcast_object_list(message, src=0, group=self._mesh.control)
        schedule = message[0]
        assert schedule is not None
        return Taken(schedule, waited_ns, adjustment, compared_ns)
