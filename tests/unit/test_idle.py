"""A pass through modules without input: every parameter that trains is reached, whatever holds it."""

from __future__ import annotations

import torch
from peft import LoraConfig, inject_adapter_in_model
from torch import nn

from dflop.integrations.idle import pass_module


def test_adapters_are_passed():
    """Those of peft hold parameters in a dictionary, which PyTorch lets nobody call."""
    projector = nn.Sequential(nn.Linear(3, 4), nn.GELU(), nn.Linear(4, 2))
    adapted = inject_adapter_in_model(LoraConfig(r=2, target_modules=["0", "2"]), projector)
    assert any(isinstance(module, nn.ParameterDict) for module in adapted.modules())
    for held in (nn.ParameterList([torch.ones(2)]), nn.ParameterDict({"one": torch.ones(2)})):
        adapted.append(held)
    trained = {name: one for name, one in adapted.named_parameters() if one.requires_grad}
    assert len(trained) == 6, "two adapters of two matrices, and what was added"
    token = pass_module(adapted, torch.zeros(()))
    assert token == 0
    token.backward()
    for name, one in trained.items():
        assert one.grad is not None, name
        assert not one.grad.any(), name
