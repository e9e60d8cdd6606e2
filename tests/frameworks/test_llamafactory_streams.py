"""LLaMA-Factory's `streaming: true` with balanced batches: two ranks train what a loop of our own trains from its rows.

Model, chats and the comparison are those of test_llamafactory.py. A stream is read again when it has ended, in
another order.
"""

from __future__ import annotations

import os
from itertools import count

import pytest
import tiny_vision
import torch
from ranks import results, run_ranks
from test_llamafactory import (
    BATCH_SIZE,
    LORA,
    NUM_RANKS,
    arguments_of,
    folder,  # noqa: F401 a fixture
    learn_alone,
    train_on_ranks,
    weights,
)
from test_trainers import TOLERANCE

pytest.importorskip("llamafactory", reason="LLaMA-Factory is not installed: `make test-frameworks`")
NUM_STEPS = 6


@pytest.fixture(scope="module", autouse=True)
def _imported():
    """Once, before ranks are forked."""
    os.environ["HF_HUB_OFFLINE"] = "1"
    import llamafactory.train.tuner  # noqa: F401


def steps_of_stream(stream, step_size):
    """Rows of each step; a step ends where the stream does."""
    steps = []
    for epoch in count():
        stream.set_epoch(epoch)
        rows = list(stream)
        steps += [rows[start : start + step_size] for start in range(0, len(rows), step_size)]
        if len(steps) >= NUM_STEPS:
            return steps[:NUM_STEPS]


@pytest.mark.parametrize(
    "changes",
    [
        # A pass over the stream has steps of 8, 8, 8 and 2 samples.
        {"dflop": {"remove_padding": True}},
        {"dflop": {"balance_encoder": True, "remove_padding": True}, "use_reentrant_gc": False},
        # Each rank reads the stream and keeps its share.
        {**LORA, "accelerator_config": {"dispatch_batches": False}, "gradient_accumulation_steps": 1},
    ],
    ids=["no padding", "all lines", "lora, shared out"],
)
def test_ranks_train_what_one_process_does(changes, folder, tmp_path):  # noqa: F811 the fixture
    """Parameters, losses and the samples of each step; pictures travel as their paths, before they are read."""
    # LLaMA-Factory makes as many shards of a file as there are workers.
    stream = {"streaming": True, "max_steps": NUM_STEPS, "dataloader_num_workers": 1}
    arguments = arguments_of(folder, tmp_path / "out", **stream, **changes)
    accumulation = arguments["gradient_accumulation_steps"]
    step_size = NUM_RANKS * BATCH_SIZE * accumulation
    plain = {name: value for name, value in arguments.items() if name not in ("dflop", "accelerator_config")}

    def run_alone(_):
        def chosen(stream):
            return steps_of_stream(stream, step_size)

        return learn_alone(plain, chosen, tmp_path / "alone")

    (found,) = results(run_ranks(1, run_alone, tmp_path / "alone/rank"))
    steps, losses = found
    ranks, told = train_on_ranks(arguments, tmp_path / "ranks")
    assert told == pytest.approx(losses, rel=1e-3)
    assert tiny_vision.difference(weights(tmp_path / "out"), weights(tmp_path / "alone")) <= TOLERANCE
    for number, step in enumerate(steps):
        of_step = slice(number * accumulation, (number + 1) * accumulation)
        rows = [row for rank in ranks for batch in rank[of_step] for row in batch]
        # At the end of the stream a rank without a sample computes a copy that has no labels.
        assert sorted(rows) == sorted(step) if len(step) == step_size else {*rows} == {*step}
    assert [sum(map(len, rank)) for rank in ranks][0] != sum(map(len, ranks[1])), "uneven counts"
    assert torch.tensor(losses).isfinite().all()
