"""Balanced batches with Lightning: a data module that knows the ranks and keeps its place in checkpoints."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from lightning.pytorch import LightningDataModule
from torch.utils.data import DataLoader

from dflop.data.sampler import BalancedBatchSampler
from dflop.integrations.loader import split_options

if TYPE_CHECKING:
    from collections.abc import Mapping


class _Sampler(BalancedBatchSampler):
    @property
    def sampler(self) -> BalancedBatchSampler:
        """Here Lightning looks for `set_epoch`."""
        return self


class _Loader(DataLoader[Any]):
    """Counts the batches it gives out: its workers are ahead, and the sampler with them."""

    num_given = 0

    def __iter__(self) -> Any:
        self.num_given = 0
        for batch in super().__iter__():
            self.num_given += 1
            yield batch


class BalancedData(LightningDataModule):
    """The training data of all ranks, in batches of even work.

    Make the trainer with `use_distributed_sampler=False`, and take the loss of `training_step` from
    `dflop.integrations.token_loss` with `num_label_tokens(labels)` and `self.trainer.world_size` ranks. With
    `accumulate_grad_batches` the label tokens of later microbatches are not known yet: see
    docs/integrations.md.
    """

    def __init__(self, dataset: Any, costs: Any, batch_size: int, **options: Any) -> None:
        """Keeps what the loader is made of.

        Args:
            dataset: with positions from 0.
            costs: what `BalancedBatchSampler` takes.
            batch_size: samples of a microbatch, on average.
            **options: of the DataLoader and of `BalancedBatchSampler`.
        """
        super().__init__()
        self._dataset, self._costs, self._batch_size = dataset, costs, batch_size
        self._of_loader, self._of_sampler = split_options(options)
        self._sampler: BalancedBatchSampler | None = None
        self._loader: _Loader | None = None
        self._state: Mapping[str, Any] | None = None

    def train_dataloader(self) -> DataLoader[Any]:
        """The loader of this rank.

        Returns:
            Its `batch_sampler` is the sampler.

        Raises:
            ValueError: the trainer would deal out the batches once more.
        """
        trainer: Any = self.trainer
        if trainer.world_size > 1 and trainer._accelerator_connector.use_distributed_sampler:
            message = (
                "`use_distributed_sampler` is true and would deal out each rank's batches once more: "
                "make the trainer with `use_distributed_sampler=False`"
            )
            raise ValueError(message)
        self._sampler = _Sampler(
            self._costs,
            self._batch_size,
            trainer.world_size,
            trainer.global_rank,
            num_buckets=trainer.world_size * int(trainer.accumulate_grad_batches),
            **self._of_sampler,
        )
        if self._state is not None:
            self._sampler.load_state_dict(self._state)
            self._state = None
        self._loader = _Loader(self._dataset, batch_sampler=self._sampler, **self._of_loader)
        return self._loader

    def state_dict(self) -> dict[str, Any]:
        """Where the epoch stands; Lightning puts it into each checkpoint."""
        if self._sampler is None or self._loader is None:
            return {}
        return dict(self._sampler.state_dict(num_batches=self._loader.num_given))

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """The next loader goes on from there.

        Args:
            state_dict: of `state_dict`.
        """
        self._state = dict(state_dict) or None
