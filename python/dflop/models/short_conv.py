"""Layers with a gated short convolution (LFM2) over packed samples: no sample sees another.

    hidden_TD --in_proj--> b, c, x --convolution of b x in each sample--> times c --out_proj--> hidden_TD

Most layers of LFM2 have this in place of attention. A token sees itself and the few before it. Hugging Face's
layer calls one function for the convolution, which is wrapped as that of linear attention is
(`delta_rule.keep_samples_apart`): each sample starts from nothing.

Channels do not see each other, so tensor parallelism deals them out. The names of modules are LFM2's.
"""

from __future__ import annotations

import inspect
from fractions import Fraction
from typing import Any

from dflop.models.rules import Rule
from dflop.models.tensor import Cut, LayerPlan

WITH_SHORT_CONV = ("lfm2",)
"""`model_type` of the backbones of which most layers have a short convolution."""
CONV, FULL = "conv", "full_attention"
"""Kinds of layers in `layer_types`."""
# The profiler runs so many layers at once, at most.
_RUN_MAX = 8


def gets_bounds() -> bool:
    """Whether this transformers tells a short convolution where the samples of a pack end.

    Returns:
        False before 5.23, whose layers hand their arguments on to attention alone: packed samples would see
        each other.
    """
    from transformers.models.lfm2.modeling_lfm2 import Lfm2ShortConv

    told = inspect.signature(Lfm2ShortConv.forward).parameters.values()
    return any(parameter.kind is parameter.VAR_KEYWORD for parameter in told)


def mlp_width(text: Any) -> int:
    """The width of the MLP, which the configuration may give as one to be adjusted.

    Args:
        text: configuration of the backbone.

    Returns:
        Columns of its first maps, as Hugging Face's `Lfm2MLP` computes them.
    """
    width = text.intermediate_size
    if not text.block_auto_adjust_ff_dim:
        return width
    wanted = int(text.block_ffn_dim_multiplier * int(2 * width / 3))
    return -(-wanted // text.block_multiple_of) * text.block_multiple_of


def conv_rules(text: Any) -> list[Rule]:
    """What the configuration of such a backbone must be.

    Args:
        text: configuration of a backbone of `WITH_SHORT_CONV`.

    Returns:
        Rules for `check_rules`.
    """
    kinds = list(text.layer_types)
    are_known = {FULL} <= set(kinds) <= {CONV, FULL} and len(kinds) == text.num_hidden_layers
    return [
        Rule(
            "text_config.layer_types",
            kinds,
            are_known,
            f"`{CONV}` or `{FULL}` for each layer, and the latter for one at least",
        ),
        Rule("text_config.conv_bias", text.conv_bias, not text.conv_bias, "false"),
    ]


def short_conv_plan(text: Any, kind: str | None) -> LayerPlan:
    """How tensor parallelism cuts a layer.

    Args:
        text: configuration of the backbone.
        kind: of the layer.

    Returns:
        The plan: of a convolution a rank has channels, with their gates.
    """
    channels = ("text_config.hidden_size", text.hidden_size)
    heads = ("text_config.num_attention_heads", text.num_attention_heads)
    few = ("text_config.num_key_value_heads", text.num_key_value_heads)
    width = ("text_config.intermediate_size", mlp_width(text))
    if kind == CONV:
        entry, norms_of_heads = "conv", ()
        cuts = (
            # Both gates and what they gate are one map.
            Cut("conv.in_proj", *channels, num_blocks=3),
            Cut("conv.conv", *channels, dim=0),
            Cut("conv.out_proj", *channels, by_input=True),
        )
    else:
        entry, norms_of_heads = "self_attn", ("self_attn.q_layernorm", "self_attn.k_layernorm")
        cuts = (
            Cut("self_attn.q_proj", *heads),
            *(Cut(f"self_attn.{name}_proj", *few, may_repeat=True) for name in "kv"),
            Cut("self_attn.out_proj", *heads, by_input=True),
        )
    return LayerPlan(
        cuts=(
            *cuts,
            *(Cut(f"feed_forward.{name}", *width) for name in ("w1", "w3")),
            Cut("feed_forward.w2", *width, by_input=True),
        ),
        entries=(entry, "feed_forward"),
        between=("operator_norm", "ffn_norm", *norms_of_heads),
    )


def kinds_like_all(text: Any) -> list[str]:
    """A few layers that stand for all: of both kinds they have the share of all, or nearly.

    Args:
        text: configuration of a backbone of `WITH_SHORT_CONV`.

    Returns:
        Kinds of at most 8 layers, those with attention last; the fewest whose share is nearest.
    """
    count, attending = text.num_hidden_layers, text.layer_types.count(FULL)
    share = Fraction(attending, count)

    def of(length: int) -> int:
        return round(share * length)

    length = min(range(1, min(_RUN_MAX, count) + 1), key=lambda n: (abs(Fraction(of(n), n) - share), n))
    return [CONV] * (length - of(length)) + [FULL] * of(length)
