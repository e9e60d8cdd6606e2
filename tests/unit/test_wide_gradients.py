"""Gradients summed in float32 without a float32 copy of each."""

import gc
import weakref

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from dflop.models.wide_gradients import add_unconverted, sum_gradients, used_once


def make(is_unconverted):
    """Two linear maps in bfloat16, and their float32 sums."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 8), nn.GELU(), nn.Linear(8, 8, bias=False)).bfloat16()
    for parameter in model.parameters():
        total = torch.zeros_like(parameter, dtype=torch.float32)
        if is_unconverted:
            parameter.grad_dtype = None
            parameter.grad = total
            add_unconverted(parameter)
        else:
            sum_gradients(parameter, total, is_used_once=True)
    return model


@pytest.mark.parametrize("recomputes", [False, True])
def test_sums_are_those_of_autograd(recomputes):
    """Bit by bit: each gradient has been rounded to bfloat16 before it is added, in both ways."""
    sums = []
    for is_unconverted in (False, True):
        model = make(is_unconverted)
        for seed in range(5):
            rows = torch.randn(4, 8, generator=torch.Generator().manual_seed(seed)).bfloat16()
            result = checkpoint(model, rows, use_reentrant=False) if recomputes else model(rows)
            result.float().square().sum().backward()
        sums.append([parameter.grad for parameter in model.parameters()])
    for ours, theirs in zip(*sums, strict=True):
        assert ours.dtype == torch.float32
        assert torch.equal(ours, theirs)
        assert ours.abs().sum() > 0


def test_the_sum_stays_where_it_is():
    """Reductions and the optimizer know the tensor that it lies in."""
    model = make(is_unconverted=True)
    before = [parameter.grad for parameter in model.parameters()]
    for _ in range(2):
        model(torch.ones(1, 8).bfloat16()).sum().backward()
    assert all(p.grad is total for p, total in zip(model.parameters(), before, strict=True))


def test_a_parameter_without_a_gradient_keeps_its_sum():
    """What a microbatch does not reach stays as it was."""
    model = make(is_unconverted=True)
    unused = nn.Parameter(torch.ones(2).bfloat16())
    unused.grad_dtype = None
    unused.grad = torch.ones(2)
    add_unconverted(unused)
    model(torch.ones(1, 8).bfloat16()).sum().backward()
    assert torch.equal(unused.grad, torch.ones(2))


def test_a_shared_matrix_and_the_head_are_used_more_than_once():
    """Their uses are summed in float32 only if autograd casts each."""
    model = make(is_unconverted=False)
    assert used_once([model]) == set(model.parameters())
    model[2].weight = model[0].weight
    assert used_once([model]) == {model[0].bias}
    assert used_once([nn.ModuleDict({"lm_head": nn.Linear(2, 2)})]) == set()


def test_a_model_is_freed_without_a_collection():
    """The profiler builds one after the other, with Python's collector off."""
    gc.disable()
    try:
        model = make(is_unconverted=True)
        model(torch.ones(1, 8).bfloat16()).sum().backward()
        weight = weakref.ref(model[0].weight)
        del model
        assert weight() is None
    finally:
        gc.enable()
