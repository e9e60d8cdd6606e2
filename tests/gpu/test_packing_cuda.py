"""On a GPU: packed attention equals masked attention, by the fused kernel and by the loop."""

from __future__ import annotations

import pytest
import torch
from torch.nn.functional import scaled_dot_product_attention

from dflop.models.packing import attend_packed

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize(
    ("dtype", "width", "tolerance"),
    # The fused call takes heads of a multiple of 8 only.
    [(torch.float32, 64, 1e-4), (torch.bfloat16, 64, 2e-2), (torch.bfloat16, 12, 2e-2)],
    ids=["loop", "fused", "odd"],
)
def test_packed_attention_is_masked_attention(dtype, width, tolerance):
    """Oracle: full attention in float64 under a mask of one causal block a sample, forward and backward."""
    tokens = [1, 200, 17, 1_000]
    total = sum(tokens)
    generator = torch.Generator(device="cuda").manual_seed(0)

    def states(heads):
        drawn = torch.randn(1, heads, total, width, generator=generator, device="cuda", dtype=torch.float64)
        return drawn.to(dtype).requires_grad_()

    query, key, value = states(8), states(2), states(2)
    bounds = torch.tensor([0, *torch.tensor(tokens).cumsum(0).tolist()], dtype=torch.int32, device="cuda")
    found = attend_packed(query, key, value, bounds, tokens, 0.125)
    weights = torch.randn(found.shape, generator=generator, device="cuda", dtype=torch.float64)
    grads = torch.autograd.grad((found.double() * weights).sum(), (query, key, value))

    exact = [t.detach().double().requires_grad_() for t in (query, key, value)]
    sample = torch.repeat_interleave(torch.arange(len(tokens)), torch.tensor(tokens)).cuda()
    position = torch.arange(total, device="cuda")
    mask = (sample[:, None] == sample[None, :]) & (position[:, None] >= position[None, :])
    expected = scaled_dot_product_attention(
        exact[0],
        exact[1].repeat_interleave(4, 1),
        exact[2].repeat_interleave(4, 1),
        attn_mask=mask,
        scale=0.125,
    ).transpose(1, 2)
    wanted = torch.autograd.grad((expected * weights).sum(), exact)
    for got, want in [(found, expected), *zip(grads, wanted, strict=True)]:
        assert (got.double() - want).norm() / want.norm() < tolerance
