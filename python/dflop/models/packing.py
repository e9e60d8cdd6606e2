"""Attention over packed samples: no sample sees another.

    q_1HTd, k_1GTd, v_1GTd, cu_seqlens --> one attention a sample --> out_1THd

Shape letters: H query heads, G key and value heads, T tokens, d width of a head; the first axis is a batch of
1. Backbones attend causally. Encoders do not; what is a sample here is for them a picture or a window of one.

The function is registered in transformers, under `PACKED`, `PACKED_ENCODER` and `PACKED_BY_MASK`, so that its
layers run it unchanged.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Protocol

import torch
import torch.nn.functional as F
from transformers import AttentionInterface, AttentionMaskInterface

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

PACKED = "dflop_packed"
"""Name of the attention function in transformers' registry."""
PACKED_ENCODER = "dflop_flash_packed"
"""The same function under a name for vision towers. They pass the bounds of segments only to functions with
`flash` in the name; for any other they split the tokens themselves and call it once for each segment."""

PACKED_BY_MASK = "dflop_packed_by_mask"
"""The same for vision towers whose layers hand on their mask alone (SigLIP 2)."""


def _find_varlen() -> Callable[..., Any] | None:
    try:
        from torch.nn.attention.varlen import varlen_attn
    except ImportError:
        return None
    return varlen_attn


class TokensOfSamples(Sequence[int]):
    """Tokens of each sample of a microbatch, as layers hand them on to attention.

    `torch.compile` compiles a layer anew for each length of a list among its arguments, that is, for each
    number of samples; into an object like this one it does not look.
    """

    def __init__(self, tokens: Sequence[int]) -> None:
        """Of each sample, in order."""
        self._tokens = tuple(tokens)

    def __len__(self) -> int:
        """How many samples there are."""
        return len(self._tokens)

    def __getitem__(self, place: Any) -> Any:
        """Tokens of the sample at `place`."""
        return self._tokens[place]


class SegmentBounds(Protocol):
    """Where segments begin and end."""

    @property
    def cu_seqlens(self) -> torch.Tensor:
        """[M + 1] int32."""
        ...

    @property
    def segment_tokens(self) -> Sequence[int]:
        """Its differences."""
        ...


# What PyTorch's flash attention requires: widths of a head up to 256, compute capability 8 (Ampere).
_MAX_HEAD_SIZE, _AMPERE = 256, 8
_VARLEN = _find_varlen()
_VARLEN_ARGUMENTS = frozenset(inspect.signature(_VARLEN).parameters) if _VARLEN is not None else frozenset()


def uses_varlen(tensor: torch.Tensor, dropout: float = 0.0) -> bool:
    """Whether packed attention on `tensor` runs as one fused call; else it is a loop over the samples.

    Args:
        tensor: a query; only its device, its dtype and its last size (the width of a head) matter. The fused
            call takes no float32, and only widths that are multiples of 8 up to 256.
        dropout: probability of dropping an attention weight; the fused call has no dropout.

    Returns:
        True on a CUDA device that has the fused call, in half precision and without dropout.
    """
    return (
        _VARLEN is not None
        and tensor.is_cuda
        and tensor.dtype in (torch.float16, torch.bfloat16)
        and dropout == 0.0
        and tensor.shape[-1] % 8 == 0
        and tensor.shape[-1] <= _MAX_HEAD_SIZE
        and _has_fused_call(tensor.device)
    )


def takes_windows() -> bool:
    """Whether the fused call of this PyTorch can leave out tokens far before."""
    return "window_size" in _VARLEN_ARGUMENTS


@functools.cache
def _has_fused_call(device: torch.device) -> bool:
    return torch.cuda.get_device_capability(device)[0] >= _AMPERE


def _repeat_heads(states_1GTd: torch.Tensor, times: int) -> torch.Tensor:
    return states_1GTd if times == 1 else states_1GTd.repeat_interleave(times, dim=1)


def attend_segment(
    query_1HTd: torch.Tensor,
    key_1GTd: torch.Tensor,
    value_1GTd: torch.Tensor,
    scaling: float | None,
    dropout: float = 0.0,
    is_causal: bool = True,
    mask: torch.Tensor | None = None,
) -> torch.Tensor:
    """Attention of one sample, which the profiler times as "attention of one segment".

    Args:
        query_1HTd: [1, H, t, d].
        key_1GTd: [1, G, t, d].
        value_1GTd: [1, G, t, d].
        scaling: factor on the scores; None is 1 / sqrt(d).
        dropout: probability of dropping an attention weight.
        is_causal: whether a token sees only those before it.
        mask: added to the scores, [t, t]; only where `is_causal` is false.

    Returns:
        out_1HTd: [1, H, t, d].
    """
    return F.scaled_dot_product_attention(
        query_1HTd,
        key_1GTd,
        value_1GTd,
        attn_mask=mask,
        dropout_p=dropout,
        is_causal=is_causal,
        scale=scaling,
        enable_gqa=query_1HTd.shape[1] != key_1GTd.shape[1],
    )


def attend_packed(
    query_1HTd: torch.Tensor,
    key_1GTd: torch.Tensor,
    value_1GTd: torch.Tensor,
    cu_seqlens: torch.Tensor,
    segment_tokens: Sequence[int],
    scaling: float | None,
    dropout: float = 0.0,
    is_causal: bool = True,
    window: int | None = None,
) -> torch.Tensor:
    """Attention of each sample over itself.

    Args:
        query_1HTd: [1, H, T, d].
        key_1GTd: [1, G, T, d].
        value_1GTd: [1, G, T, d].
        cu_seqlens: [M + 1] int32, same device.
        segment_tokens: tokens of each sample, which are the differences of `cu_seqlens`; given so that
            nothing is read from the device.
        scaling: factor on the scores; None is 1 / sqrt(d).
        dropout: probability of dropping an attention weight.
        is_causal: whether a token sees only those before it.
        window: how many tokens one sees at most, itself included; None: all. Only where `is_causal` and
            `uses_varlen` and `takes_windows` are true.

    Returns:
        out_1THd: [1, T, H, d]; contiguous where it was computed sample by sample.
    """
    if uses_varlen(query_1HTd, dropout):
        longest = max(segment_tokens)
        return _attend_varlen(
            query_1HTd, key_1GTd, value_1GTd, cu_seqlens, longest, scaling, is_causal, window
        )
    assert window is None, "only the fused call takes windows"
    sizes = [tokens for tokens in segment_tokens if tokens > 0]
    # `split` instead of slices: the backward of a slice fills a tensor of all T rows with zeros, so M samples
    # would cost M * T. The backward of a split is one concatenation.
    parts = zip(
        query_1HTd.split(sizes, dim=2),
        key_1GTd.split(sizes, dim=2),
        value_1GTd.split(sizes, dim=2),
        strict=True,
    )
    outputs = [attend_segment(q, k, v, scaling, dropout, is_causal).transpose(1, 2) for q, k, v in parts]
    return outputs[0] if len(outputs) == 1 else torch.cat(outputs, dim=1)


def _attend_varlen(
    query_1HTd: torch.Tensor,
    key_1GTd: torch.Tensor,
    value_1GTd: torch.Tensor,
    cu_seqlens: torch.Tensor,
    max_tokens: int,
    scaling: float | None,
    is_causal: bool,
    window: int | None,
) -> torch.Tensor:
    assert _VARLEN is not None, "asked for by `uses_varlen` only"
    options: dict[str, Any] = {"scale": scaling}
    # Arguments differ by PyTorch version: `is_causal` came first, then `window_size`, then `enable_gqa`.
    if "window_size" in _VARLEN_ARGUMENTS:
        before = -1 if window is None else window - 1
        options["window_size"] = (before, 0) if is_causal else (-1, -1)
    else:
        options["is_causal"] = is_causal
    groups = query_1HTd.shape[1] // key_1GTd.shape[1]
    if groups > 1 and "enable_gqa" in _VARLEN_ARGUMENTS:
        options["enable_gqa"] = True
    else:
        key_1GTd, value_1GTd = _repeat_heads(key_1GTd, groups), _repeat_heads(value_1GTd, groups)
    out_THd = _VARLEN(
        query_1HTd[0].transpose(0, 1),
        key_1GTd[0].transpose(0, 1),
        value_1GTd[0].transpose(0, 1),
        cu_seqlens,
        # The same tensor object again: only then do some kernels apply the causal mask.
        cu_seqlens,
        max_tokens,
        max_tokens,
        **options,
    )
    return out_THd[None]


def packed_attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    cu_seq_lens_q: torch.Tensor | None = None,
    segment_tokens: Sequence[int] | None = None,
    is_causal: bool | None = None,
    sights: Mapping[int | None, Any] | None = None,
    sliding_window: int | None = None,
    **_: Any,
) -> tuple[torch.Tensor, None]:
    """The attention function that transformers' layers call; see `attend_packed`.

    Args:
        module: the attention layer.
        query: [1, H, T, d].
        key: [1, G, T, d].
        value: [1, G, T, d].
        attention_mask: must be None: `cu_seq_lens_q` already says who sees whom.
        scaling: factor on the scores.
        dropout: probability of dropping an attention weight.
        cu_seq_lens_q: [M + 1] int32; required.
        segment_tokens: its differences; none: they are read from the device, in each layer.
        is_causal: whether a token sees only those before it; None: as `module.is_causal` says, else true.
        sights: where layers see windows, or pictures are seen whole: what each kind of layers sees, by its
            window (`models/sight.py`).
        sliding_window: of this layer; its key in `sights`.

    Returns:
        out_1THd, and no weights.

    Raises:
        ValueError: there is a mask, or no `cu_seq_lens_q`: either would let samples see each other.
    """
    if attention_mask is not None or cu_seq_lens_q is None or query.shape[0] != 1:
        message = "packed attention takes `cu_seq_lens_q` and a batch of 1, and no mask"
        raise ValueError(message)
    if sights is not None:
        return sights[sliding_window].attend(query, key, value, scaling, dropout), None
    if segment_tokens is None:
        segment_tokens = cu_seq_lens_q.diff().tolist()
    if is_causal is None:
        is_causal = bool(getattr(module, "is_causal", True))
    out_1THd = attend_packed(query, key, value, cu_seq_lens_q, segment_tokens, scaling, dropout, is_causal)
    return out_1THd, None


def _no_mask(*_: Any, **__: Any) -> None:
    return None


def packed_by_mask(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: SegmentBounds,
    scaling: float | None = None,
    dropout: float = 0.0,
    **_: Any,
) -> tuple[torch.Tensor, None]:
    """The attention function of towers whose layers hand on nothing but a mask; see `attend_packed`.

    Args:
        module: the attention layer.
        query: [1, H, T, d].
        key: [1, G, T, d].
        value: [1, G, T, d].
        attention_mask: in place of a mask, the bounds of the segments.
        scaling: factor on the scores.
        dropout: probability of dropping an attention weight.

    Returns:
        out_1THd, and no weights.
    """
    return packed_attention(
        module,
        query,
        key,
        value,
        None,
        scaling,
        dropout,
        attention_mask.cu_seqlens,
        attention_mask.segment_tokens,
        is_causal=False,
    )


for _name, _function in (
    (PACKED, packed_attention),
    (PACKED_ENCODER, packed_attention),
    (PACKED_BY_MASK, packed_by_mask),
):
    AttentionInterface.register(_name, _function)
    # Without this, transformers would build a T x T mask, as it does for functions that it does not know.
    AttentionMaskInterface.register(_name, _no_mask)
