"""Layers with linear attention (gated delta rule, Qwen3.5) over packed samples: no sample sees another.

    query, key, value, decay of T tokens --> one recurrence a sample, which starts from nothing --> out

Hugging Face's layer calls two functions that go along the tokens: a short causal convolution, and the
recurrence. Both are wrapped where its module finds them. A call that names the samples of a pack is then run
sample by sample; every other call stays as it was.
"""

from __future__ import annotations

import functools
import importlib
from typing import TYPE_CHECKING, Any

import torch

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


@functools.cache
def has_fused_rule() -> bool:
    """Whether the recurrence of all samples is one call: where `flash-linear-attention` is installed."""
    try:
        found = importlib.import_module("fla.ops.gated_delta_rule")
    except Exception:  # noqa: BLE001 (transformers falls back after any error of the import)
        return False
    # Without it transformers takes its own function, which may overlook the bounds of samples.
    return hasattr(found, "chunk_gated_delta_rule")


def keep_samples_apart(modeling: ModuleType) -> None:
    """Wraps the two functions of a module of transformers; a second call changes nothing.

    Args:
        modeling: a module whose layers call them with the arguments that a layer gets, as in
            `transformers.models.qwen3_5.modeling_qwen3_5`.
    """
    for name, dim in ((CONVOLUTION, 2), (RULE, 1)):
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
