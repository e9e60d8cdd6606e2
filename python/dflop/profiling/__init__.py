"""Measuring: what each module of a model costs, over a grid of sizes, on the device it will train on."""

from __future__ import annotations

from dflop.profiling.artifact import hash_config, write_artifact
from dflop.profiling.model import profile_model
from dflop.profiling.progress import Progress, progress_bar

__all__ = ["Progress", "hash_config", "profile_model", "progress_bar", "write_artifact"]
