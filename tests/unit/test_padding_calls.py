"""`remove_padding` beside what else is done with a model: caches, other models of its configuration, another attention."""

from __future__ import annotations

import copy
import gc
import warnings

import pytest
import tiny_families
import torch
from test_padding import NOT_PACKED, batch_of, check_equal, gradients, text_batch
from tiny_media import FAMILIES, make_model

from dflop.integrations import remove_padding

# Some models warn of their own at every start.
pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning")


@pytest.fixture
def text_model(quiet):
    return made()


def made(config=None):
    from transformers import Qwen2Config, Qwen2ForCausalLM

    torch.manual_seed(0)
    return Qwen2ForCausalLM(config or Qwen2Config(**tiny_families.TEXT)).train()


def cache_of(output):
    """Of transformers from 5.24 on it is called `cache`."""
    return output["cache"] if "cache" in output else output["past_key_values"]


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
    torch.testing.assert_close(continued(copy.deepcopy(model)), expected)
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


@pytest.mark.parametrize("how", ["the same", "a copy"])
def test_models_of_one_configuration(how, text_model):
    """Each has the line or not, whatever the others have, and when one is gone."""
    batch = text_batch([9, 4])
    expected = gradients(text_model, batch)
    first = remove_padding(text_model)
    config = text_model.config
    with_line, without = (made(config if how == "the same" else copy.deepcopy(config)) for _ in range(2))
    second = remove_padding(with_line)
    with pytest.raises(ValueError, match="computes no padding already: call `remove_padding` once"):
        remove_padding(with_line)
    for model in (text_model, with_line, without):
        check_equal(gradients(model, batch), expected)
    without.gradient_checkpointing_enable({"use_reentrant": False})
    check_equal(gradients(without, batch), expected)
    assert (first.num_tokens, second.num_tokens) == (13, 13)
    # One line is taken back between a forward of the other and its backward.
    with_line.gradient_checkpointing_enable({"use_reentrant": False})
    with_line.zero_grad()
    loss = with_line(**batch).loss
    first.remove()
    loss.backward()
    check_equal((loss, {n: p.grad for n, p in with_line.named_parameters()}), expected)
    check_equal(gradients(text_model, batch), expected)
    # Without padding its causal mask is made by the attention's name alone.
    eager = without.eval()(**batch).loss
    del first, second, model, text_model, with_line
    gc.collect()
    assert torch.equal(without(**batch).loss, eager)
    check_equal(gradients(without.train(), batch), expected)


def test_a_model_without_the_line_outlives_the_one_with_it(quiet):
    """Both have one configuration, whose attention is the first model's."""
    batch, model = text_batch([9, 4]), made()
    other = made(model.config)
    expected = gradients(other, batch), other.eval()(**batch).logits
    remove_padding(model)
    del model
    gc.collect()
    torch.testing.assert_close(other(**batch).logits, expected[1])
    check_equal(gradients(other.train(), batch), expected[0])


def test_a_trainer_makes_its_model_twice(tmp_path, quiet):
    """`model_init` from one configuration object, as a search for hyperparameters has it."""
    import tiny_text
    from transformers import Trainer, TrainingArguments

    config, handles = made().config, []

    def model_init():
        model = made(config)
        handles.append(remove_padding(model))
        return model

    arguments = TrainingArguments(
        str(tmp_path), use_cpu=True, report_to=[], save_strategy="no", max_steps=1, disable_tqdm=True
    )
    rows = tiny_text.Samples(8).rows
    Trainer(None, arguments, tiny_text.collate, rows, model_init=model_init).train()
    assert len(handles) == 2
    assert handles[1].padding_ratio > 1


def test_another_attention_may_be_chosen_later(text_model):
    """`set_attn_implementation` holds in evaluation and where padding is computed, and after the line."""
    batch = text_batch([9, 4])
    expected = gradients(text_model, batch)
    handle = remove_padding(text_model)
    text_model.set_attn_implementation("eager")
    check_equal(gradients(text_model, batch), expected)
    assert handle.num_tokens == 13
    found = text_model.eval()(**batch, output_attentions=True).attentions
    assert [one.shape for one in found] == [(2, 4, 9, 9)] * 3
    with pytest.warns(UserWarning, match="`output_attentions` is asked for"):
        found = text_model.train()(**batch, output_attentions=True).attentions
    assert found[0].shape == (2, 4, 9, 9)
    text_model.set_attn_implementation("sdpa")
    handle.remove()
    assert text_model.config._attn_implementation == "sdpa"
    second = remove_padding(text_model)
    text_model.set_attn_implementation("eager")
    text_model(**batch)
    second.remove()
    assert text_model.config._attn_implementation == "eager"
