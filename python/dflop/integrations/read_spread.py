"""Who computes which samples of a step that ranks have read, where microbatches have a limit on tokens.

costs of this rank's samples -> those of all ranks, gathered -> microbatches within the limit, or as read
"""

from __future__ import annotations

import warnings
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from dflop._native import ScheduleError
from dflop.integrations.spread import Parts, even_buckets
from dflop.models.sums import Sums

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch.distributed import ProcessGroup

    from dflop.data.split import Meets

Sizes = tuple[float, ...]
"""Of a sample: encoder cost, LLM cost, tokens, and other numbers."""

_KNOWN = 3
"""So many of these are known here."""


@dataclass
class ReadSpread:
    """How samples that were read are spread over microbatches and ranks."""

    whose: str
    """The framework whose microbatches are taken where no balanced ones keep the limit."""
    num_ranks: int
    group: ProcessGroup | None
    """Those ranks; None: one rank alone."""
    device: torch.device
    """Through which they talk."""
    meets: Meets
    seed: int
    """Of ties."""
    is_padded: bool = False
    """Whether the rows of a microbatch are padded to its longest sample."""
    is_shared: bool = False
    """Whether all ranks share the encoder's work, in each microbatch."""
    max_tokens: int = 0
    """Of a microbatch; where one that was read has more, as many as that one."""
    _is_told = False

    def split(self, read: Sequence[Sequence[Sizes]], num_others: int = 0) -> tuple[Parts, torch.Tensor]:
        """Who computes which samples of all ranks; each of the group calls it.

        Args:
            read: sizes of the samples of each microbatch that this rank has read.
            num_others: how many numbers of a sample follow its tokens.

        Returns:
            Equal on all ranks: who does, of as many microbatches as the rank with the most has read, and the
            sizes of all samples; [samples, 3 + num_others].
        """
        sums = Sums(self.group)
        rows = [sizes for batch in read for sizes in batch]
        fullest = max((self._tokens(batch) for batch in read), default=0)
        head = torch.tensor([[len(rows), len(read), fullest]], dtype=torch.float64, device=self.device)
        counts, numbers, most = sums.gather(head).long().cpu().T.tolist()
        width = _KNOWN + num_others
        if not any(counts):
            return Parts([], counts, self.device, self.group), torch.zeros(0, width, dtype=torch.float64)
        # Behind the sizes the microbatch that has read the sample.
        mine = torch.zeros(max(counts), width + 1, dtype=torch.float64)
        if rows:
            mine[: len(rows), :width] = torch.tensor(rows, dtype=torch.float64)
            places = [place for place, batch in enumerate(read) for _ in batch]
            mine[: len(rows), width] = torch.tensor(places, dtype=torch.float64)
        gathered = sums.gather(mine.to(self.device)).cpu().view(self.num_ranks, -1, width + 1)
        found = [gathered[rank, :count] for rank, count in enumerate(counts)]
        sizes = torch.cat(found)[:, :width]
        buckets = self._buckets(sizes, max(numbers), max(most))
        if buckets is None:
            buckets = as_read([one[:, width].long().tolist() for one in found], max(numbers))
        return Parts(buckets, counts, self.device, self.group), sizes

    def _tokens(self, batch: Sequence[Sizes]) -> float:
        """Of a microbatch that was read."""
        tokens = [sizes[2] for sizes in batch]
        return max(tokens, default=0) * len(tokens) if self.is_padded else sum(tokens)

    def _buckets(self, sizes: torch.Tensor, num_microbatches: int, fullest: int) -> list[list[int]] | None:
        """Samples of each microbatch; None where none was found within the limit on tokens."""
        num_buckets = self.num_ranks * num_microbatches
        pairs = sizes[:, :2].clone()
        if self.is_shared:
            pairs[:, 0] = 0
        # One that was read may be fuller: of one long sample, or where samples are counted.
        limit = max(self.max_tokens, fullest)
        how: dict[str, Any] = {"tokens": sizes[:, 2].long().tolist(), "max_tokens": limit}
        try:
            return even_buckets(
                pairs.tolist(), self.num_ranks, num_buckets, self.meets, self.seed, self.is_padded, **how
            )
        except ScheduleError:
            if not self._is_told:
                self._is_told = True
                warnings.warn(
                    f"no {num_buckets} balanced microbatches of at most {limit} tokens were found for "
                    f"{len(sizes)} samples: {self.whose}'s own are taken, here and wherever that happens",
                    stacklevel=2,
                )
            return None


def as_read(places: Sequence[Sequence[int]], num_microbatches: int) -> list[list[int]]:
    """The microbatches that were read: the first of each rank, then the second, ...

    Args:
        places: of each rank, which of its microbatches has each of its samples.
        num_microbatches: of a rank.

    Returns:
        Samples of each, numbered through over all ranks.
    """
    num_ranks = len(places)
    buckets: list[list[int]] = [[] for _ in range(num_ranks * num_microbatches)]
    sample = 0
    for rank, of_rank in enumerate(places):
        for place in of_rank:
            buckets[place * num_ranks + rank].append(sample)
            sample += 1
    return buckets
