"""What a rank's host does while its device works: it asks the device nothing, and pins what it will send there."""

from __future__ import annotations

import pytest
import tiny_llava
import torch
from test_models import SAMPLES, pack
from torch._subclasses.fake_tensor import FakeTensorMode

from dflop.data.pin import pinned
from dflop.models import load_adapter
from dflop.models.adapter import LlmInput
from dflop.runtime.stage import to_device

CPU = torch.device("cpu")
NAMES = ("text", "image", "video")


@pytest.fixture(scope="module")
def adapter(tmp_path_factory):
    return load_adapter(tiny_llava.write_model_dir(tmp_path_factory.mktemp("model")))


@pytest.mark.parametrize("layers", [(0, 2), (1, 2), (2, 2)], ids=["first", "middle", "last"])
def test_no_forward_or_backward_of_the_backbone_reads_a_value(layers, adapter):
    """Under tensors without values, as a device's are to the host: `.item()`, `.tolist()` or a mask would fail."""
    stage = adapter.build_llm_stage(*layers, CPU, torch.float32, 0)
    _, batch = pack([SAMPLES[name] for name in NAMES])
    width = adapter.hidden_size
    rows = batch.num_features if layers[0] == 0 else len(batch.input_ids_T)
    with FakeTensorMode(allow_non_fake_inputs=True):
        incoming = torch.empty(rows, width, requires_grad=True)
        outgoing = stage(to_device(batch, CPU, is_copied=True), incoming)
        torch.autograd.backward(outgoing, torch.empty_like(outgoing))
    assert incoming.grad is not None
    assert incoming.grad.shape == incoming.shape


def test_what_the_host_must_know_is_found_once(adapter):
    """When samples are packed; a copy to a device has it from there."""
    _, batch = pack([SAMPLES[name] for name in NAMES])
    assert list(batch.segment_tokens) == batch.cu_seqlens.diff().tolist()
    assert batch.num_features == int(batch.feature_mask_T.sum())
    assert batch.target_rows_K.tolist() == [t for t, target in enumerate(batch.targets_T) if target != -100]
    with FakeTensorMode(allow_non_fake_inputs=True):
        there = to_device(batch, CPU, is_copied=True)
    assert (there.segment_tokens, there.num_features) == (batch.segment_tokens, batch.num_features)


def test_pinning_copies_every_tensor_and_nothing_else(adapter, monkeypatch):
    """Without a GPU there is no such memory: what asks for it is counted."""
    asked = []

    def pin_memory(tensor):
        asked.append(tensor.data_ptr())
        return tensor.clone()

    monkeypatch.setattr(torch.Tensor, "pin_memory", pin_memory)
    for batch in pack([SAMPLES["image"], SAMPLES["text"]]):
        asked.clear()
        copy = pinned(batch)
        tensors = {name: value for name, value in vars(batch).items() if isinstance(value, torch.Tensor)}
        assert sorted(asked) == sorted(value.data_ptr() for value in tensors.values())
        assert len(tensors) == (6 if isinstance(batch, LlmInput) else 1)
        for name, value in vars(batch).items():
            if name in tensors:
                assert getattr(copy, name) is not value
                assert torch.equal(getattr(copy, name), value)
            else:
                assert getattr(copy, name) == value
