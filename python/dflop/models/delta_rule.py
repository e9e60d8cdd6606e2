"""Layers with linear attention (gated delta rule, Qwen3.5) over packed samples: no sample sees another.

    query, key, value, decay of T tokens --> one recurrence a sample, which starts from nothing --> out

Hugging Face's layer calls two functions that go along the tokens: a short causal convolution, and the
recurrence. Both are wrapped where its module finds them. A call that names the samples of a pack is then run
sample by sample; every other call stays as it was.

Heads do not see each other, so tensor parallelism deals them out: a head of keys with its heads of values.
"""

from __future__ import annotations

import functools
import importlib
from typing import TYPE_CHECKING, Any

import torch

from dflop.models.rules import Rule
from dflop.models.tensor import Cut, LayerPlan

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from types import ModuleType

CONVOLUTION, RULE = "causal_conv1d_fn", "torch_chunk_gated_delta_rule"
"""Names of the two functions in transformers' modules."""
LINEAR, FULL = "linear_attention", "full_attention"
"""Kinds of layers in `layer_types`."""
# The profiler runs a whole period at once.
_PERIOD_MAX = 8


def linear_layers(text: Any) -> list[bool]:
    """Of each layer of a backbone, whether it has linear attention.

    Args:
        text: configuration of the backbone.

    Returns:
        One answer a layer, in order; none of them true where the configuration names no kinds.
    """
    kinds = getattr(text, "layer_types", None) or []
    return [kind == LINEAR for kind in kinds[: text.num_hidden_layers]]


def layer_period(text: Any) -> int | None:
    """How many layers of a backbone stand for all, because their kinds come again and again.

    Args:
        text: configuration of the backbone.

    Returns:
        1 where all layers are of one kind; None where their kinds follow no short pattern that fills the
        backbone.
    """
    are_linear = linear_layers(text)
    if not any(are_linear):
        return 1
    count = len(are_linear)
    fitting = (period for period in range(1, _PERIOD_MAX + 1) if count % period == 0)
    return next((p for p in fitting if are_linear == are_linear[:p] * (count // p)), None)


def head_rules(text: Any) -> list[Rule]:
    """What the heads of layers with linear attention must be.

    Args:
        text: configuration of the backbone.

    Returns:
        Rules for `check_rules`; none where no layer has linear attention.
    """
    if not any(linear_layers(text)):
        return []
    keys, values = text.linear_num_key_heads, text.linear_num_value_heads
    wanted = f"a multiple of `linear_num_key_heads`, {keys}"
    return [Rule("text_config.linear_num_value_heads", values, keys > 0 and values % keys == 0, wanted)]


def linear_plan(text: Any) -> LayerPlan:
    """How tensor parallelism cuts linear attention, and the norms before it and behind it.

    A part is a head of keys, and of queries, with the heads of values that read it. Queries, keys and values
    are one map, in this order; the convolution has weights for each of its columns.

    Args:
        text: configuration of a backbone with such layers.

    Returns:
        The plan, without the MLP.
    """
    heads = ("text_config.linear_num_key_heads", text.linear_num_key_heads)
    keys = text.linear_num_key_heads * text.linear_key_head_dim
    blocks = (keys, keys, text.linear_num_value_heads * text.linear_value_head_dim)
    return LayerPlan(
        cuts=(
            Cut("linear_attn.in_proj_qkv", *heads, blocks=blocks),
            *(Cut(f"linear_attn.in_proj_{name}", *heads) for name in "zba"),
            Cut("linear_attn.conv1d", *heads, blocks=blocks, dim=0),
            *(Cut("linear_attn", *heads, kind=kind, dim=0) for kind in ("A_log", "dt_bias")),
            Cut("linear_attn.out_proj", *heads, by_input=True),
        ),
        entries=("linear_attn", "mlp"),
        counts=(("linear_attn", "key_dim"), ("linear_attn", "value_dim")),
        # The norm over single heads of values runs on a rank's own heads.
        between=("input_layernorm", "post_attention_layernorm", "linear_attn.norm"),
    )


@functools.cache
def has_fused_rule() -> bool:
    """Whether the recurrence of all samples is one call: where `flash-linear-attention` is installed."""
    try:
        found = importlib.import_module("fla.ops.gated_delta_rule")
    except Exception:  # noqa: BLE001 (transformers falls back after any error of the import)
        return False
    # Without it transformers takes its own function, which may overlook the bounds of samples.
    return hasattr(found, "chunk_gated_delta_rule")


def keep_samples_apart(modeling: ModuleType, names: Sequence[str] = (CONVOLUTION, RULE)) -> None:
    """Wraps functions of a module of transformers; a second call changes nothing.

    Args:
        modeling: a module whose layers call them with the arguments that a layer gets, as in
            `transformers.models.qwen3_5.modeling_qwen3_5`.
        names: of the functions, where the layers have not both.
    """
    for name in names:
        dim = 2 if name == CONVOLUTION else 1
        function = getattr(modeling, name)
        if not hasattr(function, "dflop_keeps_apart"):
            apart = _by_sample(function, dim, takes_bounds=name == RULE)
            apart.dflop_keeps_apart = True  # pyright: ignore[reportFunctionMemberAccess]
            setattr(modeling, name, apart)


def _by_sample(function: Callable[..., Any], dim: int, *, takes_bounds: bool) -> Callable[..., Any]:
    """The function, run for each sample of a pack.

    Args:
        function: takes tensors that have all tokens along one dimension.
        dim: which.
        takes_bounds: whether its fused form takes the bounds of the samples.

    Returns:
        The same function with a further argument, `segment_tokens`: tokens of each sample. It raises
        `ValueError` where the fused form is not given the bounds.
    """

    # It loops over the samples, so torch.compile would compile it anew for each number of them.
    @torch.compiler.disable
    @functools.wraps(function)
    def run(*args: Any, segment_tokens: Sequence[int] | None = None, **kwargs: Any) -> Any:
        sizes = [tokens for tokens in segment_tokens or () if tokens > 0]
        if not sizes:
            return function(*args, **kwargs)
        bounds = kwargs.pop("cu_seqlens", None)
        if takes_bounds and has_fused_rule():
            if bounds is None:
                message = "the fused recurrence takes `cu_seqlens`: without it samples would see each other"
                raise ValueError(message)
            return function(*args, cu_seqlens=bounds, **kwargs)
        columns = [_split(value, sizes, dim) for value in args]
        named = {name: _split(value, sizes, dim) for name, value in kwargs.items()}
        found = [
            function(*(column[n] for column in columns), **{name: own[n] for name, own in named.items()})
            for n in range(len(sizes))
        ]
        if isinstance(found[0], tuple):
            # The state after the last token is asked for in generation only.
            return torch.cat([one for one, _ in found], dim=dim), None
        return torch.cat(found, dim=dim)

    return run


def _split(value: Any, sizes: Sequence[int], dim: int) -> Sequence[Any]:
    """What each sample gets of an argument: its own tokens, or all of what has no tokens."""
    if isinstance(value, torch.Tensor) and value.dim() > dim and value.shape[dim] == sum(sizes):
        return value.split(sizes, dim=dim)
    return [value] * len(sizes)
