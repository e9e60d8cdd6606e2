"""Balanced microbatches of what a trainer has read: streams, datasets that make samples on the fly.

loader of the trainer -> samples of a step, on each rank -> their costs -> samples travel
    -> the trainer's own collation -> microbatches

Nothing is known of a sample before it is read. So samples are dealt out as the trainer does it, and move
afterwards, within their optimizer step.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from dflop.integrations.sent_rows import exchange
from dflop.integrations.spread import Spread
from dflop.integrations.trainer_loss import degree_of, is_of_pairs, uneven_error

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from dflop.integrations.sent_rows import Row
    from dflop.integrations.spread import Parts

_MEDIA = ("pixel_values", "input_features", "image", "video", "audio")
"""What the names of a sample's media begin with."""

_CPU = torch.device("cpu")


def balance_loaded(trainer: Any, is_padded: bool | None) -> None:
    """Makes `trainer` balance the samples of a step when it has read them; see `transformers.balance`.

    Args:
        trainer: of transformers.
        is_padded: whether the model computes the padding of a microbatch; None: unless `remove_padding` is in
            force, or the collation pads nothing (`DataCollatorWithFlattening`, `padding_free`).

    Raises:
        ValueError: its samples are pairs, or several ranks read the same.
    """
    if is_of_pairs(trainer):
        raise uneven_error(trainer, "pairs are balanced before they are read: give a dataset with a length")
    if (degree := degree_of(trainer)) > 1:
        text = f"{degree} ranks read the same samples (tensor, context or sequence parallel): take one"
        raise uneven_error(trainer, text)
    if is_padded is None and _pads_nothing(trainer):
        is_padded = False
    if isinstance(loaded := getattr(trainer.get_batch_samples, "__self__", None), _Loaded):
        loaded.spread.is_padded = is_padded
        return
    loaded = _Loaded(trainer, is_padded)
    trainer.get_train_dataloader, trainer.get_batch_samples = loaded.loader, loaded.step


class _Read:
    """Samples of one batch; in a type of its own, so that nobody moves their tensors to a device."""

    __slots__ = ("rows",)

    def __init__(self, rows: Sequence[Any]) -> None:
        self.rows = rows


class _Loaded:
    """Stands in for the trainer's loader, and for what takes the microbatches of a step from it."""

    def __init__(self, trainer: Any, is_padded: bool | None) -> None:
        self.spread = Spread(trainer, is_padded)
        self._trainer = trainer
        self._loader_of_theirs = trainer.get_train_dataloader
        self._samples_of_theirs = trainer.get_batch_samples
        self._collate: Callable[[Sequence[Any]], Any] = list
        self._is_told = False

    def loader(self) -> Any:
        """The trainer's own; it leaves collation for later."""
        config = self._trainer.accelerator.dataloader_config
        # By default rank 0 reads a stream for all, and cuts what was collated already.
        before, config.dispatch_batches = config.dispatch_batches, False
        try:
            loader = self._loader_of_theirs()
        finally:
            config.dispatch_batches = before
        # accelerate keeps PyTorch's own inside of its loader.
        inner = getattr(loader, "base_dataloader", loader)
        self._collate, inner.collate_fn = inner.collate_fn, _Read
        return loader

    def step(self, batches: Iterator[_Read], num_batches: int, device: Any) -> Any:
        """The microbatches of a step; the trainer counts their label tokens, as ever."""
        read = [batch.rows for _, batch in zip(range(num_batches), batches, strict=False)]
        return self._samples_of_theirs(iter(self._balanced(read, num_batches)), num_batches, device)

    def _balanced(self, read: list[Sequence[Any]], num_batches: int) -> list[Any]:
        """The microbatches of this rank; none where no rank has read anything."""
        trainer = self._trainer
        rows = [_named(row) for batch in read for row in batch]
        most = trainer.args.train_batch_size * num_batches
        if len(rows) > most:
            message = (
                f"the loader gave {len(rows)} samples in {num_batches} batches, must be at most {most} "
                "(`per_device_train_batch_size` each): nobody knows what else it does"
            )
            raise ValueError(message)
        parts = self.spread.split([self._size(row) for row in rows], len(read), most=most)
        if not any(parts.counts):
            return []
        rank = trainer.args.process_index
        held = [mine for _, mine, _ in parts.of_rank(rows, rank, _CPU)]
        copies = self._copies(rows, parts, rank)
        return [self._collate(mine) if mine else self._unlabelled(copies.pop()) for mine in held]

    def _copies(self, rows: list[Row], parts: Parts, rank: int) -> list[Row]:
        """A sample for each microbatch of this rank that has none: a stream ended, and there are too few."""
        num_ranks = len(parts.counts)
        empty = [bucket % num_ranks for bucket, samples in enumerate(parts.buckets) if not samples]
        if not empty:
            return []
        owner = next(other for other, count in enumerate(parts.counts) if count)
        targets = [empty if other == owner else [] for other in range(num_ranks)]
        sent = rows[:1] * len(empty) if rank == owner else []
        return exchange(sent, targets, rank, self._trainer.accelerator.device, _CPU)

    def _unlabelled(self, row: Row) -> Any:
        """A microbatch of a sample that another one trains: ranks meet, and nothing is learnt from it."""
        batch = self._collate([row])
        if "labels" not in batch:
            message = "the collation gives no `labels`, must give them for microbatches of uneven counts"
            raise ValueError(message)
        batch["labels"] = torch.full_like(batch["labels"], -100)
        return batch

    def _size(self, row: Row) -> tuple[float, int]:
        """Encoder tokens and LLM tokens of a sample."""
        tokens = np.asarray(row["input_ids"]).reshape(-1)
        encoder = sum(count * int((tokens == token).sum()) for token, count in self.spread.media.items())
        if not encoder and not self._is_told and (names := [one for one in row if one.startswith(_MEDIA)]):
            value = row[names[0]]
            self._is_told = value is not None and (not hasattr(value, "__len__") or len(value) > 0)
            if self._is_told:
                warnings.warn(
                    f"samples have `{names[0]}`, and none of their tokens stands for a medium: what the "
                    "encoder reads of them is not counted, and only the LLM's work is balanced",
                    stacklevel=2,
                )
        return encoder, len(tokens)


def _named(row: Any) -> Row:
    if isinstance(row, Mapping) and "input_ids" in row:
        return dict(row)
    found = f"of {sorted(map(str, row))}" if isinstance(row, Mapping) else f"a `{type(row).__name__}`"
    message = (
        f"a sample that was read is {found}, must have `input_ids`: it is counted by its tokens. Tokenize in "
        "the dataset; or give a dataset with a length, whose rows are counted before they are read"
    )
    raise ValueError(message)


def _pads_nothing(trainer: Any) -> bool:
    collate = trainer.data_collator
    is_flat = any(one.__name__ == "DataCollatorWithFlattening" for one in type(collate).__mro__)
    return is_flat or bool(
        getattr(collate, "padding_free", False) or getattr(trainer.args, "padding_free", False)
    )
