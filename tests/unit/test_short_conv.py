"""Layers with a short convolution: packed samples are the samples alone, and a few layers stand for all."""

from types import SimpleNamespace

import pytest
import torch
from tiny_families import write_config
from torch.distributed.fsdp import FSDPModule
from transformers import Lfm2Config
from transformers.models.lfm2 import modeling_lfm2

from dflop import ProfileError
from dflop.integrations.encoder_families import NaflexTower
from dflop.models import load_adapter
from dflop.models.delta_rule import CONVOLUTION, keep_samples_apart
from dflop.models.short_conv import CONV, FULL, conv_rules, kinds_like_all, mlp_width

SIZES = [5, 1, 2, 9]


def made(**fields):
    small = {"hidden_size": 12, "num_attention_heads": 2, "num_key_value_heads": 1, "intermediate_size": 24}
    return Lfm2Config(**{**small, "num_hidden_layers": 1, "layer_types": [CONV], **fields})


@pytest.mark.parametrize("kernel", [1, 3, 6])
def test_a_pack_is_its_samples_alone(kernel):
    """To the rounding of products, and so are its gradients; a kernel may reach beyond a whole sample."""
    keep_samples_apart(modeling_lfm2, (CONVOLUTION,))
    torch.manual_seed(3)
    layer = modeling_lfm2.Lfm2ShortConv(made(conv_L_cache=kernel), 0)
    hidden = torch.randn(1, sum(SIZES), 12, requires_grad=True)
    weights = torch.randn(1, sum(SIZES), 12)
    packed = layer(hidden, segment_tokens=SIZES)
    found = torch.autograd.grad((packed * weights).sum(), [hidden, *layer.parameters()])
    alone = torch.cat([layer(part) for part in hidden.split(SIZES, dim=1)], dim=1)
    expected = torch.autograd.grad((alone * weights).sum(), [hidden, *layer.parameters()])
    torch.testing.assert_close(packed, alone, rtol=1e-5, atol=1e-6)
    for ours, theirs in zip(found, expected, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-6)
    # Without the bounds samples see each other, unless a token sees itself alone.
    assert torch.allclose(layer(hidden), alone, rtol=1e-5, atol=1e-6) == (kernel == 1)


@pytest.mark.parametrize(
    "fields",
    [
        {"intermediate_size": 6_656},
        {"intermediate_size": 100, "block_multiple_of": 16},
        {"intermediate_size": 100, "block_ffn_dim_multiplier": 1.3, "block_multiple_of": 8},
        {"intermediate_size": 100, "block_auto_adjust_ff_dim": False},
        {"block_ff_dim": 100, "block_multiple_of": 16},
    ],
)
def test_the_width_of_the_mlp_is_hugging_faces(fields):
    text = made(**fields)
    with torch.device("meta"):
        assert mlp_width(text) == modeling_lfm2.Lfm2MLP(text).w1.out_features


# Layers, those with attention, and the share of the few: LFM2-350M and -1.2B have 6 of 16, -2.6B 8 of 30.
@pytest.mark.parametrize(
    ("count", "attending", "few", "of_few"),
    [(16, 6, 8, 3), (30, 8, 4, 1), (3, 1, 3, 1), (4, 4, 1, 1), (1, 1, 1, 1), (16, 8, 2, 1)],
)
def test_few_layers_have_the_share_of_all(count, attending, few, of_few):
    text = SimpleNamespace(
        num_hidden_layers=count, layer_types=[FULL] * attending + [CONV] * (count - attending)
    )
    kinds = kinds_like_all(text)
    assert (len(kinds), kinds.count(FULL)) == (few, of_few)


def test_what_is_not_trained_is_named():
    def broken(**fields):
        return [rule.field for rule in conv_rules(made(**fields)) if not rule.holds]

    assert broken(layer_types=[FULL]) == []
    assert broken(layer_types=[CONV]) == ["text_config.layer_types"]
    assert broken(layer_types=[FULL], conv_bias=True) == ["text_config.conv_bias"]


def test_a_projector_that_is_sharded_by_itself_is_refused():
    """Its model calls it once a tile, and ranks have not as many."""

    class Sharded(FSDPModule, torch.nn.Linear):
        def __new__(cls, *_):
            return object.__new__(cls)

    model = torch.nn.Module()
    model.config = None
    model.multi_modal_projector = torch.nn.Linear(2, 2)
    NaflexTower(model).check_shards()
    model.multi_modal_projector = Sharded(2, 2)
    with pytest.raises(ValueError, match="`multi_modal_projector` is sharded by itself"):
        NaflexTower(model).check_shards()


def test_a_transformers_that_would_mix_samples_is_refused(tmp_path, monkeypatch):
    """Older releases hand the ends of samples on to attention alone."""

    def forward(self, hidden_states, past_key_values=None, attention_mask=None, seq_idx=None):
        del self, hidden_states, past_key_values, attention_mask, seq_idx

    monkeypatch.setattr("transformers.models.lfm2.modeling_lfm2.Lfm2ShortConv.forward", forward)
    with pytest.raises(ProfileError, match="short convolutions would mix the samples of a pack"):
        load_adapter(write_config(tmp_path, "lfm2_vl"))
