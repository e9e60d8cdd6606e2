"""`remove_padding` on backbones like Gemma 4 E2B: what its own code does with rows, and what is asked of it besides."""

from __future__ import annotations

import pytest
import tiny_gemma4
import torch
from test_padding import TOLERANCE, check_equal, gradients, padded

from dflop.integrations import remove_padding

pytestmark = [pytest.mark.usefixtures("quiet"), pytest.mark.filterwarnings("ignore::FutureWarning")]


def text_model(**changes):
    from transformers import Gemma4ForCausalLM, Gemma4TextConfig

    torch.manual_seed(0)
    text = {**tiny_gemma4.SMALL["text_config"], **changes}
    model = Gemma4ForCausalLM(Gemma4TextConfig(**text)).train()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(0.0, 0.1)
    return model


def text_batch(side):
    """Rows longer than the window, and one of a single token more than none."""
    generator = torch.Generator().manual_seed(1)
    ids = [torch.randint(3, 290, (1, length), generator=generator) for length in (30, 4, 17)]
    return padded([{"input_ids": row, "labels": row.clone()} for row in ids], side)


def test_text_alone_longer_than_the_window_is_packed():
    """The backbone looks up the embeddings of single layers itself, by the ids of real tokens."""
    model, batch = text_model(), text_batch("right")
    expected = gradients(model, batch)
    handle = remove_padding(model)
    check_equal(gradients(model, batch), expected)
    assert (handle.num_tokens, handle.num_padded_tokens) == (51, 90)


@pytest.mark.parametrize("before", ["sdpa", "eager"])
def test_last_logits_alone_are_those_of_each_row(before):
    """Layers that read keys of others leave out the first tokens of a padded row; of a packed one that would be other samples'."""
    model = text_model()
    model.set_attn_implementation(before)
    batch = {name: value for name, value in text_batch("left").items() if name != "labels"}

    def found():
        model.zero_grad(set_to_none=True)
        logits = model(**batch, logits_to_keep=1).logits
        weights = torch.randn(logits.shape, generator=torch.Generator().manual_seed(2))
        (logits * weights).sum().backward()
        return logits.detach(), {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}

    logits, of = found()
    handle = remove_padding(model)
    packed_logits, packed_of = found()
    assert handle.num_tokens == 51
    assert logits.shape == packed_logits.shape == (3, 1, 300)
    torch.testing.assert_close(packed_logits, logits, rtol=TOLERANCE, atol=TOLERANCE)
    assert of.keys() <= packed_of.keys()
    for name, gradient in packed_of.items():
        expected = of.get(name, torch.zeros_like(gradient))
        assert float((gradient - expected).norm()) / max(float(expected.norm()), 2e-4) < TOLERANCE, name


@pytest.mark.parametrize(
    ("asked", "why"),
    [
        ({"return_shared_kv_states": True}, "`return_shared_kv_states` is asked for"),
        ({"shared_kv_states": {}}, r"keys and values of earlier tokens are given \(`shared_kv_states`\)"),
    ],
)
def test_keys_and_values_that_others_read_are_those_of_padded_rows(asked, why):
    model, batch = text_model(), text_batch("right")
    expected = gradients(model, {**batch, **asked})
    handle = remove_padding(model)
    with pytest.warns(UserWarning, match=why):
        check_equal(gradients(model, {**batch, **asked}), expected)
    assert handle.num_tokens == 0


def test_a_backbone_that_sees_text_on_both_sides_is_refused():
    with pytest.raises(
        ValueError,
        match=r"tokens see those behind them too \(`use_bidirectional_attention: all`\)",
    ):
        remove_padding(text_model(use_bidirectional_attention="all"))
