"""Linear attention over packed samples: none sees another."""

from types import SimpleNamespace

import pytest
import torch
from transformers.models.qwen3_5 import modeling_qwen3_5
from transformers.models.qwen3_5_moe import modeling_qwen3_5_moe

from dflop.models import delta_rule
from dflop.models.delta_rule import CONVOLUTION, RULE, keep_samples_apart, layer_period

MODULES = [modeling_qwen3_5, modeling_qwen3_5_moe]
# Samples of less than a chunk of 64 tokens, of one chunk and one token, and of none.
TOKENS = [5, 0, 65, 1, 130]


@pytest.fixture(autouse=True)
def _apart(monkeypatch):
    torch.set_num_threads(1)
    monkeypatch.setattr(delta_rule, "has_fused_rule", lambda: False)
    for module in MODULES:
        keep_samples_apart(module)


def states(total, seed=0):
    """Queries, keys, values, the logarithm of what is left of the state, and how much is written."""
    generator = torch.Generator().manual_seed(seed)

    def drawn(*shape):
        return torch.randn(1, total, *shape, generator=generator)

    decay, written = -drawn(4).abs(), drawn(4).sigmoid()
    return [t.requires_grad_() for t in (drawn(2, 8), drawn(2, 8), drawn(4, 6), decay, written)]


def rule(module, parts, **options):
    query, key, value, decay, written = parts
    return getattr(module, RULE)(
        query, key, value, g=decay, beta=written, use_qk_l2norm_in_kernel=True, cu_seqlens=None, **options
    )[0]


@pytest.mark.parametrize("module", MODULES)
def test_the_recurrence_of_a_pack_is_that_of_each_sample(module):
    parts = states(sum(TOKENS))
    found = rule(module, parts, segment_tokens=TOKENS)
    weights = torch.randn(found.shape)
    gradients = torch.autograd.grad((found * weights).sum(), parts)
    for n, tokens in enumerate(TOKENS):
        own = slice(sum(TOKENS[:n]), sum(TOKENS[:n]) + tokens)
        if tokens == 0:
            continue
        alone = [part[:, own].detach().requires_grad_() for part in parts]
        wanted = rule(module, alone)
        assert torch.equal(found[:, own], wanted)
        expected = torch.autograd.grad((wanted * weights[:, own]).sum(), alone)
        assert all(torch.equal(g[:, own], w) for g, w in zip(gradients, expected, strict=True))
    # Without the bounds, a sample would start from the state that the one before it left.
    assert not torch.equal(found, rule(module, parts))


@pytest.mark.parametrize("module", MODULES)
def test_the_convolution_of_a_pack_is_that_of_each_sample(module):
    mixed, weight = torch.randn(1, 6, sum(TOKENS)), torch.randn(6, 4)
    convolve = getattr(module, CONVOLUTION)
    found = convolve(mixed, weight, None, activation="silu", segment_tokens=TOKENS)
    for n, tokens in enumerate(TOKENS):
        own = slice(sum(TOKENS[:n]), sum(TOKENS[:n]) + tokens)
        if tokens:
            assert torch.equal(found[..., own], convolve(mixed[..., own], weight, None, activation="silu"))


def test_a_call_without_samples_is_as_it_was():
    parts = states(70)
    plain = getattr(modeling_qwen3_5, RULE)
    assert plain.__wrapped__ is not plain
    found = rule(modeling_qwen3_5, parts)
    query, key, value, decay, written = parts
    wanted, _ = plain.__wrapped__(query, key, value, g=decay, beta=written, use_qk_l2norm_in_kernel=True)
    assert torch.equal(found, wanted)
    # A second call does not wrap again.
    keep_samples_apart(modeling_qwen3_5)
    assert getattr(modeling_qwen3_5, RULE) is plain


def test_the_fused_recurrence_is_called_once_with_the_bounds(monkeypatch):
    """As with `flash-linear-attention` on a GPU; the convolution is run sample by sample there too."""
    calls = []

    def fused(query, *, cu_seqlens=None, **_):
        calls.append((tuple(query.shape), cu_seqlens.tolist()))
        return query, None

    def convolve(mixed, *_, **options):
        calls.append((tuple(mixed.shape), sorted(options)))
        return mixed

    module = SimpleNamespace(**{RULE: fused, CONVOLUTION: convolve})
    keep_samples_apart(module)
    monkeypatch.setattr(delta_rule, "has_fused_rule", lambda: True)
    bounds = torch.tensor([0, 2, 5], dtype=torch.int32)
    getattr(module, RULE)(torch.zeros(1, 5, 2, 4), cu_seqlens=bounds, segment_tokens=[2, 3], use_cache=False)
    with pytest.raises(ValueError, match="without it samples would see each other"):
        getattr(module, RULE)(torch.zeros(1, 5, 2, 4), segment_tokens=[2, 3])
    getattr(module, CONVOLUTION)(torch.zeros(1, 6, 5), segment_tokens=[2, 3], activation="silu")
    assert calls == [
        ((1, 5, 2, 4), [0, 2, 5]),
        ((1, 6, 2), ["activation"]),
        ((1, 6, 3), ["activation"]),
    ]


@pytest.mark.parametrize(
    ("kinds", "period"),
    [("", 1), ("ffff", 1), ("lllf", 4), ("lllflllf", 4), ("lflf", 2), ("llf", 3), ("lllflllff", None)],
)
def test_the_kinds_of_layers_come_again(kinds, period):
    names = {"l": "linear_attention", "f": "full_attention"}
    text = SimpleNamespace(layer_types=[names[kind] for kind in kinds], num_hidden_layers=len(kinds))
    assert layer_period(text) == period
