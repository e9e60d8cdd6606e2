"""lmms-engine's loader in balanced microbatches: the samples of each step, and what the loss of each counts.

its loader -> samples of a step, not collated -> those that this rank computes -> its own collation
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from importlib import import_module
from itertools import islice
from typing import TYPE_CHECKING, Any

import torch
from torch.utils.data import IterableDataset, Sampler

from dflop.integrations.read_rows import ReadRows

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from dflop.integrations.lmms_labels import Learnt
    from dflop.integrations.sent_rows import Row

_CPU = torch.device("cpu")

_WEIGHT = "dflop_weight"
"""Of a microbatch: what its mean loss counts."""

_IS_AT_END = "dflop_is_at_end"
"""Of the state of a loader: whether an epoch had no step left."""


class Once(Sampler[int]):
    """A sampler that deals samples out to ranks, without those that it repeats to give all ranks as many."""

    def __init__(self, theirs: Any, num_samples: int, *, drop_last: bool) -> None:
        """Wraps one.

        Args:
            theirs: PyTorch's or transformers', of one rank.
            num_samples: of the dataset.
            drop_last: whether samples that do not fill a round of ranks are left out.
        """
        self._theirs, self.num_ranks = theirs, theirs.num_replicas
        # What does not fill a round of ranks is left out where the last batch is.
        self.num_samples = num_samples - (num_samples % self.num_ranks if drop_last else 0)

    def __iter__(self) -> Iterator[int]:
        """Samples of this rank, in the order of that sampler."""
        for place, index in enumerate(self._theirs):
            if place * self.num_ranks + self._theirs.rank < self.num_samples:
                yield index

    def __len__(self) -> int:
        """Samples of this rank."""
        return -(-(self.num_samples - self._theirs.rank) // self.num_ranks)


class BalancedLoader:
    """Stands in for lmms-engine's loader: the samples of each step, in other microbatches."""

    def __init__(self, trainer: Any, theirs: Any) -> None:
        """Lets the loader leave collation for later, and the trainer weigh losses.

        Args:
            trainer: of lmms-engine, with `dflop_spread`.
            theirs: its loader.

        Raises:
            ValueError: an epoch would have no batch.
        """
        self._trainer, self._theirs, self._spread = trainer, theirs, trainer.dflop_spread
        self._collate: Callable[[Sequence[Row]], Row] = theirs.collate_fn
        theirs.collate_fn = ReadRows
        self._accumulation = trainer.args.gradient_accumulation_steps
        self._is_stream = isinstance(theirs.dataset, IterableDataset)
        if not self._is_stream:
            args, num_samples = trainer.args, len(theirs.dataset)
            once = Once(theirs.batch_sampler.sampler, num_samples, drop_last=args.dataloader_drop_last)
            theirs.batch_sampler.sampler = once
            most = -(-once.num_samples // once.num_ranks)
            size = args.train_batch_size
            self._num_batches = most // size if args.dataloader_drop_last else -(-most // size)
            if not self._num_batches:
                message = (
                    f"an epoch has no batch, must have one: {num_samples} samples over {once.num_ranks} "
                    f"ranks fill none of `per_device_train_batch_size` {size}. Take more samples, or fewer "
                    "ranks, or set `dataloader_drop_last` to False"
                )
                raise ValueError(message)
        self._pins = torch.cuda.is_available() and trainer.args.dataloader_pin_memory
        self._learnt: Learnt = self._spread.learnt
        self._loss = 0.0
        self._weigh()

    def __getattr__(self, name: str) -> Any:
        # What was there is there: the sampler and its epochs.
        if name == "_theirs":
            raise AttributeError(name)
        return getattr(self._theirs, name)

    def __len__(self) -> int:
        """Microbatches of an epoch, of the rank that has the most."""
        return len(self._theirs) if self._is_stream else self._num_batches

    def __iter__(self) -> Iterator[Row]:
        """Balanced microbatches, from where lmms-engine's loader stands; each rank has as many."""
        batches = self._rounds() if self._is_stream else iter(self._theirs)
        # Before it reads, as a checkpoint must not take what is read for trained.
        while not self._trainer.should_stop():
            read = [rows_of(batch) for batch in islice(batches, self._accumulation)]
            found = self._balanced(read + [[]] * (self._accumulation - len(read)))
            if not found:
                return
            yield from found

    def _rounds(self) -> Iterator[ReadRows]:
        """A stream again and again: a rank whose part has ended begins it anew, as in lmms-engine."""
        num_empty = 0
        while True:
            is_empty = True
            for batch in self._theirs:
                is_empty = False
                yield batch
            # Once where a run resumes at an end.
            num_empty = num_empty + 1 if is_empty else 0
            if num_empty > 1:
                message = "the stream of a rank has no sample, must have some: take fewer ranks or workers"
                raise ValueError(message)

    def state_dict(self) -> dict[str, Any]:
        """lmms-engine's, and whether the epoch had no step left."""
        trainer, state = self._trainer, self._theirs.state_dict()
        is_at_end = not self._is_stream and trainer.global_step % trainer.steps_per_epoch == 0
        return {**state, _IS_AT_END: is_at_end}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Goes on from there.

        Args:
            state: of `state_dict`; of a stream also of lmms-engine's own loader.

        Raises:
            ValueError: a run without dflop has written it, which dealt samples out in another way.
        """
        if not self._is_stream and _IS_AT_END not in state:
            message = (
                "the checkpoint was written without dflop, must be of a run with it: that run dealt the "
                "epoch's samples out to ranks in another way, so some would be trained twice. End the run as "
                "it began, or begin a new one from its weights: merge the checkpoint, name it in "
                "`load_from_pretrained_path`, and take another `output_dir`"
            )
            raise ValueError(message)
        if self._is_stream and self._spread.rank == 0:
            warnings.warn(
                "lmms-engine resumes a stream: each of its readers reads the last sample again, or, with "
                "`packing`, leaves out those that wait in its open packs. It does so without dflop, too",
                stacklevel=2,
            )
        # The next epoch begins with samples of its own.
        if not state.get(_IS_AT_END):
            self._theirs.load_state_dict({name: one for name, one in state.items() if name != _IS_AT_END})

    def _balanced(self, read: list[list[Row]]) -> list[Row]:
        """The microbatches of this rank; none where no rank has read anything."""
        spread = self._spread
        parts, labels = spread.split(read)
        if not any(parts.counts):
            return []
        rows = [row for batch in read for row in batch]
        held = parts.of_rank(rows, spread.rank, _CPU)
        shortest = min(range(len(rows)), key=lambda at: len(rows[at]["input_ids"]), default=0)
        copies = parts.copies(rows, spread.rank, _CPU, shortest)
        # The trainer takes the mean over ranks and microbatches.
        share = spread.num_ranks * self._accumulation / max(1.0, sum(labels))
        found = []
        for samples, mine, _ in held:
            # A sample that another microbatch trains fills an empty one: ranks meet, and nothing is learnt.
            count = sum(labels[sample] for sample in samples)
            found.append(self._collated(mine or [copies.pop()], count * share))
        if self._pins:
            pin: Any = import_module("torch.utils.data._utils.pin_memory")
            found = pin.pin_memory(found)
        return found

    def _collated(self, rows: Sequence[Row], weight: float) -> Row:
        """A microbatch by lmms-engine's own collation, with its weight."""
        rows = [self._learnt(row) for row in rows]
        if not weight:
            # A mean over no label is no number, so there is one; it weighs nothing.
            self._learnt.stand_in(max(rows, key=lambda row: len(row["input_ids"])))
        return {**self._collate(rows), _WEIGHT: weight}

    def _weigh(self) -> None:
        """Lets the trainer's loss count by label tokens, and its log tell that of the whole step."""
        trainer = self._trainer
        loss_of, step_of, spread = trainer.compute_loss, trainer.training_step, self._spread

        def compute_loss(batch: Row) -> Any:
            spread.weight = batch.pop(_WEIGHT)
            return loss_of(batch)

        def training_step(batch: Row) -> Any:
            metrics = step_of(batch)
            self._loss += metrics["train/loss"] / self._accumulation
            if trainer.accumulated_grad_steps == 0:
                metrics["train/loss"], self._loss = self._loss, 0.0
            return metrics

        trainer.compute_loss, trainer.training_step = compute_loss, training_step


def rows_of(batch: ReadRows) -> list[Row]:
    """Samples of a microbatch that was read; a pack has several.

    Args:
        batch: of lmms-engine's loader.

    Returns:
        Copies.

    Raises:
        ValueError: one has no `input_ids` or no `labels`.
    """
    found = []
    for item in batch.rows:
        for row in item if isinstance(item, list) else [item]:
            if not isinstance(row, Mapping) or not {"input_ids", "labels"} <= row.keys():
                message = (
                    f"a sample is a `{type(row).__name__}`, must be a dictionary with `input_ids` and "
                    "`labels`: nobody knows what it costs"
                )
                raise ValueError(message)
            found.append(dict(row))
    return found
