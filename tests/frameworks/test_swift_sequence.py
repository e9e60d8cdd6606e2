"""ms-swift's sequence parallel with balanced batches: four ranks of two groups train what one process trains."""

from __future__ import annotations

import pytest
import tiny_vision
from test_swift import ALONE, LEAVE, TOLERANCE, sft, weights, write_chats, write_model

SPLIT = ("--sequence_parallel_size", "2", "--attn_impl", "sdpa")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("swift_sequence")
    # The heads are dealt out: two of keys for two ranks.
    write_model(folder / "model", num_key_value_heads=2)
    write_chats(folder)
    (folder / "leave.py").write_text(LEAVE)
    return folder


@pytest.fixture(scope="module")
def alone(folder, tmp_path_factory):
    """Losses and weights of ms-swift itself, in one process without sequence parallel."""
    out = tmp_path_factory.mktemp("alone")
    return sft(folder, out, 1, *ALONE, "--external_plugins", "leave.py"), weights(out)


@pytest.mark.parametrize(
    ("sizes", "lines"), [((2, 2), ""), ((4, 1), "balance_encoder=True")], ids=["first", "both"]
)
def test_two_groups_train_what_one_process_trains(sizes, lines, folder, alone, tmp_path):
    """Each rank of a group has a part of each row; the encoder is that of whole rows."""
    (tmp_path / "plugin.py").write_text(
        f"{LEAVE}\nfrom dflop.integrations.swift import register\nregister({lines})\n"
    )
    batch = ("--per_device_train_batch_size", str(sizes[0]), "--gradient_accumulation_steps", str(sizes[1]))
    plugin = ("--external_plugins", str(tmp_path / "plugin.py"), "--callbacks", "dflop")
    losses = sft(folder, tmp_path / "out", 4, *batch, *SPLIT, *plugin)
    assert losses == pytest.approx(alone[0], rel=1e-4)
    assert tiny_vision.difference(weights(tmp_path / "out"), alone[1]) <= TOLERANCE


def test_the_third_line_is_refused(folder, tmp_path):
    """It packs whole rows."""
    (tmp_path / "plugin.py").write_text(
        f"{LEAVE}\nfrom dflop.integrations.swift import register\nregister(remove_padding=True)\n"
    )
    plugin = ("--external_plugins", str(tmp_path / "plugin.py"), "--callbacks", "dflop")
    said = sft(folder, tmp_path / "out", 2, *SPLIT, *plugin, fails=True)
    assert (
        "`--sequence_parallel_size` is 2, must be 1 for `remove_padding=True`, which needs whole rows" in said
    )
