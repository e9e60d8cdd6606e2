"""Axolotl's `streaming: true` with balanced batches: two ranks train what a loop of our own trains from its rows.

The model, the texts and the comparison are those of test_axolotl.py. When a stream has ended, Axolotl reads it again.
"""

from __future__ import annotations

from itertools import count

import pytest
import tiny_vision
from ranks import results, run_ranks
from test_axolotl import (
    NUM_RANKS,
    TEXTS,
    folder,  # noqa: F401 a fixture
    keys_of,
    learn_alone,
    named,
    train_on_ranks,
    weights,
)
from test_trainers import TOLERANCE

pytest.importorskip("axolotl", reason="Axolotl is not installed: `make test-frameworks`")
NUM_STEPS = 4


@pytest.fixture(scope="module", autouse=True)
def _imported():
    """Once, before ranks are forked."""
    import axolotl.cli.train
    import axolotl.core.builders
    import axolotl.train  # noqa: F401


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
    ("batch_size", "accumulation", "lines"),
    [
        # A pass over the stream has steps of 10, 10 and 4 texts.
        (5, 1, {}),
        # Of 16 and 8.
        (2, 4, {"dflop": {"remove_padding": True}}),
    ],
    ids=["padded", "no padding"],
)
def test_ranks_train_what_one_process_does(batch_size, accumulation, lines, folder, tmp_path):  # noqa: F811
    """Parameters, losses and the texts of each step, over the end of the stream and on from its start."""
    rows = [
        {"path": str(folder / "texts.jsonl"), "type": "chat_template", "ds_type": "json", "split": "train"}
    ]
    changes = {**TEXTS, "datasets": rows, "streaming": True, "max_steps": NUM_STEPS, **lines}
    sizes = {"micro_batch_size": batch_size, "gradient_accumulation_steps": accumulation}
    keys = keys_of(folder, tmp_path / "out", **changes, **sizes)
    step_size = NUM_RANKS * batch_size * accumulation

    def run_alone(_):
        steps, losses = learn_alone(keys, lambda rows: steps_of_stream(rows, step_size), tmp_path / "alone")
        return [sorted(map(named, step)) for step in steps], losses

    ((steps, losses),) = results(run_ranks(1, run_alone, tmp_path / "alone/rank"))
    ranks = results(train_on_ranks(keys, tmp_path / "ranks"))
    assert tiny_vision.difference(weights(tmp_path / "out"), weights(tmp_path / "alone")) <= TOLERANCE
    for found, _ in ranks:
        assert found == pytest.approx(losses, rel=1e-4)
    for number, step in enumerate(steps):
        of_step = slice(number * accumulation, (number + 1) * accumulation)
        found = [row for _, batches in ranks for batch in batches[of_step] for row in batch]
        assert sorted(found) == step
    sizes = [[len(batch) for batch in batches] for _, batches in ranks]
    assert sizes[0] != sizes[1], "microbatches of uneven counts"


def test_chats_with_pictures(folder, tmp_path):  # noqa: F811
    """The collation makes their tokens and pixels; here it does so one at a time, where a chat is read."""
    rows = [
        {"path": str(folder / "chats.jsonl"), "type": "chat_template", "ds_type": "json", "split": "train"}
    ]
    sizes = {"micro_batch_size": 3, "gradient_accumulation_steps": 1}
    lines = {"dflop": {"balance_encoder": True, "remove_padding": True}}
    keys = keys_of(
        folder, tmp_path / "out", datasets=rows, streaming=True, max_steps=NUM_STEPS, **sizes, **lines
    )
    step_size = NUM_RANKS * sizes["micro_batch_size"]

    def run_alone(_):
        return learn_alone(keys, lambda rows: steps_of_stream(rows, step_size), tmp_path / "alone")[1]

    (losses,) = results(run_ranks(1, run_alone, tmp_path / "alone/rank"))
    for found, _ in results(train_on_ranks(keys, tmp_path / "ranks")):
        assert found == pytest.approx(losses, rel=1e-4)
    assert tiny_vision.difference(weights(tmp_path / "out"), weights(tmp_path / "alone")) <= TOLERANCE


def test_a_stream_of_pairs_is_refused():
    """Before anything is loaded."""
    from axolotl.utils.dict import DictDefault

    from dflop.integrations.axolotl import BalancePlugin

    with pytest.raises(ValueError, match="`streaming` is True, leave it out for balanced batches: pairs"):
        BalancePlugin().register(DictDefault({"streaming": True, "rl": "dpo"}))
