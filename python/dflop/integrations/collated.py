"""Samples that only the trainer's collation makes tensors of, as chats with pictures: collated one at a time.

sample --(a worker of the loader)--> collated alone, padding cut off --(travels)--> joined with its microbatch

So heavy collations stay in the workers of the loader. Joined samples must be what the collation makes of them
together: each worker compares the first pair of each kind (padded or not, with media in both, one or none).
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch

from dflop.integrations.row_costs import MEDIA_COLUMNS
from dflop.integrations.sent_rows import Joined, even

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from dflop.integrations.sent_rows import Row

PADDING = "dflop_padding"
"""Where a sample that was collated alone keeps how its microbatch is padded."""

_FILLS = {"labels": -100}
"""What fills up rows; `input_ids` have the tokenizer's own, all others 0."""

_OF_MEDIA = ("pixel", "image", "video", "audio", "input_features", "feature", "aspect", "patch", "spatial")
"""What the names of tensors of media begin with. Such a tensor may be as wide as the tokens."""

_CLOSE = 1e-3
"""Relative and absolute. A processor may round pixels of two pictures otherwise than those of each alone."""


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
        # A sample that others are compared with, as it was read and collated: with media, once there was one.
        self._first: tuple[Any, Row] | None = None
        # What kinds of pairs have been compared.
        self._seen: set[Any] = set()

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
        found = self._cut(self._collate([_copied(row)]))
        if self._first is None:
            self._first = (_copied(row), found)
            return found
        first, alone = self._first
        kind = _kind_of((first, alone), (row, found))
        if kind not in self._seen:
            self._check(first, alone, row, found)
            self._seen.add(kind)
        if _has_media(row, found) and not _has_media(first, alone):
            self._first = (_copied(row), found)
        return found

    def _check(self, first: Any, alone: Row, row: Any, found: Row) -> None:
        """Compares two samples, joined, with the collation of both."""
        together = self._collate([_copied(first), _copied(row)])
        joined = join([alone, found])
        for name in dict.fromkeys([*together, *joined]):
            theirs, ours = together.get(name), joined.get(name)
            if _is_same(theirs, ours):
                continue
            form, other = _form(theirs), _form(ours)
            if form == other:
                padding_id, is_left, _ = self._padding
                other = (
                    f"of the same shape with other numbers (padded with {padding_id} on the "
                    f"{'left' if is_left else 'right'}, as the trainer's `processing_class` says)"
                )
            message = (
                f"`{name}` of two samples together is {form}, of each alone and joined {other}: this "
                "collation cannot be balanced when samples have been read. Give it samples with "
                "`input_ids`, or a dataset with a length; or the trainer a `processing_class` that pads so"
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
        if not len(ones):
            message = (
                f"the collation gives a sample of {shape[1]} tokens whose `attention_mask` is 0 everywhere, "
                "must have a 1"
            )
            raise ValueError(message)
        kept = slice(int(ones[0]), int(ones[-1]) + 1)
        row: Row = {PADDING: self._padding}
        for name, value in batch.items():
            if not isinstance(value, torch.Tensor) or not value.dim():
                what = "a number" if isinstance(value, torch.Tensor) else f"a `{type(value).__name__}`"
                message = f"the collation gives `{name}` as {what}, must give tensors of each sample alone"
                raise ValueError(message)
            is_wide = value.shape[:2] == shape and not name.startswith(_OF_MEDIA)
            row[name] = value[0, kept] if is_wide else Joined((value,))
        return row


def join(rows: Sequence[Row]) -> dict[str, torch.Tensor]:
    """A microbatch of samples that were collated alone.

    Args:
        rows: of `CollatedAlone`.

    Returns:
        What the collation gives of them together.

    Raises:
        ValueError: a tensor that has a value for each token in one sample, and another form in the next.
    """
    padding_id, is_left, step = rows[0][PADDING]
    width = -(-max(len(row["input_ids"]) for row in rows) // step) * step
    found = {}
    for name in dict.fromkeys(name for row in rows for name in row if name != PADDING):
        held = [row[name] for row in rows if name in row]
        are_media = [isinstance(value, Joined) for value in held]
        if all(are_media):
            # Samples of text alone have none; smaller tiles and masks are filled up, as processors do it.
            found[name] = torch.cat(even([value[0] for value in held], first=1))
            continue
        if any(are_media) or len(set(map(_behind_first, held))) > 1:
            message = f"`{name}` has several forms, must have one in all samples: {list(map(_form, held))}"
            raise ValueError(message)
        fill = padding_id if name == "input_ids" else _FILLS.get(name, 0)
        wide = [row.get(name, held[0][:0]) for row in rows]
        lengths = [len(row["input_ids"]) for row in rows]
        # What a sample lacks is filled up as if it were padding.
        whole = [_padded(value, length, fill, is_left) for value, length in zip(wide, lengths, strict=True)]
        found[name] = torch.stack([_padded(value, width, fill, is_left) for value in whole])
    return found


def _copied(value: Any) -> Any:
    """A sample whose dictionaries and lists a collation may change; pictures and tensors are the same."""
    if type(value) is dict:
        return {name: _copied(one) for name, one in value.items()}
    if type(value) is list:
        return [_copied(one) for one in value]
    return copy.copy(value) if isinstance(value, Mapping) else value


def _has_media(row: Any, found: Row) -> bool:
    """By a sample's columns, as a collation may add a blank picture; without such columns by its tensors."""
    if isinstance(row, Mapping) and (names := MEDIA_COLUMNS & row.keys()):
        return any(row[name] is not None and row[name] != [] for name in names)
    return any(isinstance(value, Joined) for value in found.values())


def _kind_of(*pair: tuple[Any, Row]) -> Any:
    """What a pair of samples can show: which tensors both have, whether one is padded, which are uneven."""
    one, other = (found for _, found in pair)
    names = frozenset((_has_media(row, found), frozenset(found)) for row, found in pair)
    is_padded = len(one["input_ids"]) != len(other["input_ids"])
    shared = one.keys() & other.keys() - {PADDING}
    uneven = frozenset(name for name in shared if _behind_first(one[name]) != _behind_first(other[name]))
    return names, is_padded, uneven


def _behind_first(value: Any) -> tuple[int, ...]:
    """The shape of a token, or of a picture."""
    return tuple((value[0] if isinstance(value, Joined) else value).shape[1:])


def _padded(value: torch.Tensor, width: int, fill: int, is_left: bool) -> torch.Tensor:
    more = value.new_full((width - len(value), *value.shape[1:]), fill)
    return torch.cat([more, value] if is_left else [value, more])


def _is_same(one: Any, other: Any) -> bool:
    if not isinstance(one, torch.Tensor) or not isinstance(other, torch.Tensor) or one.shape != other.shape:
        return False
    if one.is_floating_point() and other.is_floating_point():
        return torch.allclose(one.float(), other.float(), rtol=_CLOSE, atol=_CLOSE)
    return torch.equal(one, other.to(one.dtype))


def _form(value: Any) -> str:
    if isinstance(value, Joined):
        return f"{list(value[0].shape)} of media"
    return f"{list(value.shape)}" if isinstance(value, torch.Tensor) else f"a `{type(value).__name__}`"
