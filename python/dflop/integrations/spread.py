"""Who computes which of the samples that were generated: microbatches and ranks have even work."""

from __future__ import annotations

import warnings
from typing import TYPE_CHECKING, Any

import torch

from dflop.data.costs import costs
from dflop.data.split import Split
from dflop.integrations.accelerate import meets_of
from dflop.integrations.generated_rows import exchange
from dflop.integrations.padded_rows import is_removed
from dflop.integrations.parameter_cost import cost_of_parameters
from dflop.integrations.row_costs import media_tokens
from dflop.integrations.text_alone import (
    OF_ENCODER,
    handles_of,
    is_under_fsdp2,
    meet_in_encoder,
    unused_in_ddp,
)

if TYPE_CHECKING:
    from collections.abc import Sequence

    from dflop.integrations.generated_rows import Row


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
        self._is_told = False

    def split(self, sizes: Sequence[tuple[float, int]], num_microbatches: int, scorer: Any = None) -> Parts:
        """Who computes which samples of all ranks; each calls it, with equally many samples.

        Args:
            sizes: encoder tokens and LLM tokens of each sample of this rank.
            num_microbatches: of each rank.
            scorer: the model that computes a forward alone; None: the samples are trained on.

        Returns:
            Equal on all ranks.
        """
        trainer = self._trainer
        num_ranks = trainer.args.world_size
        model, cost = (trainer.model, self.trained) if scorer is None else (scorer, self._scored)
        own = torch.tensor([cost(size) for size in sizes], dtype=torch.float64)
        device = trainer.accelerator.device
        everyone = own if num_ranks == 1 else trainer.accelerator.gather(own.to(device)).cpu()
        meets = meets_of(trainer.accelerator, trainer.model)
        self._meet(int((everyone[:, 0] == 0).sum()), len(everyone), meets)
        if any(handle.is_shared for handle in handles_of(model)):
            # All ranks share the encoder's work, in each microbatch.
            everyone[:, 0], meets = 0, "phase"
        is_padded = not is_removed() if self.is_padded is None else self.is_padded
        num_buckets = num_ranks * num_microbatches
        split = Split.checked(num_ranks, 0, num_buckets, meets, trainer.args.seed, is_padded)
        native = costs(everyone.tolist())._native
        buckets = native.buckets(range(len(everyone)), split.cut(num_ranks, None, None))
        return Parts(buckets, num_ranks, len(sizes), device)

    def _meet(self, num_alone: int, num_samples: int, meets: str) -> None:
        """Lets samples of text alone hang nobody, or warns of it once."""
        trainer, rank = self._trainer, self._trainer.args.process_index
        text_alone = num_alone, num_samples
        if self._is_told:
            return
        self._is_told = 0 < num_alone < num_samples
        if meets == "phase":
            meet_in_encoder(trainer.model, text_alone, rank, is_fsdp2=is_under_fsdp2(trainer))
        elif rank == 0 and (fact := unused_in_ddp(trainer, text_alone)):
            warnings.warn(f"{fact}. {OF_ENCODER}", stacklevel=2)


class Parts:
    """Samples of each microbatch of each rank, numbered through over all ranks."""

    def __init__(self, buckets: list[list[int]], num_ranks: int, num_own: int, device: torch.device) -> None:
        """Moves nothing yet.

        Args:
            buckets: samples of each microbatch; neighbours are of neighbouring ranks.
            num_ranks: how many.
            num_own: samples that each rank generated.
            device: of the tensors that travel.
        """
        self._buckets, self._num_ranks, self._num_own = buckets, num_ranks, num_own
        self._device = device
        self._rank_of = {
            sample: bucket % num_ranks for bucket, samples in enumerate(buckets) for sample in samples
        }

    def _of(self, rank: int) -> list[int]:
        """What a rank computes, ascending."""
        return sorted(sample for bucket in self._buckets[rank :: self._num_ranks] for sample in bucket)

    def of_rank(self, rows: list[Row], rank: int) -> list[tuple[list[int], list[Row], list[int]]]:
        """Of each microbatch of this rank its samples; every rank calls it.

        Args:
            rows: what this rank generated, in its order.
            rank: this one.

        Returns:
            Their numbers, they, and how many samples each rank has in that microbatch.
        """
        num_ranks, num_own = self._num_ranks, self._num_own
        targets = [
            [self._rank_of[source * num_own + position] for position in range(num_own)]
            for source in range(num_ranks)
        ]
        held = dict(zip(self._of(rank), exchange(rows, targets, rank, self._device), strict=True))
        found = []
        for start in range(0, len(self._buckets), num_ranks):
            of_ranks = self._buckets[start : start + num_ranks]
            own = of_ranks[rank]
            found.append((own, [held[sample] for sample in own], list(map(len, of_ranks))))
        return found

    def returned(self, found: dict[int, Row], rank: int) -> list[Row]:
        """What ranks made of the samples of this one; every rank calls it.

        Args:
            found: by the number of each sample that this rank computed.
            rank: this one.

        Returns:
            In the order of what this rank generated.
        """
        held = [self._of(other) for other in range(self._num_ranks)]
        targets = [[sample // self._num_own for sample in samples] for samples in held]
        arrived = exchange([found[sample] for sample in held[rank]], targets, rank, self._device)
        order = [sample for samples in held for sample in samples if sample // self._num_own == rank]
        of_sample = dict(zip(order, arrived, strict=True))
        return [of_sample[rank * self._num_own + position] for position in range(self._num_own)]
