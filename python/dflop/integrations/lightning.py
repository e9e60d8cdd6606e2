"""Balanced batches with Lightning: a data module that knows the ranks and keeps its place in checkpoints."""

from __future__ import annotations

from dflop.data import needs_torch  # noqa: F401  # pyright: ignore[reportUnusedImport]

# isort: split
import warnings
from itertools import islice
from typing import TYPE_CHECKING, Any

import torch
from lightning.pytorch import LightningDataModule
from lightning.pytorch.strategies import DeepSpeedStrategy, FSDPStrategy, ModelParallelStrategy
from torch.utils.data import DataLoader

from dflop.data.sampler import BalancedBatchSampler
from dflop.integrations.loader import check_length, split_options
from dflop.integrations.loss import num_label_tokens, token_loss
from dflop.integrations.padded_rows import watched
from dflop.integrations.text_alone import counts_of, meet_in_encoder

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping

    Labels = Callable[[Any], torch.Tensor | Iterable[torch.Tensor]]


def meets_of(strategy: object) -> str:
    """What the ranks of a run wait for, as `BalancedBatchSampler` has it.

    Args:
        strategy: of the trainer.

    Returns:
        `phase` where the layers' weights are gathered from all ranks (FSDP, DeepSpeed's ZeRO-3), else `step`.
    """
    if isinstance(strategy, DeepSpeedStrategy):
        return "phase" if strategy.zero_stage_3 else "step"
    return "phase" if isinstance(strategy, (FSDPStrategy, ModelParallelStrategy)) else "step"


class _Sampler(BalancedBatchSampler):
    @property
    def sampler(self) -> BalancedBatchSampler:
        """Here Lightning looks for `set_epoch`."""
        return self


class _Loader(DataLoader[Any]):
    """Counts the batches it gives out: its workers are ahead, and the sampler with them.

    It takes the microbatches of a step together, so that each knows the others.
    """

    def __init__(
        self, dataset: Any, sampler: BalancedBatchSampler, accumulation: int, **options: Any
    ) -> None:
        super().__init__(dataset, batch_sampler=sampler, **options)
        self._of_place = sampler.state_dict
        self.accumulation = accumulation
        self.num_given = 0
        self._steps: dict[int, _Step] = {}
        self._first_asked: int | None = None

    def __iter__(self) -> Any:
        self.num_given, self._steps, self._first_asked = 0, {}, None
        place = self._of_place()
        # An epoch that goes on inside a global batch begins with what is left of it.
        taken = int(place["buckets_taken"]) * self.accumulation // int(place["num_buckets"])
        size = self.accumulation - taken
        batches = super().__iter__()
        while microbatches := list(islice(batches, size)):
            step = _Step(microbatches)
            for batch in microbatches:
                self._steps[self.num_given] = step
                # Nobody asks for them any more: the trainer is at most one batch behind.
                self._steps.pop(self.num_given - 2 * self.accumulation, None)
                self.num_given += 1
                yield batch
            size = self.accumulation

    def step_of(self, batch_index: int) -> _Step:
        """The step of a batch by the trainer's count, which may go on from an earlier fit's."""
        if self._first_asked is None:
            self._first_asked = batch_index
        return self._steps[batch_index - self._first_asked]


class _Step:
    """The microbatches that this rank computes before one optimizer step."""

    def __init__(self, microbatches: list[Any]) -> None:
        self.microbatches = microbatches
        self.num_label_tokens: torch.Tensor | None = None


class BalancedData(LightningDataModule):
    """The training data of all ranks, in batches of even work.

    Make the trainer with `use_distributed_sampler=False`, and have `training_step` return
    `self.trainer.datamodule.token_loss(logits, labels, batch_idx)`. As many microbatches as
    `accumulate_grad_batches` are in memory at once.

    Under FSDP2 (`ModelParallelStrategy`) a microbatch of text alone hangs nobody (`attend_encoder`). Under
    `FSDPStrategy` and ZeRO-3, and with models of other families, a warning counts the samples of text alone.
    """

    def __init__(
        self, dataset: Any, costs: Any, batch_size: int, *, labels: Labels | None = None, **options: Any
    ) -> None:
        """Keeps what the loader is made of.

        Args:
            dataset: with positions from 0.
            costs: what `BalancedBatchSampler` takes.
            batch_size: samples of a microbatch, on average.
            labels: gives the labels of a batch, as `dflop.integrations.num_label_tokens` takes them; None:
                its entry `labels`.
            **options: of the DataLoader and of `BalancedBatchSampler`; `meets` is that of the trainer's
                strategy.
        """
        super().__init__()
        self._dataset, self._costs, self._batch_size = dataset, costs, batch_size
        self._labels: Labels = labels or (lambda batch: batch["labels"])
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
            **{"meets": meets_of(trainer.strategy), **self._of_sampler},
        )
        check_length(self._dataset, self._sampler, "dataset")
        if meets_of(trainer.strategy) == "phase":
            is_fsdp2 = isinstance(trainer.strategy, ModelParallelStrategy)
            text_alone = counts_of(self._sampler)
            meet_in_encoder(trainer.lightning_module, text_alone, trainer.global_rank, is_fsdp2=is_fsdp2)
        if self._state is not None:
            self._sampler.load_state_dict(self._state)
            self._state = None
        accumulation = int(trainer.accumulate_grad_batches)
        options = watched(self._of_loader, self._of_sampler.get("is_padded"), trainer.global_rank)
        self._loader = _Loader(self._dataset, self._sampler, accumulation, **options)
        limit = trainer.limit_train_batches
        num_batches = min(
            len(self._loader), limit if isinstance(limit, int) else int(limit * len(self._loader))
        )
        if num_batches % accumulation and trainer.global_rank == 0:
            warnings.warn(
                f"`limit_train_batches` leaves {num_batches} batches an epoch, no multiple of "
                f"`accumulate_grad_batches` {accumulation}: the last step has a part of its microbatches, "
                "and its loss is divided by the label tokens of all",
                stacklevel=2,
            )
        return self._loader

    def num_label_tokens(self, batch_idx: int, *, is_shifted: bool = False) -> torch.Tensor:
        """Label tokens of the global batch that a microbatch belongs to: of all its parts, on all ranks.

        For `training_step`, which every rank must have call it for each batch: at the first of a step it sums
        one number over the ranks.

        Args:
            batch_idx: as `training_step` is given it.
            is_shifted: the labels stand already at the position that predicts them.

        Returns:
            A number, int64, on the device of this rank.

        Raises:
            RuntimeError: no batch is being trained.
            ValueError: `accumulate_grad_batches` changed since the loader was made.
        """
        if self._loader is None:
            message = (
                "`num_label_tokens` is called before `train_dataloader`, must be called in `training_step`"
            )
            raise RuntimeError(message)
        now: int = self.trainer.accumulate_grad_batches  # pyright: ignore[reportOptionalMemberAccess]
        if now != self._loader.accumulation:
            message = (
                f"`accumulate_grad_batches` is {now}, the loader was made for {self._loader.accumulation}, "
                "and its global batches have other samples: leave out `GradientAccumulationScheduler`"
            )
            raise ValueError(message)
        step = self._loader.step_of(batch_idx)
        if step.num_label_tokens is None:
            device = self.trainer.strategy.root_device  # pyright: ignore[reportOptionalMemberAccess]
            parts: list[torch.Tensor] = []
            for batch in step.microbatches:
                labels = self._labels(batch)
                parts.extend([labels] if isinstance(labels, torch.Tensor) else labels)
            step.num_label_tokens = num_label_tokens(
                [part.to(device) for part in parts], is_shifted=is_shifted
            )
            # The loader's own copies, with all their pixels.
            step.microbatches = []
        return step.num_label_tokens

    def token_loss(
        self, logits: torch.Tensor, labels: torch.Tensor, batch_idx: int, *, is_shifted: bool = False
    ) -> torch.Tensor:
        """What `training_step` returns: a microbatch's part of the mean over its global batch's label tokens.

        Every rank must have it called for each batch (`num_label_tokens`). Not for `automatic_optimization =
        False`, where Lightning does not divide: there take `dflop.integrations.token_loss`.

        Args:
            logits: [..., T, V].
            labels: [..., T]; -100 carries no loss.
            batch_idx: as `training_step` is given it.
            is_shifted: the labels stand already at the position that predicts them.

        Returns:
            A number, float32, times `accumulate_grad_batches`, by which Lightning divides, and times the
            ranks, over which DDP and FSDP average.
        """
        trainer: Any = self.trainer
        tokens = self.num_label_tokens(batch_idx, is_shifted=is_shifted)
        loss = token_loss(logits, labels, tokens, trainer.world_size, is_shifted=is_shifted)
        return loss * int(trainer.accumulate_grad_batches)

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
