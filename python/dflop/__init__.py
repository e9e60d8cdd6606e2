"""dflop makes multimodal-LLM training faster by looking at the data.

`balance`, `costs` and `BalancedBatchSampler` need neither torch nor a configuration; the command `dflop` has
the rest.
"""

from typing import TYPE_CHECKING, Any

import dflop._interrupt  # noqa: F401 - first, so that the rest of these imports can be interrupted
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
from dflop.data.costs import Costs, costs
from dflop.data.sampler import BalancedBatchSampler

if TYPE_CHECKING:
    from dflop.data.stream import BalancedStream

__all__ = [
    "ArtifactError",
    "Balance",
    "BalancedBatchSampler",
    "BalancedStream",
    "Costs",
    "Error",
    "PlanError",
    "ProfileError",
    "ScheduleError",
    "__version__",
    "balance",
    "costs",
]


def __getattr__(name: str) -> Any:
    # It is a dataset of torch, which the rest does without.
    if name == "BalancedStream":
        from dflop.data import needs_torch  # noqa: F401
        from dflop.data.stream import BalancedStream

        return BalancedStream
    message = f"module `dflop` has no attribute `{name}`"
    raise AttributeError(message)
