"""Schedules for all ranks: the leader's Rust thread computes them ahead of time, the others receive them."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

import torch.distributed as dist

from dflop._native import GlobalBatches, Schedule, StepScheduler
from dflop.runtime.failure import talking

if TYPE_CHECKING:
    from dflop.runtime.mesh import Mesh
    from dflop.runtime.options import Arm, Options


class Schedules:
    """The schedules of a run, by step and arm."""

    def __init__(self, mesh: Mesh, options: Options, batches: GlobalBatches) -> None:
        """Reads the profiles on the leader.

        Args:
            mesh: This rank's place.
            options: Of the run.
            batches: Which samples each step has.

        Raises:
            ArtifactError: A file cannot be used.
        """
        self._mesh = mesh
        self._batches = batches
        self.scheduler = (
            StepScheduler(
                options.plan_path,
                options.data_profile_path,
                options.model_profile_path,
                options.seed,
                options.memory_budget_bytes,
                # torchrun numbers ranks node by node.
                int(os.environ.get("LOCAL_WORLD_SIZE", mesh.num_ranks)),
                giants=options.giants,
                bucket_tokens_max=options.bucket_tokens_max,
            )
            if mesh.is_leader
            else None
        )
        """On the leader only."""

    def submit(self, step: int, arm: Arm) -> None:
        """Queues a schedule on the leader and returns at once; does nothing elsewhere."""
        if self.scheduler is not None:
            self.scheduler.submit(step, self._batches.batch(step), arm)

    def take(self, step: int, arm: Arm) -> tuple[Schedule, int]:
        """A schedule that was submitted.

        Every rank must call it; the leader sends the schedule; blocks until it is there.

        Args:
            step: Of the global batch.
            arm: How it was scheduled.

        Returns:
            The schedule, and the nanoseconds the leader waited for it (0 elsewhere).

        Raises:
            ScheduleError: No schedule can be made.
            RankError: The leader has gone.
        """
        message: list[Schedule | None] = [None]
        waited_ns = 0
        if self.scheduler is not None:
            message[0], waited_ns = self.scheduler.take(step, arm)
        with talking("receive the schedule"):
            dist.broadcast_object_list(message, src=0, group=self._mesh.control)
        schedule = message[0]
        assert schedule is not None
        return schedule, waited_ns
