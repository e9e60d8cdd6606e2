"""Samples that only the trainer's collation makes tensors of, as chats with pictures: collated one at a time.

sample --(a worker of the loader)--> collated alone, padding cut off --(travels)--> joined with its microbatch

So heavy collations stay in the workers of the loader. That joining gives what the collation gives of several
samples is looked at with the first samples of each worker: with media and without, padded or not.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch

from dflop.integrations.sent_rows import Joined

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from dflop.integrations.sent_rows import Row

PADDING = "dflop_padding"
"""Where a sample that was collated alone keeps how its microbatch is padded."""

_FILLS = {"labels": -100}
"""What fills up rows; `input_ids` have the tokenizer's own, all others 0."""


class CollatedAlone:
    """Collates each sample alone, if none has `input_ids` yet; a loader's `collate_fn`."""

    def __init__(self, collate: Callable[[Sequence[Any]], Any], tokenizer: Any) -> None:
        """Collates nothing yet.

        Args:
            collate: of the trainer.
            tokenizer: whose padding the collation takes, or what holds one.
        """
        self._collate = collate
        tokenizer = getattr(tokenizer, "tokenizer", tokenizer)
        # Of transformers, where it takes columns away that the model does not know.
        inner = getattr(collate, "data_collator", collate)
        # TRL's pads on the right whatever the tokenizer says.
        is_left = getattr(tokenizer, "padding_side", "right") == "left"
        is_left &= not type(inner).__module__.startswith("trl.")
        step = getattr(inner, "pad_to_multiple_of", None) or 1
        self._padding = (getattr(tokenizer, "pad_token_id", None) or 0, is_left, step)
        self._first: Any = None
        # What pairs of samples have been compared: padded ones, with media in both, in one, in none.
        self._seen: set[str] = set()

    def __call__(self, rows: Sequence[Any]) -> list[Any]:
        """Samples as they are, or collated alone.

        Args:
            rows: samples.

        Returns:
            As many; those collated alone have `PADDING`.

        Raises:
            ValueError: the collation cannot be taken apart so.
        """
        if all(isinstance(row, Mapping) and "input_ids" in row for row in rows):
            return list(rows)
        return [self._alone(row) for row in rows]

    def _alone(self, row: Any) -> Row:
        # Collations may change what they are given.
        found = self._cut(self._collate([copy.copy(row)]))
        if self._first is None:
            self._first = (copy.copy(row), found)
            return found
        alone = self._first[1]
        has_media = [any(isinstance(value, Joined) for value in one.values()) for one in (alone, found)]
        cases = {f"{sum(has_media)} with media"}
        if len(alone["input_ids"]) != len(found["input_ids"]):
            cases.add("padding")
        if not cases <= self._seen:
            self._check(row, found)
            self._seen |= cases
        if has_media == [False, True]:
            self._first = (copy.copy(row), found)
        return found

    def _check(self, row: Any, found: Row) -> None:
        """Compares a sample and the first one, joined, with the collation of both."""
        first, alone = self._first
        together = self._collate([copy.copy(first), copy.copy(row)])
        joined = join([alone, found])
        for name in dict.fromkeys([*together, *joined]):
            theirs, ours = together.get(name), joined.get(name)
            if not _is_same(theirs, ours):
                message = (
                    f"`{name}` of two samples together is {_form(theirs)}, of each alone and joined "
                    f"{_form(ours)}: this collation cannot be balanced when samples have been read. Give it "
                    "samples with `input_ids`, or a dataset with a length"
                )
                raise ValueError(message)

    def _cut(self, batch: Any) -> Row:
        """A batch of one sample, without padding."""
        if not isinstance(batch, Mapping) or not isinstance(batch.get("input_ids"), torch.Tensor):
            found = type(batch).__name__
            message = (
                f"the collation gives a `{found}` without `input_ids`, must give a mapping that has them"
            )
            raise ValueError(message)
        shape = batch["input_ids"].shape
        mask = batch.get("attention_mask")
        ones = torch.arange(shape[1]) if mask is None else mask[0].nonzero()[:, 0]
        kept = slice(int(ones[0]), int(ones[-1]) + 1)
        row: Row = {PADDING: self._padding}
        for name, value in batch.items():
            if not isinstance(value, torch.Tensor):
                message = (
                    f"the collation gives `{name}` as a `{type(value).__name__}`, must give tensors alone"
                )
                raise ValueError(message)
            is_wide = value.shape[:2] == shape
            row[name] = value[0, kept] if is_wide else Joined((value,))
        return row


def join(rows: Sequence[Row]) -> dict[str, torch.Tensor]:
    """A microbatch of samples that were collated alone.

    Args:
        rows: of `CollatedAlone`.

    Returns:
        What the collation gives of them together.
    """
    padding_id, is_left, step = rows[0][PADDING]
    width = -(-max(len(row["input_ids"]) for row in rows) // step) * step
    found = {}
    for name in dict.fromkeys(name for row in rows for name in row if name != PADDING):
        held = [row[name] for row in rows if name in row]
        if isinstance(held[0], Joined):
            # Samples of text alone have none.
            found[name] = _behind([value[0] for value in held])
            continue
        fill = padding_id if name == "input_ids" else _FILLS.get(name, 0)
        wide = [row[name] if name in row else _nothing(held[0], len(row["input_ids"])) for row in rows]
        found[name] = torch.stack([_padded(value, width, fill, is_left) for value in wide])
    return found


def _nothing(like: torch.Tensor, length: int) -> torch.Tensor:
    return like.new_zeros((length, *like.shape[1:]))


def _padded(value: torch.Tensor, width: int, fill: int, is_left: bool) -> torch.Tensor:
    more = value.new_full((width - len(value), *value.shape[1:]), fill)
    return torch.cat([more, value] if is_left else [value, more])


def _behind(values: Sequence[torch.Tensor]) -> torch.Tensor:
    """Behind each other, with zeros where one is smaller, as processors fill up tiles and masks."""
    most = [max(sizes) for sizes in zip(*[value.shape[1:] for value in values], strict=True)]
    evened = []
    for value in values:
        behind = [n for size, large in zip(value.shape[1:], most, strict=True) for n in (large - size, 0)]
        evened.append(torch.nn.functional.pad(value, behind[::-1]) if any(behind) else value)
    return torch.cat(evened)


def _is_same(one: Any, other: Any) -> bool:
    if not isinstance(one, torch.Tensor) or not isinstance(other, torch.Tensor):
        return False
    return one.shape == other.shape and torch.equal(one, other.to(one.dtype))


def _form(value: Any) -> str:
    return f"{list(value.shape)}" if isinstance(value, torch.Tensor) else f"a `{type(value).__name__}`"
