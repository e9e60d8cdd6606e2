"""On a GPU: attention within windows and over whole pictures equals masked attention, whichever way it takes."""

from __future__ import annotations

import pytest
import torch
from torch.nn.functional import scaled_dot_product_attention

from dflop.models.sight import sights

pytestmark = pytest.mark.gpu
SIZES = [(300, 256, 40), (1, 200, 500), (700,)]
"""Of each sample runs of text and pictures, in turn, text first."""


@pytest.mark.parametrize(
    ("dtype", "width", "tolerance"),
    [(torch.float32, 64, 1e-4), (torch.bfloat16, 128, 2e-2), (torch.bfloat16, 256, 2e-2)],
    ids=["loop", "128", "256"],
)
@pytest.mark.parametrize("has_pictures", [False, True])
@pytest.mark.parametrize("window", [None, 150])
def test_attention_is_masked_attention(dtype, width, tolerance, has_pictures, window):
    """Oracle: full attention in float64 under the mask, forward and backward."""
    tokens = [sum(runs) for runs in SIZES]
    total = sum(tokens)
    places = torch.cat(
        [torch.full((count,), k % 2 == 1) for runs in SIZES for k, count in enumerate(runs)]
    ).cuda()
    bounds = torch.tensor([0, *tokens]).cumsum(0).to(torch.int32).cuda()
    one = sights([window], places & has_pictures, bounds, tokens, has_pictures)[window]
    generator = torch.Generator(device="cuda").manual_seed(0)

    def states(heads):
        drawn = torch.randn(1, heads, total, width, generator=generator, device="cuda", dtype=torch.float64)
        return drawn.to(dtype).requires_grad_()

    query, key, value = states(4), states(2), states(2)
    found = one.attend(query, key, value, 0.1)
    weights = torch.randn(found.shape, generator=generator, device="cuda", dtype=torch.float64)
    grads = torch.autograd.grad((found.double() * weights).sum(), (query, key, value))

    exact = [t.detach().double().requires_grad_() for t in (query, key, value)]
    position = torch.arange(total, device="cuda")
    mask = (position >= one.first_T[:, None]) & (position <= one.last_T[:, None])
    expected = scaled_dot_product_attention(
        exact[0],
        exact[1].repeat_interleave(2, 1),
        exact[2].repeat_interleave(2, 1),
        attn_mask=mask,
        scale=0.1,
    ).transpose(1, 2)
    wanted = torch.autograd.grad((expected * weights).sum(), exact)
    for got, want in [(found, expected), *zip(grads, wanted, strict=True)]:
        assert (got.double() - want).norm() / want.norm() < tolerance
