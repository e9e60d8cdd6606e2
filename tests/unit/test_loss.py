"""The loss in chunks is the loss of the whole, and so are its gradients; logits are never whole."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from dflop.models import loss as module
from dflop.models.byte_counter import ByteCounter
from dflop.models.loss import summed_cross_entropy
from dflop.models.split_backward import BackwardSplitter

K, D, V = 53, 16, 400
ROWS = 8


@pytest.fixture
def small_chunks(monkeypatch):
    """Eight rows a chunk; the last of the 53 rows are fewer."""
    monkeypatch.setitem(module.LOGITS_BYTES_MAX, "cpu", 4 * V * ROWS + 3)


def made(dtype=torch.float32):
    generator = torch.Generator().manual_seed(1)
    head = nn.Linear(D, V, bias=False, dtype=dtype)
    with torch.no_grad():
        head.weight.copy_(torch.randn(V, D, generator=generator))
    hidden_KD = torch.randn(K, D, generator=generator).to(dtype).requires_grad_()
    return head, hidden_KD, torch.randint(0, V, (K,), generator=generator)


def whole(head, hidden_KD, targets_K):
    return F.cross_entropy(head(hidden_KD).float(), targets_K, reduction="sum")


def gradients(function, *inputs):
    head, hidden_KD, _ = inputs
    head.zero_grad()
    hidden_KD.grad = None
    loss = function(*inputs)
    loss.backward()
    return loss.detach(), hidden_KD.grad.clone(), head.weight.grad.clone()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_loss_and_gradients_are_those_of_whole_logits(dtype, small_chunks):
    inputs = made(dtype)
    expected, found = gradients(whole, *inputs), gradients(summed_cross_entropy, *inputs)
    assert found[0].dtype == torch.float32
    assert float(found[0]) == pytest.approx(float(expected[0]), rel=1e-6)
    for a, b in zip(found[1:], expected[1:], strict=True):
        limit = 1e-6 if dtype is torch.float32 else 1e-2
        assert float((a - b).float().norm()) <= limit * float(b.float().norm())


def test_a_split_backward_keeps_no_logits_for_w(small_chunks):
    """The gradient of the head is there after I: W would need the gradients of all logits."""
    inputs = made()
    expected = gradients(whole, *inputs)
    head, hidden_KD, _ = inputs
    head.zero_grad()
    hidden_KD.grad = None
    with BackwardSplitter(head).splitting() as queue:
        summed_cross_entropy(*inputs).backward()
        torch.testing.assert_close(hidden_KD.grad, expected[1])
        assert len(queue) == 0
    torch.testing.assert_close(head.weight.grad, expected[2])


def test_no_rows_give_no_loss():
    head, hidden_KD, targets_K = made()
    assert float(summed_cross_entropy(head, hidden_KD[:0], targets_K[:0]).detach()) == 0.0


def test_logits_of_all_rows_are_never_in_memory(small_chunks):
    """What a whole pass holds more than one chunk's logits would show as 53 rows of them."""
    peaks = []
    for function in (whole, summed_cross_entropy):
        inputs = made()
        with ByteCounter(torch.device("cpu")) as counter:
            counter.phase("both")
            function(*inputs).backward()
        peaks.append(max(phase.peak_bytes for phase in counter.phases))
    logits_bytes = 4 * K * V
    assert peaks[0] > 2 * logits_bytes
    assert peaks[1] < logits_bytes + 3 * 4 * V * D
