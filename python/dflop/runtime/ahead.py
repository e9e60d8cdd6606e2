"""What a rank decodes media with, begun before it joins the others: workers, and the room they fill."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import TYPE_CHECKING

from dflop.data.arena import Arena
from dflop.data.workers import Workers
from dflop.models import load_adapter

if TYPE_CHECKING:
    from collections.abc import Mapping

    from dflop._native import Plan
    from dflop.models.adapter import ModelAdapter
    from dflop.runtime.options import Options


@dataclass(frozen=True)
class Ahead:
    """Of one rank; nothing where it encodes nothing."""

    workers: Workers | None = None
    arena: Arena | None = None
    """For the samples that train."""
    evaluation_arena: Arena | None = None
    """For those that are evaluated while the first holds what trains next."""

    def close(self) -> None:
        """Ends the workers."""
        if self.workers is not None:
            self.workers.close()


def begin(options: Options, plan: Plan, environment: Mapping[str, str] = os.environ) -> Ahead:
    """Forks the workers of this rank, where it holds the encoder.

    To be called before this process has threads, process groups or a GPU: a fork has none of them.

    Args:
        options: Of the run.
        plan: Tells what this rank holds.
        environment: torchrun's.

    Returns:
        What it decodes with. Both arenas together have `data.ahead_bytes`.
    """
    rank = int(environment.get("RANK", "0"))
    if rank >= plan.num_ranks or 0 not in plan.stages(rank):
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


def _load_processor(adapter: ModelAdapter) -> None:
    """Reads what images are processed with, once for all workers; else each would at its first one."""
    try:
        getattr(adapter, "image_processor", None) or getattr(adapter, "processor", None)
    except Exception:  # noqa: BLE001
        # It comes again, with a sample's name, where there is an image.
        return
