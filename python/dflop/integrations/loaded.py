"""Balanced microbatches of what a trainer has read: streams, datasets that make samples on the fly.

loader of the trainer -> samples of a step, on each rank (or on the first) -> their costs -> samples travel
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
from torch.utils.data import DataLoader, IterableDataset

from dflop.integrations.collated import PADDING, CollatedAlone, join
from dflop.integrations.pair_loss import is_of_pairs
from dflop.integrations.read_rows import ReadRows
from dflop.integrations.row_costs import MEDIA_COLUMNS, check_expanded
from dflop.integrations.spread import Spread
from dflop.integrations.trainer_loss import check_degree, uneven_error

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from dflop.integrations.sent_rows import Row

_MEDIA = ("pixel_values", "input_features")
"""What the names of a sample's media begin with, if they are not columns."""

_LABELS = ("labels", "shift_labels")
"""What the loss is of, by the names that transformers has for it."""

_KIND = "dflop_kind"
"""Where a sample keeps its type while it travels, if it is another mapping than a dictionary."""

_CPU = torch.device("cpu")


def balance_loaded(trainer: Any, is_padded: bool | None) -> None:
    """Makes `trainer` balance the samples of a step when it has read them; see `transformers.balance`.

    Args:
        trainer: of transformers.
        is_padded: whether the model computes the padding of a microbatch; None: unless `remove_padding` is in
            force, or the collation pads nothing (`DataCollatorWithFlattening`, `padding_free`).

    Raises:
        ValueError: its samples are pairs, several ranks read the same, or a stream is divided already.
    """
    if is_of_pairs(trainer):
        raise uneven_error(trainer, "pairs are balanced before they are read: give a dataset with a length")
    check_degree(trainer)
    _check_whole(trainer)
    if is_padded is None and pads_nothing(trainer):
        is_padded = False
    if isinstance(loaded := getattr(trainer.get_batch_samples, "__self__", None), _Loaded):
        loaded.spread.is_padded = is_padded
        return
    loaded = _Loaded(trainer, is_padded)
    trainer.get_train_dataloader, trainer.get_batch_samples = loaded.loader, loaded.step


def _check_whole(trainer: Any) -> None:
    """Refuses a stream that was divided among ranks, which the trainer's loader would divide again."""
    parts = getattr(getattr(trainer.train_dataset, "_distributed", None), "world_size", 1)
    if parts > 1 and trainer.args.world_size > 1:
        message = (
            f"`train_dataset` is one of {parts} parts (`split_dataset_by_node`), and the trainer divides it "
            f"among {trainer.args.world_size} ranks: samples would be left out. Give it the whole stream"
        )
        raise ValueError(message)


class _Reader:
    """Stands in for the collation of a loader: what a batch is made of is read, and collated later."""

    def __init__(self, collate: Callable[[Sequence[Any]], Any], tokenizer: Any) -> None:
        self.alone = CollatedAlone(collate, tokenizer)

    def __call__(self, rows: Sequence[Any]) -> ReadRows:
        return ReadRows(self.alone(rows))


class _Nothing(IterableDataset[Any]):
    """What the ranks read for which the first one reads."""

    def __iter__(self) -> Iterator[Any]:
        return iter(())


class _Loaded:
    """Stands in for the trainer's loader, and for what takes the microbatches of a step from it."""

    def __init__(self, trainer: Any, is_padded: bool | None) -> None:
        self.spread = Spread(trainer, is_padded)
        self._trainer = trainer
        self._loader_of_theirs = trainer.get_train_dataloader
        self._samples_of_theirs = trainer.get_batch_samples
        self._collate: Callable[[Sequence[Any]], Any] = list
        # Samples that a rank may read for a microbatch, and an iterator that is at its end on all ranks.
        self._most = trainer.args.train_batch_size
        self._ended: Any = None
        self._is_told = False
        # Tokens that stand for media, and media beside them, of all samples so far.
        self._num_tokens = self._num_media = 0

    def loader(self) -> Any:
        """The trainer's own; it leaves collation for later."""
        from accelerate.data_loader import DataLoaderDispatcher

        loader = self._loader_of_theirs()
        is_dispatched = isinstance(loader, DataLoaderDispatcher)
        self._most = self._trainer.args.train_batch_size
        if is_dispatched:
            self._most *= self._trainer.args.world_size
            loader = self._of_first_rank(loader)
        # accelerate keeps PyTorch's own inside of its loader.
        inner = getattr(loader, "base_dataloader", loader)
        if not isinstance(inner.collate_fn, _Reader):
            self._collate = inner.collate_fn
            inner.collate_fn = _Reader(self._collate, self._trainer.processing_class)
        return loader

    def _of_first_rank(self, theirs: Any) -> Any:
        """Rank 0 reads for all, as the trainer has it by default where a dataset is a stream."""
        from accelerate.data_loader import prepare_data_loader

        if theirs.batch_size is None:
            message = (
                "`dispatch_batches` is True, must be left out for a dataset with positions: each rank reads "
                "its own samples"
            )
            raise ValueError(message)
        args = self._trainer.args
        names = ("collate_fn", "num_workers", "pin_memory", "timeout", "worker_init_fn")
        names += ("multiprocessing_context", "prefetch_factor", "persistent_workers")
        kept = {name: getattr(theirs, name) for name in names}
        if args.process_index:
            kept.update(num_workers=0, prefetch_factor=None, persistent_workers=False)
            kept.update(multiprocessing_context=None, timeout=0)
        rows = _Nothing() if args.process_index else theirs.dataset
        size = theirs.batch_size * (1 if theirs.split_batches else args.world_size)
        loader: DataLoader[Any] = DataLoader(rows, size, drop_last=theirs._drop_last, **kept)
        # It knows of epochs, and how to go on inside of one.
        return prepare_data_loader(
            loader, num_processes=1, process_index=0, put_on_device=False, dispatch_batches=False
        )

    def step(self, batches: Iterator[ReadRows], num_batches: int, device: Any) -> Any:
        """The microbatches of a step; the trainer counts their label tokens, as ever."""
        found: list[Any] = []
        if batches is not self._ended:
            read = [batch.rows for _, batch in zip(range(num_batches), batches, strict=False)]
            found = self._balanced(read, num_batches)
            # The trainer goes on asking until `max_steps`.
            self._ended = None if found else batches
        return self._samples_of_theirs(iter(found), num_batches, device)

    def _balanced(self, read: list[Sequence[Any]], num_batches: int) -> list[Any]:
        """The microbatches of this rank; none where no rank has read anything."""
        trainer = self._trainer
        rows = [_named(row) for batch in read for row in batch]
        most = self._most * num_batches
        if len(rows) > most:
            message = (
                f"the loader gave {len(rows)} samples in {num_batches} batches, must be at most {most} "
                "(`per_device_train_batch_size` each): nobody knows what else it does"
            )
            raise ValueError(message)
        sizes = [self._size(row) for row in rows]
        # Of all samples so far, because a small picture may well be one token.
        check_expanded(self._num_tokens, self._num_media)
        # The trainer takes an optimizer step after so many, and at no other place where a stream ends.
        parts = self.spread.split(sizes, num_batches, most=most)
        if not any(parts.counts):
            return []
        rank = trainer.args.process_index
        held = [mine for _, mine, _ in parts.of_rank(rows, rank, _CPU)]
        copies = parts.copies(rows, rank, _CPU)
        return [
            self._collated([_restored(row) for row in mine]) if mine else self._unlabelled(copies.pop())
            for mine in held
        ]

    def _collated(self, rows: list[Any]) -> Any:
        """A microbatch."""
        num_alone = sum(PADDING in row for row in rows)
        if 0 < num_alone < len(rows):
            message = (
                f"{len(rows) - num_alone} of {len(rows)} samples of a microbatch have `input_ids`, must be "
                "all or none"
            )
            raise ValueError(message)
        return join(rows) if num_alone else self._collate(rows)

    def _unlabelled(self, row: Row) -> Any:
        """A microbatch of a sample that another one trains: ranks meet, and nothing is learnt from it."""
        batch = self._collated([_restored(row)])
        names = [name for name in _LABELS if name in batch]
        if not names:
            message = "the collation gives no `labels`, must give them for microbatches of uneven counts"
            raise ValueError(message)
        for name in names:
            batch[name] = torch.full_like(batch[name], -100)
        return batch

    def _size(self, row: Row) -> tuple[float, int]:
        """Encoder tokens and LLM tokens of a sample."""
        tokens = np.asarray(row["input_ids"]).reshape(-1)
        found = {token: int((tokens == token).sum()) for token in self.spread.media}
        columns = [row[name] for name in MEDIA_COLUMNS & row.keys()]
        self._num_tokens += sum(found.values())
        self._num_media += sum(len(held) for held in columns if isinstance(held, list))
        encoder = sum(count * found[token] for token, count in self.spread.media.items())
        if not encoder and not self._is_told:
            names = [name for name in row if name in MEDIA_COLUMNS or name.startswith(_MEDIA)]
            self._is_told = any(_is_there(row[name]) for name in names)
            if self._is_told:
                warnings.warn(
                    f"samples have `{names[0]}`, and none of their tokens stands for a medium: what the "
                    "encoder reads of them is not counted, and only the LLM's work is balanced",
                    stacklevel=2,
                )
        return encoder, len(tokens)


def _named(row: Mapping[str, Any]) -> Row:
    """A sample with its type; `CollatedAlone` has given tokens to those that had none."""
    return dict(row) if type(row) is dict else {**row, _KIND: type(row)}


def _is_there(medium: Any) -> bool:
    if isinstance(medium, (torch.Tensor, np.ndarray)):
        return 0 not in medium.shape
    return bool(medium) if isinstance(medium, (list, tuple)) else medium is not None


def _restored(row: Row) -> Any:
    """A sample as the dataset made it; a copy, because a collation may empty it, and others need it again."""
    held = {name: value for name, value in row.items() if name != _KIND}
    kind = row.get(_KIND)
    return held if kind is None else kind(held)


def pads_nothing(trainer: Any) -> bool:
    """Whether the collation of a trainer makes one row of many, as far as its type says it.

    Args:
        trainer: of transformers.

    Returns:
        Whether it does.
    """
    collate = trainer.data_collator
    is_flat = any(one.__name__ == "DataCollatorWithFlattening" for one in type(collate).__mro__)
    return is_flat or bool(
        getattr(collate, "padding_free", False) or getattr(trainer.args, "padding_free", False)
    )
