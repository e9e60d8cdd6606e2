"""The tokens that rows hold, of a dataset or a list, and the rows that a part of a dataset holds."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np

from dflop.data.saved import changes_rows, is_dataset

if TYPE_CHECKING:
    from collections.abc import Iterator

_BATCH = 1_000
"""Rows that are counted at a time."""


def held(rows: Any) -> Any:
    """The rows themselves: of a dataset that keeps its records in `list_data_dict`, and of parts of others.

    Args:
        rows: of `torch.utils.data` a `Subset`, as `random_split` gives it, or a `ConcatDataset`; or others.

    Returns:
        A `datasets.Dataset`, or a list where the rows are one; else `rows`.
    """
    from torch.utils.data import ConcatDataset, Subset

    if isinstance(rows, Subset):
        whole = held(rows.dataset)
        if is_dataset(whole):
            return whole.select(rows.indices)
        return [whole[index] for index in rows.indices] if isinstance(whole, (list, tuple)) else rows
    if isinstance(rows, ConcatDataset):
        parts = [held(part) for part in rows.datasets]
        if all(is_dataset(part) for part in parts):
            from datasets import concatenate_datasets

            whole = concatenate_datasets(parts)
            changing = next((part for part in parts if changes_rows(part)), None)
            # `datasets` forgets what changes the rows of one part.
            return (
                whole
                if changing is None
                else whole.with_transform(changing.format["format_kwargs"]["transform"])
            )
        are_lists = all(isinstance(part, (list, tuple)) for part in parts)
        return [row for part in parts for row in part] if are_lists else rows
    return getattr(rows, "list_data_dict", rows)


def has_ids(rows: Any) -> bool:
    """Whether each row has its tokens.

    Args:
        rows: what `held` returns.

    Returns:
        Whether.
    """
    if is_dataset(rows):
        return "input_ids" in rows.column_names
    return isinstance(rows, (list, tuple)) and all(
        isinstance(row, Mapping) and "input_ids" in row for row in rows
    )


def lengths_of_ids(rows: Any, name: str) -> list[int]:
    """Tokens of each row.

    Args:
        rows: that have them.
        name: of their column.

    Returns:
        One number a row.
    """
    return [length for _, found in batches_of_ids(rows, name) for length in found.tolist()]


def batches_of_ids(rows: Any, name: str) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """The tokens of some rows, one behind the other, and how many each row has.

    Args:
        rows: that have them.
        name: of their column. A row may hold them as a list, or as lists of such, as `return_tensors="pt"`
            of a tokenizer gives them.

    Yields:
        `[tokens]` and `[rows]`.

    Raises:
        ValueError: a row has none.
    """
    if is_dataset(rows):
        warn_of_changes(rows, name)
        # The one column, so that no picture beside it is decoded.
        start = 0
        for batch in rows.select_columns([name]).with_format("arrow").iter(_BATCH):
            column = batch.column(name).combine_chunks()
            _refuse_nulls(column, name, start)
            start += len(column)
            yield _flat(column)
        return
    for start in range(0, len(rows), _BATCH):
        ids = [np.asarray(row[name]).reshape(-1) for row in rows[start : start + _BATCH]]
        yield np.concatenate(ids), np.asarray([len(one) for one in ids])


def warn_of_changes(rows: Any, name: str) -> None:
    """Says of a dataset that changes its rows that a column of it is counted as it is stored.

    Args:
        rows: a `datasets.Dataset`.
        name: of the column.
    """
    if changes_rows(rows):
        message = (
            f"the dataset changes its rows when they are read (`with_transform`): `{name}` is counted as "
            "it is stored; if that is another length, give `costs`"
        )
        warnings.warn(message, stacklevel=3)


def _refuse_nulls(column: Any, name: str, start: int) -> None:
    if column.null_count:
        row = start + column.is_null().to_pylist().index(True)
        message = f"row {row} has no `{name}`, must have a list of tokens: leave such rows out (`filter`)"
        raise ValueError(message)


def _flat(column: Any) -> tuple[np.ndarray, np.ndarray]:
    """The values of a column of lists, however deep they stand, and how many each row has."""
    # Columns of arrays of a shape (`Array2D`) store lists.
    values = getattr(column, "storage", column)
    found = np.ones(len(values), dtype=np.int64)
    while hasattr(values, "value_lengths"):
        ends = np.cumsum(found)
        inner = np.concatenate([[0], np.cumsum(np.asarray(values.value_lengths(), dtype=np.int64))])
        found = inner[ends] - inner[ends - found]
        values = values.flatten()
    return np.asarray(values), found
