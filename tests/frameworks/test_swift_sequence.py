"""ms-swift's sequence parallel with balanced batches: four ranks of two groups train what one process trains."""

from __future__ import annotations

import pytest
import tiny_vision
from safetensors.torch import load_file
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


def test_plain(folder, tmp_path):
    losses = sft(folder, tmp_path / "one", 1, *ALONE, "--external_plugins", "leave.py")
    print(losses)
    sizes = ("--per_device_train_batch_size", "2", "--gradient_accumulation_steps", "2")
    found = sft(folder, tmp_path / "out", 4, *sizes, *SPLIT, "--external_plugins", "leave.py")
    print(found)
    assert found == pytest.approx(losses, rel=1e-4)
    assert tiny_vision.difference(weights(tmp_path / "out"), weights(tmp_path / "one")) <= TOLERANCE
