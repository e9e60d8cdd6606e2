"""On a GPU: `measure_cost` times both components by events of the device's queue."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from torch import nn

from dflop.integrations import measure_cost

pytestmark = pytest.mark.gpu

WIDTH = 4096


class Backbone(nn.Module):
    """Eight layers."""

    def __init__(self):
        super().__init__()
        self.config = SimpleNamespace()
        self.layers = nn.Sequential(*[nn.Linear(WIDTH, WIDTH) for _ in range(8)])

    def forward(self, inputs_embeds):
        return self.layers(inputs_embeds)


class Whole(nn.Module):
    """An encoder of two layers before it."""

    def __init__(self):
        super().__init__()
        self.encoder = nn.Sequential(*[nn.Linear(WIDTH, WIDTH) for _ in range(2)])
        self.embedding, self.backbone = nn.Parameter(torch.ones(1, 1, WIDTH)), Backbone()

    def get_decoder(self):
        return self.backbone

    def forward(self, pixels, input_ids):
        x = self.embedding.expand(1, input_ids.shape[1], WIDTH)
        if pixels is not None:
            x = x + self.encoder(pixels).mean(1, keepdim=True)
        return SimpleNamespace(loss=self.backbone(inputs_embeds=x).sum())


def test_each_component_costs_as_much_as_its_layers():
    """Equal products a token: the LLM has four times as many as the encoder."""
    shapes = [(n, n) for n in (2048, 4096, 6144, 8192, 12288, 16384)]

    def batch_of(position):
        encoder, llm = shapes[position]
        return {"pixels": torch.ones(1, encoder, WIDTH), "input_ids": torch.zeros(1, llm, dtype=torch.long)}

    model = Whole().cuda()
    cost = measure_cost(model, batch_of, shapes)
    encoder, llm = cost((8192, 8192))
    # The encoder's input has no gradient: one of its six products less.
    assert 3 < llm / encoder < 7
    assert all(parameter.grad is None for parameter in model.parameters())
