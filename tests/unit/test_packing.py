"""Packed samples do not attend to each other."""

import pytest
import torch
from tiny_llava import Sample, pack, write_model_dir
from torch.nn.functional import scaled_dot_product_attention

from dflop.models import load_adapter
from dflop.models.packing import attend_packed, packed_attention

CPU = torch.device("cpu")


@pytest.fixture(scope="module", autouse=True)
def _one_thread():
    torch.set_num_threads(1)


def states(heads, tokens, seed):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(1, heads, tokens, 12, generator=generator, dtype=torch.float64).requires_grad_()


@pytest.mark.parametrize("is_causal", [True, False])
@pytest.mark.parametrize("tokens", [[5], [1, 1, 1], [3, 0, 200, 17]])
def test_packed_attention_is_masked_attention(tokens, is_causal):
    """Oracle: full attention under a mask of one block a sample, forward and backward."""
    total = sum(tokens)
    query, key, value = states(4, total, 1), states(2, total, 2), states(2, total, 3)
    sample = torch.repeat_interleave(torch.arange(len(tokens)), torch.tensor(tokens))
    position = torch.arange(total)
    mask = sample[:, None] == sample[None, :]
    if is_causal:
        mask &= position[:, None] >= position[None, :]
    expected = scaled_dot_product_attention(
        query, key.repeat_interleave(2, 1), value.repeat_interleave(2, 1), attn_mask=mask, scale=0.3
    ).transpose(1, 2)
    weights = torch.randn(expected.shape, dtype=torch.float64)
    wanted = torch.autograd.grad((expected * weights).sum(), (query, key, value))

    bounds = torch.tensor([0, *torch.tensor(tokens).cumsum(0).tolist()], dtype=torch.int32)
    found = attend_packed(query, key, value, bounds, tokens, 0.3, is_causal=is_causal)
    torch.testing.assert_close(found, expected)
    grads = torch.autograd.grad((found * weights).sum(), (query, key, value))
    for gradient, want in zip(grads, wanted, strict=True):
        torch.testing.assert_close(gradient, want)


def test_layers_say_whether_they_are_causal():
    """By argument or, as most layers of transformers do, by their own attribute; causal if by neither."""
    query, key, value = states(4, 6, 1), states(2, 6, 2), states(2, 6, 3)
    bounds = torch.tensor([0, 6], dtype=torch.int32)
    open_layer = torch.nn.Identity()
    open_layer.is_causal = False
    causal, full = (attend_packed(query, key, value, bounds, [6], 0.3, is_causal=c) for c in (True, False))
    for module, given, wanted in (
        (torch.nn.Identity(), {}, causal),
        (open_layer, {}, full),
        (open_layer, {"is_causal": True}, causal),
        (torch.nn.Identity(), {"is_causal": False}, full),
    ):
        found, _ = packed_attention(module, query, key, value, None, 0.3, cu_seq_lens_q=bounds, **given)
        assert torch.equal(found, wanted)


def test_a_mask_or_missing_bounds_are_refused():
    """Either would let samples see each other without a word."""
    query, key, value = states(4, 6, 1), states(2, 6, 2), states(2, 6, 3)
    bounds = torch.tensor([0, 6], dtype=torch.int32)
    with pytest.raises(ValueError, match="cu_seq_lens_q"):
        packed_attention(torch.nn.Identity(), query, key, value, None)
    with pytest.raises(ValueError, match="no mask"):
        packed_attention(torch.nn.Identity(), query, key, value, torch.ones(6, 6), cu_seq_lens_q=bounds)


def test_changing_one_sample_leaves_the_others_bitwise_the_same(tmp_path):
    adapter = load_adapter(write_model_dir(tmp_path))
    encoder = adapter.build_encoder(CPU, torch.float32, 3)
    stages = [
        adapter.build_llm_stage(0, 1, CPU, torch.float32, 3),
        adapter.build_llm_stage(1, 3, CPU, torch.float32, 3),
    ]
    samples = [
        Sample([], 40, seed=1),
        Sample([("image", 100, 150, 0)], 20, seed=2),
        Sample([("video", 50, 50, 2)], 30, seed=3),
        Sample([], 1, seed=4),
    ]

    def logits_of_each(pack_of):
        encoder_input, llm_input = pack(pack_of)
        with torch.no_grad():
            hidden = stages[0](llm_input, encoder(encoder_input))
            logits, _ = stages[1].logits(llm_input, stages[1].hidden(llm_input, hidden))
        return logits.split([sum(t != -100 for t in s.targets) for s in pack_of])

    before = logits_of_each(samples)
    for changed in range(len(samples)):
        old = samples[changed]
        new = Sample([(g.kind, g.height, g.width, g.num_tiles) for g in old.grids], 0, seed=90)
        new.ids = [i if i >= 298 else (i + 1) % 298 for i in old.ids]
        new.labels = old.labels
        after = logits_of_each([new if i == changed else s for i, s in enumerate(samples)])
        for index in range(len(samples)):
            same = torch.equal(before[index], after[index])
            assert same == (index != changed), (changed, index)


def test_a_sample_packed_is_the_sample_alone(tmp_path):
    adapter = load_adapter(write_model_dir(tmp_path))
    encoder = adapter.build_encoder(CPU, torch.float32, 3)
    stage = adapter.build_llm_stage(0, 4, CPU, torch.float32, 3)
    samples = [Sample([], 33, seed=1), Sample([("image", 100, 150, 0)], 20, seed=2), Sample([], 7, seed=3)]

    def hidden(pack_of):
        encoder_input, llm_input = pack(pack_of)
        with torch.no_grad():
            return stage.hidden(llm_input, encoder(encoder_input))

    together = hidden(samples).split([len(s.ids) for s in samples])
    for sample, packed in zip(samples, together, strict=True):
        torch.testing.assert_close(packed, hidden([sample]), atol=1e-5, rtol=1e-5)
