"""dflop makes multimodal-LLM training faster by looking at the data.

`balance` and `BalancedBatchSampler` need neither torch nor a configuration; the command `dflop` has the rest.
"""

from dflop._native import (
    ArtifactError,
    Balance,
    Error,
    PlanError,
    ProfileError,
    ScheduleError,
    __version__,
    balance,
)
from dflop.data.sampler import BalancedBatchSampler

__all__ = [
    "ArtifactError",
    "Balance",
    "BalancedBatchSampler",
    "Error",
    "PlanError",
    "ProfileError",
    "ScheduleError",
    "__version__",
    "balance",
]
