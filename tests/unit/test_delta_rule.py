"""Linear attention over packed samples: none sees another."""

import json
from types import SimpleNamespace

import pytest
import torch
from conformance import CPU, write_model
from transformers.models.qwen3_5 import modeling_qwen3_5
from transformers.models.qwen3_5_moe import modeling_qwen3_5_moe

from dflop import ProfileError
from dflop.models import delta_rule, load_adapter
from dflop.models.delta_rule import CONVOLUTION, RULE, keep_samples_apart, layer_period
from dflop.models.tensor import TensorRank

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


def test_a_rank_has_its_heads_of_keys_with_the_heads_of_values_that_read_them(tmp_path):
    """Four heads of keys, 8 wide, and eight of values, 6 wide: queries, keys and values lie in one map, in this order."""
    adapter = load_adapter(write_model(tmp_path, "qwen3_5"))
    whole = adapter.build_llm_stage(0, 1, CPU, torch.float32, 3).layers_in_order()[0].linear_attn
    for rank in range(2):
        stage = adapter.build_llm_stage(0, 1, CPU, torch.float32, 3, tensor=TensorRank(2, rank))
        part = stage.layers_in_order()[0].linear_attn
        keys, values, heads = (slice(n * rank, n * (rank + 1)) for n in (2 * 8, 4 * 6, 4))
        for name in ("in_proj_qkv", "conv1d"):
            q, k, v = getattr(whole, name).weight.split([32, 32, 48])
            assert torch.equal(getattr(part, name).weight, torch.cat([q[keys], k[keys], v[values]])), name
        assert torch.equal(part.in_proj_z.weight, whole.in_proj_z.weight[values])
        for name in ("in_proj_a", "in_proj_b"):
            assert torch.equal(getattr(part, name).weight, getattr(whole, name).weight[heads])
        assert torch.equal(part.A_log, whole.A_log[heads])
        assert torch.equal(part.dt_bias, whole.dt_bias[heads])
        assert torch.equal(part.out_proj.weight, whole.out_proj.weight[:, values])
        assert torch.equal(part.norm.weight, whole.norm.weight)


def changed(folder, **text):
    """A directory of a model whose backbone has other settings."""
    path = write_model(folder, "qwen3_5") / "config.json"
    config = json.loads(path.read_text())
    config["text_config"] |= text
    path.write_text(json.dumps(config))
    return path.parent


def test_heads_that_a_degree_does_not_divide_are_named(tmp_path):
    adapter = load_adapter(changed(tmp_path, linear_num_key_heads=2))
    message = "`text_config.linear_num_key_heads` is 2, must be a multiple of the tensor parallel degree 4"
    with pytest.raises(ProfileError, match=message):
        adapter.build_llm_stage(0, 1, CPU, torch.float32, 3, tensor=TensorRank(4, 0))
    # Before, heads of values that no head of keys goes with failed in the first forward.
    with pytest.raises(
        ProfileError, match="`text_config.linear_num_value_heads` is 8, must be a multiple of"
    ):
        load_adapter(changed(tmp_path / "odd", linear_num_key_heads=3))
