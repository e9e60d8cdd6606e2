"""What a rank's host does while its device works: it asks the device nothing, and pins what it will send there."""

from __future__ import annotations

import pytest
import tiny_llava
import torch
from conformance import CPU, FLOAT, SETTINGS, conversations, write_model
from test_models import SAMPLES, pack
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

from dflop.data.collate import encoder_input
from dflop.data.pin import pinned
from dflop.data.shares import share_of
from dflop.models import load_adapter
from dflop.models.adapter import LlmInput
from dflop.runtime.stage import to_device

NAMES = ("text", "image", "video")


@pytest.fixture(scope="module")
def adapter(tmp_path_factory):
    return load_adapter(tiny_llava.write_model_dir(tmp_path_factory.mktemp("model")))


class _Waiting(TorchDispatchMode):
    """Takes down operators that have a form for tensors without values, and yet ask a GPU for some."""

    def __init__(self):
        super().__init__()
        self.found = set()

    def __torch_dispatch__(self, operator, types, args=(), kwargs=None):
        if any(
            name in str(operator)
            for name in ("masked_scatter_backward", "masked_select", "nonzero", "unique")
        ):
            self.found.add(str(operator))
        return operator(*args, **(kwargs or {}))


@pytest.mark.parametrize("layers", [(0, 2), (1, 2), (2, 2)], ids=["first", "middle", "last"])
def test_no_forward_or_backward_of_the_backbone_reads_a_value(layers, adapter):
    """Under tensors without values, as a device's are to the host: `.item()`, `.tolist()` or a mask would fail."""
    waiting = _Waiting()
    stage = adapter.build_llm_stage(*layers, CPU, torch.float32, 0)
    _, batch = pack([SAMPLES[name] for name in NAMES])
    width = adapter.hidden_size
    rows = batch.num_features if layers[0] == 0 else len(batch.input_ids_T)
    with FakeTensorMode(allow_non_fake_inputs=True), waiting:
        incoming = torch.empty(rows, width, requires_grad=True)
        outgoing = stage(to_device(batch, CPU, is_copied=True), incoming)
        torch.autograd.backward(outgoing, torch.empty_like(outgoing))
    assert incoming.grad is not None
    assert incoming.grad.shape == incoming.shape
    assert not waiting.found


@pytest.fixture(scope="module", params=SETTINGS)
def family(request, tmp_path_factory):
    """(adapter, what its encoder reads of samples of every kind)."""
    folder = tmp_path_factory.mktemp("family")
    adapter = load_adapter(write_model(folder, request.param))
    samples = conversations(folder / "media", adapter, request.param).values()
    with_media = [sample for sample in samples if sample.media]
    shares = [share_of(sample.sample) for sample in with_media]
    return adapter, encoder_input(shares, [sample.tiles() for sample in with_media], FLOAT)


@pytest.mark.some(6, 12)
@pytest.mark.usefixtures("quiet")
def test_no_forward_or_backward_of_an_encoder_reads_a_value(family):
    """As above, for the encoder of every family; where patches lie is found on the host, before the step."""
    adapter, batch = family
    encoder = adapter.build_encoder(CPU, FLOAT, 0)
    expected = encoder(batch)
    waiting = _Waiting()
    with FakeTensorMode(allow_non_fake_inputs=True), waiting:
        features = encoder(to_device(batch, CPU, is_copied=True))
        torch.autograd.backward(features, torch.empty_like(features))
    assert features.shape == expected.shape
    assert not waiting.found
    trained = [p for p in encoder.parameters() if p.requires_grad]
    assert any(p.grad is not None for p in trained)


class _Copies(TorchDispatchMode):
    """Takes down each copy from the host to a device during which the host would wait."""

    def __init__(self):
        super().__init__()
        self.blocking = []

    def __torch_dispatch__(self, operator, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        result = operator(*args, **kwargs)
        if operator is torch.ops.aten._to_copy.default:
            is_sent = args[0].device.type == "cpu" and result.device.type == "cuda"
            if is_sent and not kwargs.get("non_blocking", False):
                self.blocking.append(tuple(result.shape))
        return result


@pytest.mark.some(4, 12)
@pytest.mark.usefixtures("quiet")
def test_no_forward_of_an_encoder_waits_for_a_copy_to_its_device(family, monkeypatch):
    """On a device that has no values and that this machine need not have."""
    adapter, batch = family
    encoder = adapter.build_encoder(CPU, FLOAT, 0)
    encoder(batch)
    monkeypatch.setattr(torch.Tensor, "pin_memory", lambda tensor: tensor)
    with FakeTensorMode(allow_non_fake_inputs=True), torch.no_grad():
        for module in encoder.modules():
            for tensors in (module._parameters, module._buffers):
                there = {
                    name: torch.empty_like(t, device="cuda") for name, t in tensors.items() if t is not None
                }
                tensors.update(there)
        batch = to_device(batch, torch.device("cuda"))
        with _Copies() as copies:
            features = encoder(batch)
    assert features.device.type == "cuda"
    assert not copies.blocking


def test_what_the_host_must_know_is_found_once(adapter):
    """When samples are packed; a copy to a device has it from there."""
    _, batch = pack([SAMPLES[name] for name in NAMES])
    assert list(batch.segment_tokens) == batch.cu_seqlens.diff().tolist()
    assert batch.num_features == int(batch.feature_mask_T.sum())
    assert batch.feature_rows_E.tolist() == [t for t, has in enumerate(batch.feature_mask_T) if has]
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
        assert len(tensors) == (7 if isinstance(batch, LlmInput) else 1)
        for name, value in vars(batch).items():
            if name in tensors:
                assert getattr(copy, name) is not value
                assert torch.equal(getattr(copy, name), value)
            else:
                assert getattr(copy, name) == value
