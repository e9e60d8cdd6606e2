"""What a rank decodes media with: worker processes, and the shared memory (arenas) that they fill.

Both are made before the rank joins the others, since workers are forked. Of a tensor group only the first
rank decodes: it sends the others what it has packed (`stage.py`).
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import TYPE_CHECKING

from dflop.data.arena import Arena
from dflop.data.workers import Workers
from dflop.models import load_adapter

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from dflop._native import Plan
    from dflop.models.adapter import ModelAdapter
    from dflop.runtime.options import Options


@dataclass(frozen=True)
class Ahead:
    """The workers and arenas of one rank; all fields are none where the rank decodes nothing."""

    workers: Workers | None = None
    arena: Arena | None = None
    """For media of the samples that train."""
    evaluation_arena: Arena | None = None
    """For media of samples that are evaluated: meanwhile the other arena holds what trains next."""

    def close(self) -> None:
        """Ends the workers."""
        if self.workers is not None:
            self.workers.close()


def begin(options: Options, plan: Plan, environment: Mapping[str, str] = os.environ) -> Ahead:
    """Forks the workers of this rank, where it decodes media for its tensor group.

    To be called before this process has threads, process groups or a GPU: none of them works in a forked
    process.

    Args:
        options: Of the run.
        plan: Tells what this rank holds.
        environment: torchrun's.

    Returns:
        What it decodes with. Both arenas together have `data.ahead_bytes`.
    """
    rank = int(environment.get("RANK", "0"))
    first = rank < plan.num_ranks and (plan.tensor(rank) == 0 or plan.encoders_per_group > 1)
    if not first or not _decodes(plan.stages(rank), plan.encoder_stages, options):
        return Ahead()
    held_out = options.ahead_bytes // 4 if options.evaluation is not None else 0
    arena = Arena(options.ahead_bytes - held_out)
    arenas = [arena, Arena(held_out)] if held_out else [arena]
    workers = None
    if options.workers > 0:
        adapter = load_adapter(options.model_dir)
        _load_processor(adapter)
        workers = Workers(options.workers, adapter, arenas)
    return Ahead(workers, arena, arenas[1] if held_out else None)


def _decodes(stages: Sequence[int], encoder_stages: int, options: Options) -> bool:
    """As `work.decodes`, before there is a mesh. The adapter is loaded only where its answer is needed."""
    if 0 in stages:
        return True
    return (
        any(stage < encoder_stages for stage in stages) and load_adapter(options.model_dir).runs_read_inputs
    )


def _load_processor(adapter: ModelAdapter) -> None:
    """Loads the image processor before the fork; else each worker would load it for its first image."""
    try:
        getattr(adapter, "image_processor", None) or getattr(adapter, "processor", None)
    except Exception:  # noqa: BLE001
        # A worker meets the same error at its first image, and then names the sample.
        return
