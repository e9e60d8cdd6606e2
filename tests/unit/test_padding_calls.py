"""`remove_padding` beside what else is done with a model: caches, other models of its configuration, another attention."""

from __future__ import annotations

import warnings

import pytest
import torch
from test_padding import MEDIA, NOT_PACKED, batch_of, check_equal, gradients, text_batch, text_model
from tiny_media import FAMILIES, make_model

from dflop.integrations import remove_padding

__all__ = ["text_model"]

# Some models warn of their own at every start.
pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning")


def cache_of(output):
    """transformers from 5.24 on says `cache`."""
    return output.get("cache", output.get("past_key_values"))


def continued(model, **named):
    """The logits of tokens behind others, whose keys and values stand in a cache."""
    batch = text_batch([9, 9])
    whole = batch["attention_mask"]
    before = {"input_ids": batch["input_ids"][:, :6], "attention_mask": whole[:, :6]}
    cache = cache_of(model(**before, use_cache=True, **named))
    later = {"input_ids": batch["input_ids"][:, 6:], "attention_mask": whole}
    return model(**later, past_key_values=cache, **named).logits


@pytest.mark.parametrize("wraps", [None, "before", "after"])
def test_a_cache_that_is_asked_for_is_made(wraps, text_model):
    """In training mode, with adapters or without, also where they come later: the next call sees its prefix."""
    model = text_model

    def wrapped(model):
        peft = pytest.importorskip("peft")
        return peft.get_peft_model(model, peft.LoraConfig(r=4, target_modules=["q_proj"]))

    expected = continued(text_model)
    model = wrapped(text_model) if wraps == "before" else text_model
    handle = remove_padding(model)
    model = wrapped(text_model) if wraps == "after" else model
    with pytest.warns(UserWarning, match="padding is computed, because a cache is asked for"):
        found = continued(model)
    torch.testing.assert_close(found, expected)
    assert handle.num_tokens == 0
    # The next call asks for none.
    model(**text_batch([9, 4]))
    assert handle.num_tokens == 13


@pytest.mark.some(4)
@pytest.mark.parametrize("name", [name for name in FAMILIES if name not in NOT_PACKED])
def test_the_cache_of_the_configuration_costs_no_padding(name, tmp_path, quiet):
    """A usual training forward says nothing of a cache; one that asks for it gets what the model gives without the line."""
    model = make_model(name, tmp_path)
    model.config.get_text_config().use_cache = True
    batch = batch_of(name)
    del batch["use_cache"]
    expected = model(**batch, use_cache=True)
    handle = remove_padding(model)
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message="`remove_padding`")
        model(**batch)
    assert handle.num_tokens == int(batch["attention_mask"].sum())
    with pytest.warns(UserWarning, match="a cache is asked for"):
        found = model(**batch, use_cache=True)
    torch.testing.assert_close(found.logits, expected.logits)
    assert cache_of(found).get_seq_length() == cache_of(expected).get_seq_length() > 0
    assert handle.num_tokens == int(batch["attention_mask"].sum())
