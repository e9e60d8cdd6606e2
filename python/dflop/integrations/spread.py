"""Who computes which samples of a step, once they are there: microbatches and ranks have even work.

samples of each rank -> costs of all, gathered -> who computes which -> each travels -> microbatches
"""

from __future__ import annotations

from itertools import accumulate
from typing import TYPE_CHECKING, Any

import torch

from dflop.data.costs import costs
from dflop.data.split import Meets, Split
from dflop.integrations.accelerate import meets_of
from dflop.integrations.padded_rows import is_removed
from dflop.integrations.parameter_cost import cost_of_parameters
from dflop.integrations.row_costs import media_tokens, warn_of_unknown
from dflop.integrations.sent_rows import exchange
from dflop.integrations.text_alone import handles_of, meet_or_warn

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch.distributed import ProcessGroup

    from dflop.integrations.sent_rows import Row


class Spread:
    """How samples are spread over microbatches and ranks."""

    def __init__(self, trainer: Any, is_padded: bool | None) -> None:
        """Counts what a token costs, before anything shards the model.

        Args:
            trainer: of transformers.
            is_padded: whether the model computes the padding of a microbatch; None: unless `remove_padding`
                is in force.

        Raises:
            ValueError: the model has no LLM backbone that can be counted.
        """
        self.is_padded = is_padded
        self._trainer = trainer
        # Of a sample that is trained on; benchmarks put another cost in its place.
        self.trained = cost_of_parameters(trainer.model)
        self._scored = cost_of_parameters(trainer.model, is_trained=False)
        self.media = media_tokens(trainer.model, self.trained)
        warn_of_unknown(trainer.model)
        self._is_told = False

    def split(
        self,
        sizes: Sequence[tuple[float, int]],
        num_microbatches: int,
        scorer: Any = None,
        most: int | None = None,
    ) -> Parts:
        """Who computes which samples of all ranks; each calls it.

        Args:
            sizes: encoder tokens and LLM tokens of each sample of this rank.
            num_microbatches: into which this rank would have cut its own; the most of all ranks are made.
            scorer: the model that computes a forward alone; None: the samples are trained on.
            most: as many samples as a rank may have; None: each has as many as this one.

        Returns:
            Equal on all ranks; at least one sample in each microbatch, if there are so many.
        """
        trainer = self._trainer
        num_ranks = trainer.args.world_size
        model, cost = (trainer.model, self.trained) if scorer is None else (scorer, self._scored)
        most = len(sizes) if most is None else most
        device = trainer.accelerator.device
        # Behind the costs the number of microbatches.
        mine = torch.full((1, most + 1, 2), torch.nan, dtype=torch.float64)
        mine[0, most] = num_microbatches
        if sizes:
            mine[0, : len(sizes)] = torch.tensor([cost(size) for size in sizes], dtype=torch.float64)
        gathered = mine if num_ranks == 1 else trainer.accelerator.gather(mine.to(device)).cpu()
        found, num_microbatches = gathered[:, :most], int(gathered[:, most].max())
        is_there = ~found[..., 0].isnan()
        counts, everyone = is_there.sum(dim=1).tolist(), found[is_there]
        meets = meets_of(trainer.accelerator, trainer.model)
        self._meet(int((everyone[:, 0] == 0).sum()), len(everyone), meets)
        if any(handle.is_shared for handle in handles_of(model)):
            # All ranks share the encoder's work, in each microbatch.
            everyone[:, 0], meets = 0, "phase"
        is_padded = not is_removed() if self.is_padded is None else self.is_padded
        buckets = even_buckets(
            everyone.tolist(), num_ranks, num_ranks * num_microbatches, meets, trainer.args.seed, is_padded
        )
        return Parts(buckets, counts, device)

    def _meet(self, num_alone: int, num_samples: int, meets: str) -> None:
        """Lets samples of text alone hang nobody, or warns of it once."""
        if not self._is_told:
            self._is_told = 0 < num_alone < num_samples
            meet_or_warn(self._trainer, (num_alone, num_samples), meets)


def even_buckets(
    pairs: Sequence[Sequence[float]],
    num_ranks: int,
    num_buckets: int,
    meets: Meets,
    seed: int,
    is_padded: bool = False,
    tokens: Sequence[int] | None = None,
    max_tokens: int | None = None,
) -> list[list[int]]:
    """Samples of each microbatch. The first microbatches of all ranks come first, then their second ones.

    Args:
        pairs: encoder and LLM cost of each sample.
        num_ranks: as many microbatches in a row are computed at a time.
        num_buckets: microbatches, a multiple of `num_ranks`.
        meets: what ranks wait for.
        seed: of ties.
        is_padded: whether the rows of a microbatch are padded to its longest sample.
        tokens: of each sample, where there is a limit on them.
        max_tokens: of a microbatch.

    Returns:
        Positions in `pairs`; at least one in each, if there are so many.

    Raises:
        ScheduleError: no microbatches were found that keep the limit.
    """
    if len(pairs) < num_buckets:
        return [[sample] for sample in range(len(pairs))] + [[] for _ in range(num_buckets - len(pairs))]
    split = Split.checked(num_ranks, 0, num_buckets, meets, seed, is_padded)
    native = costs(pairs, tokens=tokens)._native
    return native.buckets(range(len(pairs)), split.cut(num_ranks, None, max_tokens))


class Parts:
    """Samples of each microbatch of each rank, numbered through over all ranks."""

    def __init__(
        self,
        buckets: list[list[int]],
        counts: Sequence[int],
        device: torch.device,
        group: ProcessGroup | None = None,
    ) -> None:
        """Sends nothing yet.

        Args:
            buckets: samples of each microbatch: those of the first of each rank, then of the second, ...
            counts: samples that each rank has.
            device: through which samples travel.
            group: the ranks; None: all there are.
        """
        self.buckets, self.counts = buckets, list(counts)
        self._num_ranks, self._device, self._group = len(counts), device, group
        # The first sample of each rank, and how many there are.
        self._begins = [0, *accumulate(counts)]
        self._rank_of = {
            sample: bucket % self._num_ranks for bucket, samples in enumerate(buckets) for sample in samples
        }

    def _of(self, rank: int) -> list[int]:
        """What a rank computes, ascending."""
        return sorted(sample for bucket in self.buckets[rank :: self._num_ranks] for sample in bucket)

    def _had_by(self, rank: int) -> range:
        """What a rank has before samples travel."""
        return range(self._begins[rank], self._begins[rank + 1])

    def of_rank(
        self, rows: list[Row], rank: int, lands: torch.device | None = None
    ) -> list[tuple[list[int], list[Row], list[int]]]:
        """Lets the samples travel; each rank calls it.

        Args:
            rows: samples that this rank has.
            rank: this one.
            lands: where the tensors of samples that arrive are; None: where they travel.

        Returns:
            Of each microbatch of this rank the samples' numbers, the samples, and how many each rank has.
        """
        num_ranks = self._num_ranks
        targets = [[self._rank_of[sample] for sample in self._had_by(source)] for source in range(num_ranks)]
        arrived = exchange(rows, targets, rank, self._device, lands, self._group)
        held = dict(zip(self._of(rank), arrived, strict=True))
        found = []
        for start in range(0, len(self.buckets), num_ranks):
            of_ranks = self.buckets[start : start + num_ranks]
            own = of_ranks[rank]
            found.append((own, [held[sample] for sample in own], list(map(len, of_ranks))))
        return found

    def copies(
        self, rows: list[Row], rank: int, lands: torch.device | None = None, chosen: int = 0
    ) -> list[Row]:
        """A sample for each microbatch of a rank that has none, as where a stream ends; each rank calls it.

        Args:
            rows: samples that this rank had.
            rank: this one.
            lands: where the tensors of samples that arrive are; None: where they travel.
            chosen: which of `rows` is copied, should this rank be the first that has some.

        Returns:
            As many copies of one sample, which another microbatch holds too.
        """
        empty = [bucket % self._num_ranks for bucket, samples in enumerate(self.buckets) if not samples]
        if not empty:
            return []
        owner = next(other for other, count in enumerate(self.counts) if count)
        targets = [empty if other == owner else [] for other in range(self._num_ranks)]
        sent = rows[chosen : chosen + 1] * len(empty) if rank == owner else []
        return exchange(sent, targets, rank, self._device, lands, self._group)

    def returned(self, found: dict[int, Row], rank: int) -> list[Row]:
        """What ranks made of the samples of this one; each rank calls it.

        Args:
            found: what this rank made, by the sample's number.
            rank: this one.

        Returns:
            Of the samples that this rank had, in their order.
        """
        held = [self._of(other) for other in range(self._num_ranks)]
        had_by = {sample: other for other in range(self._num_ranks) for sample in self._had_by(other)}
        targets = [[had_by[sample] for sample in samples] for samples in held]
        sent = [found[sample] for sample in held[rank]]
        arrived = exchange(sent, targets, rank, self._device, group=self._group)
        order = [sample for samples in held for sample in samples if had_by[sample] == rank]
        of_sample = dict(zip(order, arrived, strict=True))
        return [of_sample[sample] for sample in self._had_by(rank)]
