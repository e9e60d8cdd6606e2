"""Which labels lmms-engine's loss learns, of samples that are not collated yet."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from dflop.integrations.lmms_patches import is_flat

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    import torch

    from dflop.integrations.sent_rows import Row

_IGNORED = -100
"""A label that is not learnt."""

_BY_MASK = ("aero",)
"""Types of models whose loss leaves out what the attention mask leaves out, in padded rows, too."""


class Learnt:
    """Takes away the labels that the loss leaves out: so they are counted nowhere.

    Those are the label of a sample's first token, as no token of its own stands before it; and where rows
    have no padding the labels of pad tokens. lmms-engine's collation takes any pad token for padding, also
    one that stands in a sample (as the end of a text), and removes it.
    """

    def __init__(self, trainer: Any) -> None:
        """Looks which tokens its model removes.

        Args:
            trainer: of lmms-engine, with its patched model.
        """
        tokenizer = getattr(getattr(trainer.data_collator, "processor", None), "tokenizer", None)
        is_by_mask = getattr(trainer.model.config, "model_type", None) in _BY_MASK
        removes = is_flat(trainer.model) or is_by_mask
        self._pad = getattr(tokenizer, "pad_token_id", None) if removes else None

    def __call__(self, row: Row) -> Row:
        """A sample.

        Args:
            row: `input_ids` [T] and `labels` [T].

        Returns:
            A copy with labels of -100 where nothing is learnt.
        """
        labels = row["labels"].clone()
        kept = self._kept(row)
        labels[: int(kept[0]) + 1 if len(kept) else None] = _IGNORED
        if self._pad is not None:
            labels[row["input_ids"] == self._pad] = _IGNORED
        return {**row, "labels": labels}

    def count(self, row: Row) -> int:
        """Label tokens of a sample.

        Args:
            row: as it was read.

        Returns:
            Those that are learnt.
        """
        return int((self(row)["labels"] != _IGNORED).sum())

    def stand_in(self, row: Row) -> None:
        """Gives a sample that has no label one, on its last token that stays; a mean over none is no number.

        Args:
            row: of this class; `labels` change.
        """
        place = self._kept(row)[-1:]
        row["labels"][place] = row["input_ids"][place]

    def _kept(self, row: Row) -> torch.Tensor:
        """Places of tokens that stay."""
        return (row["input_ids"] != (-1 if self._pad is None else self._pad)).nonzero()[:, 0]


class LearntCollation:
    """A collation of samples without the labels that are not learnt."""

    def __init__(self, theirs: Callable[[Sequence[Row]], Row], learnt: Learnt) -> None:
        """Wraps one.

        Args:
            theirs: lmms-engine's own.
            learnt: of the trainer.
        """
        self._theirs, self._learnt = theirs, learnt

    def __call__(self, rows: Sequence[Row]) -> Row:
        """A microbatch.

        Args:
            rows: samples.

        Returns:
            Of lmms-engine's own collation.
        """
        return self._theirs([self._learnt(row) for row in rows])
