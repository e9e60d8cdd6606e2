"""A loader of balanced batches says where rows are padded and it was not told."""

from __future__ import annotations

import pickle
import warnings

import pytest
import torch
from tiny_media import make_model

from dflop.integrations import balanced_loader, remove_padding
from dflop.integrations.padded_rows import NUM_BATCHES, WatchedCollation

LENGTHS = [90, 10, 10, 12] * 32


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
    """With its size and what helps, after some batches; the batches are those of the collation."""
    with pytest.warns(UserWarning, match=r"rows are padded: 1\.\d+ tokens .* `is_padded=True`") as said:
        found = list(
            balanced_loader(LENGTHS, [(0, length) for length in LENGTHS], 4, collate_fn=padded)
        )
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


def test_of_several_workers_one_speaks(capfd):
    """Each has a copy of the collation."""
    costs = [(0, length) for length in LENGTHS]
    found = list(balanced_loader(LENGTHS, costs, 2, collate_fn=padded, num_workers=2))
    assert len(found) == 64
    assert capfd.readouterr().err.count("rows are padded: ") == 1
