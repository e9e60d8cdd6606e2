"""Balanced batches with torchtitan: a data loader in its own interface, whose state holds no ranks.

torchtitan divides each loss by the label tokens of the whole step itself.
"""

from __future__ import annotations

from dflop.data import needs_torch  # noqa: F401  # pyright: ignore[reportUnusedImport]

# isort: split
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from torch.utils.data import DataLoader
from torchtitan.components.dataloader import BaseDataLoader

from dflop.data.sampler import BalancedBatchSampler
from dflop.integrations.loader import check_length

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    import torch


class BalancedDataLoader(BaseDataLoader):
    """Batches of even work over the data-parallel ranks, epoch after epoch.

    Its place in the data goes into torchtitan's checkpoints, and is loaded on another number of ranks too.
    """

    @dataclass(kw_only=True, slots=True)
    class Config(BaseDataLoader.Config):
        """Made in a `config_registry` function, as torchtitan's other loaders."""

        source: Callable[..., tuple[Any, Any, Callable[[list[Any]], Any]]] | None = None
        """Called with `tokenizer` and `seq_len`; gives the dataset with positions from 0, its costs as
        `BalancedBatchSampler` takes them, and what makes `({"input": ...}, labels)` of samples."""

        accumulation: int = 1
        """Microbatches of a rank in a step: `global_batch_size / (local_batch_size * ranks)`."""

        seed: int = 0
        """Of the order of samples; equal on all ranks."""

        num_epochs: int | None = None
        """Epochs after which the data ends; None: never."""

        num_workers: int = 0
        """Processes that load."""

        sampler: dict[str, Any] | None = None
        """Further arguments of `BalancedBatchSampler`, such as `meets`."""

    def __init__(
        self,
        config: BalancedDataLoader.Config,
        *,
        dp_world_size: int,
        dp_rank: int,
        local_batch_size: int,
        tokenizer: Any = None,
        seq_len: int | None = None,
        **_: Any,
    ) -> None:
        if config.source is None:
            message = (
                "`dataloader.source` is not set, must be a function that gives dataset, costs and collation"
            )
            raise ValueError(message)
        dataset, costs, collate = config.source(tokenizer=tokenizer, seq_len=seq_len)
        self.sampler = BalancedBatchSampler(
            costs,
            local_batch_size,
            dp_world_size,
            dp_rank,
            num_buckets=dp_world_size * config.accumulation,
            seed=config.seed,
            **(config.sampler or {}),
        )
        check_length(dataset, self.sampler, "source")
        self._loader: DataLoader[Any] = DataLoader(
            dataset, batch_sampler=self.sampler, collate_fn=collate, num_workers=config.num_workers
        )
        self._num_epochs = config.num_epochs
        self._epoch = 0
        # Batches given out since the loop over this epoch began.
        self._taken = 0

    def __iter__(self) -> Iterator[tuple[dict[str, torch.Tensor], torch.Tensor]]:
        """Batches from where the state stands on."""
        while self._num_epochs is None or self._epoch < self._num_epochs:
            for batch in self._loader:
                self._taken += 1
                yield batch
            self._epoch += 1
            self.sampler.set_epoch(self._epoch)
            self._taken = 0

    def state_dict(self) -> dict[str, Any]:
        """Where the epoch stands after the batches that were given out."""
        return self.sampler.state_dict(num_batches=self._taken)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """The next iteration goes on from there.

        Args:
            state_dict: of `state_dict`, on any number of ranks; empty: from the start.
        """
        if not state_dict:
            return
        self.sampler.load_state_dict(state_dict)
        self._epoch = int(self.sampler.state_dict(num_batches=0)["epoch"])
        self._taken = 0
