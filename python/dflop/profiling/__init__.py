"""Measuring: what each module of a model costs, over a grid of sizes, on the device it will train on."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from dflop.profiling.artifact import hash_config, write_artifact
from dflop.profiling.progress import Progress, progress_bar

if TYPE_CHECKING:
    from dflop.profiling.model import profile_model

__all__ = ["Progress", "hash_config", "profile_model", "progress_bar", "write_artifact"]


def __getattr__(name: str) -> Any:
    """Imports the profiler at its first use: code that only launches it needs no torch."""
    if name == "profile_model":
        from dflop.profiling.model import profile_model

        return profile_model
    message = f"module `{__name__}` has no attribute `{name}`"
    raise AttributeError(message)
