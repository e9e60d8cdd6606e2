"""Loss by kind and by source, from the loss of each sample.

    rows of a pack [K] --by the bounds of its samples--> samples [M]      on the rank that computes the loss
    samples of all ranks --kind, source--> sums over label tokens         on the leader

The loss of a sample does not depend on the samples packed with it. So, apart from rounding, the sums are the
same for every schedule and layout.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F

from dflop.data.dataset import IGNORED_LABEL

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from dflop._native import Dataset
    from dflop.models.adapter import LlmInput


@dataclass(frozen=True)
class SampleLoss:
    """The loss of one sample."""

    sample: int
    kind: str
    """As `Sample.kind`."""
    loss: float
    """Summed over its label tokens."""


def sums_by_sample(row_losses_K: torch.Tensor, batch: LlmInput) -> torch.Tensor:
    """The loss of each sample of a pack.

    Args:
        row_losses_K: Of each position with a target, in order; on any device.
        batch: The pack, on the CPU.

    Returns:
        [M] float64, on the device of the rows.
    """
    ends = F.pad((batch.targets_T != IGNORED_LABEL).cumsum(0), (1, 0))[batch.cu_seqlens.long()]
    counts_M = ends.diff()
    which_K = torch.repeat_interleave(torch.arange(len(counts_M)), counts_M)
    sums_M = torch.zeros(len(counts_M), dtype=torch.float64, device=row_losses_K.device)
    # A blocking copy would wait until the device has done all its earlier work.
    return sums_M.index_add_(0, which_K.to(row_losses_K.device, non_blocking=True), row_losses_K.double())


def grouped(losses: Iterable[SampleLoss], dataset: Dataset) -> dict[str, dict[str, dict[str, Any]]]:
    """Losses by kind and by source.

    Args:
        losses: Each sample once.
        dataset: Knows their label tokens and sources.

    Returns:
        `kind` and `source`, each with `loss` (mean over label tokens), `label_tokens` and `samples` by name;
        names in order.
    """
    sums: dict[str, dict[str, list[float]]] = {"kind": {}, "source": {}}
    for one in losses:
        label_tokens = dataset.shape(one.sample)[2]
        for by, name in (("kind", one.kind), ("source", dataset.source(one.sample))):
            entry = sums[by].setdefault(name, [0.0, 0.0, 0.0])
            for place, value in enumerate((one.loss, label_tokens, 1)):
                entry[place] += value
    return {by: {name: _entry(*sums[by][name]) for name in sorted(sums[by])} for by in sums}


def joined(groups: Iterable[Mapping[str, Mapping[str, Any]]]) -> dict[str, dict[str, Any]]:
    """Joins several answers of `grouped` into one, those by kind or those by source.

    Args:
        groups: By name, as in `grouped(...)["kind"]`.

    Returns:
        The same over all of them.
    """
    sums: defaultdict[str, list[float]] = defaultdict(lambda: [0.0, 0.0, 0.0])
    for group in groups:
        for name, entry in group.items():
            loss = entry["loss"] * entry["label_tokens"]
            for place, value in enumerate((loss, entry["label_tokens"], entry["samples"])):
                sums[name][place] += value
    return {name: _entry(*sums[name]) for name in sorted(sums)}


def _entry(loss: float, label_tokens: float, samples: float) -> dict[str, Any]:
    mean = loss / max(1.0, label_tokens)
    # JSON has no NaN and no infinity.
    is_number = mean == mean and abs(mean) != float("inf")
    return {"loss": mean if is_number else None, "label_tokens": int(label_tokens), "samples": int(samples)}
