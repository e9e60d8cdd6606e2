"""A loader of balanced batches says where rows are padded and it was not told."""

from __future__ import annotations

import os
import pickle
import warnings
from weakref import WeakSet

import pytest
import torch
from tiny_media import make_model

from dflop.integrations import balanced_loader, padding, remove_padding
from dflop.integrations.padded_rows import NUM_BATCHES, WatchedCollation

LENGTHS = [90, 10, 10, 12] * 32


@pytest.fixture(autouse=True)
def nothing_in_force(monkeypatch):
    """Models of other tests may live still."""
    monkeypatch.setattr(padding, "IN_FORCE", WeakSet())


def padded(rows):
    """Zeros behind each row."""
    tokens = torch.zeros(len(rows), max(rows), dtype=torch.long)
    mask = torch.zeros_like(tokens)
    for row, length in enumerate(rows):
        mask[row, :length] = 1
    return {"input_ids": tokens, "attention_mask": mask}


def packed(rows):
    """One row."""
    return {"input_ids": torch.zeros(1, sum(rows)), "attention_mask": torch.ones(1, sum(rows))}


def batches(collate, lengths=LENGTHS, **options):
    """Of an epoch; a warning is an error."""
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        costs = [(0, length) for length in lengths]
        return list(balanced_loader(lengths, costs, 4, collate_fn=collate, **options))


def test_padding_that_nobody_knows_of_is_said_once():
    """The warning has the size of the padding and what helps. The batches stay those of the collation."""
    with pytest.warns(UserWarning, match=r"rows are padded: 1\.\d+ tokens .* `is_padded=True`") as said:
        found = list(balanced_loader(LENGTHS, [(0, length) for length in LENGTHS], 4, collate_fn=padded))
    assert len(said) == 1
    assert len(found) == 32 > NUM_BATCHES
    assert sum(int(batch["attention_mask"].sum()) for batch in found) == sum(LENGTHS)


def test_what_pads_little_or_is_told_says_nothing():
    """Packed rows, rows of one length, and batches that know of padding."""
    assert len(batches(packed)) == 32
    assert len(batches(padded, [40, 41, 42, 43] * 32)) == 32
    # Four microbatches a step: those with the long samples, and others.
    told = batches(padded, is_padded=True, accumulation=4)
    assert sum(batch["attention_mask"].numel() for batch in told) < 1.2 * sum(LENGTHS)


def test_padding_that_is_taken_away_says_nothing(tmp_path):
    """As long as the line is in force; a worker that is started anew knows it too."""
    handle = remove_padding(make_model("qwen2_vl", tmp_path))
    assert len(batches(padded)) == 32
    watching = pickle.loads(pickle.dumps(WatchedCollation(padded)))
    handle.remove()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for _ in range(NUM_BATCHES):
            watching([90, 10])
    with pytest.warns(UserWarning, match="rows are padded"):
        list(balanced_loader(LENGTHS, [(0, length) for length in LENGTHS], 4, collate_fn=padded))


@pytest.mark.parametrize("num_workers", [2, 4])
def test_of_several_workers_one_speaks_once(num_workers, capfd, monkeypatch):
    """Each has a copy of the collation, new ones in each epoch; they count together."""
    # pytest keeps warnings, and what a worker keeps is lost with it.
    monkeypatch.setattr(warnings, "showwarning", lambda message, *_: os.write(2, f"{message}\n".encode()))
    costs = [(0, length) for length in LENGTHS]
    loader = balanced_loader(LENGTHS, costs, 2, collate_fn=padded, num_workers=num_workers)
    for _ in range(3):
        assert len(list(loader)) == 64
    assert capfd.readouterr().err.count("rows are padded: ") == 1


def test_rows_of_a_fixed_length_are_told_apart():
    """Like lengths together would not help: the rows stay as long."""

    def fixed(rows):
        batch = padded([*rows, 90])
        return {name: value[:-1] for name, value in batch.items()}

    with pytest.warns(
        UserWarning, match="padded beyond the longest of their batch: .* Pad to the longest row"
    ):
        list(balanced_loader([10, 12] * 64, [(0, 10), (0, 12)] * 64, 4, collate_fn=fixed))
