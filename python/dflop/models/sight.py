"""Who sees whom in a backbone of which most layers see a window, and that sees pictures whole (Gemma).

    places of features, samples --> first_T, last_T: a token sees those from `first` to `last`

A token sees its own sample up to itself, itself included; in a layer with a window of W tokens the last W of
these. A token of a picture also sees the rest of its picture, in both kinds of layers, or in those with a
window alone (Gemma 4). A picture is an unbroken run of places of features within a sample, as in Hugging
Face's models.

Shape letters: see `models/packing.py`.
"""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F

from dflop.models import packing

if TYPE_CHECKING:
    from collections.abc import Callable, Container, Iterable, Sequence

BLOCK = 128
"""Tokens of a block, of which a kernel leaves out those that nobody sees."""


class Sight:
    """What the layers of one kind see in one microbatch; masks are made once for all of them."""

    def __init__(
        self,
        first_T: torch.Tensor,
        last_T: torch.Tensor,
        cu_seqlens: torch.Tensor,
        segment_tokens: Sequence[int],
        window: int | None,
        has_pictures: bool,
    ) -> None:
        self.first_T, self.last_T = first_T, last_T
        self.cu_seqlens = cu_seqlens
        self.segment_tokens = [tokens for tokens in segment_tokens if tokens > 0]
        self.window = window if window is not None and window < max(self.segment_tokens, default=0) else None
        """Tokens that one sees at most of those up to itself; None where no sample has more."""
        self.has_pictures = has_pictures
        """Whether a token may see one behind it."""
        self._masks: dict[torch.dtype, list[torch.Tensor | None]] = {}

    def masks(self, dtype: torch.dtype) -> list[torch.Tensor | None]:
        """What is added to the scores of each sample: 0 where a token sees another, else minus infinity.

        Args:
            dtype: of the scores.

        Returns:
            [t, t] for each sample; None where a token sees all up to itself.
        """
        if dtype not in self._masks:
            sizes, begin, made = self.segment_tokens, 0, []
            for tokens in sizes:
                made.append(self._mask(begin, tokens, dtype))
                begin += tokens
            self._masks[dtype] = made
        return self._masks[dtype]

    def _mask(self, begin: int, tokens: int, dtype: torch.dtype) -> torch.Tensor | None:
        own = slice(begin, begin + tokens)
        first_t, last_t = self.first_T[own] - begin, self.last_T[own] - begin
        key_t = torch.arange(tokens, device=first_t.device)
        is_long = self.window is not None and tokens > self.window
        # On a GPU nothing is read from the device, so all samples have a mask where one may have a picture.
        looks_ahead = self.has_pictures and (first_t.is_cuda or bool((last_t > key_t).any()))
        if not (is_long or looks_ahead):
            return None
        sees_tt = (key_t >= first_t[:, None]) & (key_t <= last_t[:, None])
        return torch.zeros(tokens, tokens, dtype=dtype, device=key_t.device).masked_fill_(
            ~sees_tt, float("-inf")
        )

    @functools.cached_property
    def blocks(self) -> Any:
        """The blocks of keys that each block of queries reads: a `BlockMask` for `flex_attention`.

        It is computed from `first_T` and `last_T` without a square of all tokens: those that the queries of a
        block see are one run of keys, since each sees itself.
        """
        from torch.nn.attention.flex_attention import BlockMask

        count = self.first_T.shape[0]
        num_blocks = -(-count // BLOCK)
        padding = num_blocks * BLOCK - count
        first_bq = F.pad(self.first_T, (0, padding), value=count).view(num_blocks, BLOCK)
        last_bq = F.pad(self.last_T, (0, padding), value=-1).view(num_blocks, BLOCK)
        low_k = torch.arange(num_blocks, device=first_bq.device) * BLOCK
        high_k = low_k + BLOCK - 1
        is_read_bk = (high_k >= first_bq.amin(1)[:, None]) & (low_k <= last_bq.amax(1)[:, None])
        # Of a padded block `first` is behind all keys and `last` before them: it is never read whole.
        is_whole_bk = (low_k >= first_bq.amax(1)[:, None]) & (high_k <= last_bq.amin(1)[:, None])
        return BlockMask.from_kv_blocks(
            *_listed(is_read_bk & ~is_whole_bk),
            *_listed(is_whole_bk),
            BLOCK_SIZE=BLOCK,
            mask_mod=sees(self.first_T, self.last_T),
            seq_lengths=(count, count),
        )

    def attend(
        self,
        query_1HTd: torch.Tensor,
        key_1GTd: torch.Tensor,
        value_1GTd: torch.Tensor,
        scaling: float | None,
        dropout: float = 0.0,
    ) -> torch.Tensor:
        """Attention of all samples.

        Args:
            query_1HTd: [1, H, T, d].
            key_1GTd: [1, G, T, d].
            value_1GTd: [1, G, T, d].
            scaling: factor on the scores; None is 1 / sqrt(d).
            dropout: probability of dropping an attention weight.

        Returns:
            out_1THd: [1, T, H, d].
        """
        states = (query_1HTd, key_1GTd, value_1GTd)
        if packing.uses_varlen(query_1HTd, dropout):
            if not self.has_pictures and packing.takes_windows():
                return packing.attend_packed(
                    *states, self.cu_seqlens, self.segment_tokens, scaling, window=self.window
                )
            return self.attend_blocks(*states, scaling, _compiled_flex())
        parts = zip(
            *(tensor.split(self.segment_tokens, dim=2) for tensor in states),
            self.masks(query_1HTd.dtype),
            strict=True,
        )
        outputs = [
            packing.attend_segment(q, k, v, scaling, dropout, mask is None, mask).transpose(1, 2)
            for q, k, v, mask in parts
        ]
        return outputs[0] if len(outputs) == 1 else torch.cat(outputs, dim=1)

    def attend_blocks(
        self,
        query_1HTd: torch.Tensor,
        key_1GTd: torch.Tensor,
        value_1GTd: torch.Tensor,
        scaling: float | None,
        flex: Callable[..., Any],
    ) -> torch.Tensor:
        """As `attend`, in one call that leaves out blocks which nobody sees.

        Args:
            query_1HTd: as there.
            key_1GTd: as there.
            value_1GTd: as there.
            scaling: as there.
            flex: `flex_attention`, compiled or not.

        Returns:
            out_1THd.
        """
        grouped = query_1HTd.shape[1] != key_1GTd.shape[1]
        out_1HTd = flex(
            query_1HTd, key_1GTd, value_1GTd, block_mask=self.blocks, scale=scaling, enable_gqa=grouped
        )
        return out_1HTd.transpose(1, 2)


def sees(first_T: torch.Tensor, last_T: torch.Tensor) -> Callable[..., torch.Tensor]:
    """The mask as `flex_attention` asks for it.

    Args:
        first_T: the first token that each sees.
        last_T: the last.

    Returns:
        (batch, head, query, key) -> whether the query sees the key.
    """

    def mask_mod(
        batch: torch.Tensor, head: torch.Tensor, query: torch.Tensor, key: torch.Tensor
    ) -> torch.Tensor:
        del batch, head
        return (key >= first_T[query]) & (key <= last_T[query])

    return mask_mod


def sights(
    windows: Iterable[int | None],
    feature_mask_T: torch.Tensor,
    cu_seqlens: torch.Tensor,
    segment_tokens: Sequence[int],
    has_pictures: bool,
    whole: Container[int | None] | None = None,
) -> dict[int | None, Sight]:
    """What each kind of layers sees.

    Args:
        windows: of the layers, in any order; None: all tokens up to itself.
        feature_mask_T: true at places of features.
        cu_seqlens: [M + 1] int32.
        segment_tokens: its differences, so that nothing is read from the device.
        has_pictures: whether there is a feature, likewise.
        whole: windows of the layers that see pictures whole; None: all of them do.

    Returns:
        By window.
    """
    count, device = feature_mask_T.shape[0], feature_mask_T.device
    token_T = torch.arange(count, device=device)
    bounds = cu_seqlens.to(torch.int64)
    begin_T = torch.repeat_interleave(bounds[:-1], bounds.diff(), output_size=count)
    ahead_T = token_T
    if has_pictures:
        # A token that another of its picture follows sees as far as that one.
        is_followed_T = feature_mask_T[:-1] & feature_mask_T[1:] & (begin_T[:-1] == begin_T[1:])
        ends_T = token_T.masked_fill(F.pad(is_followed_T, (0, 1)), count)
        ahead_T = ends_T.flip(0).cummin(0).values.flip(0)
    found: dict[int | None, Sight] = {}
    for window in set(windows):
        first_T = begin_T if window is None else torch.maximum(begin_T, token_T - window + 1)
        looks_ahead = has_pictures and (whole is None or window in whole)
        last_T = ahead_T if looks_ahead else token_T
        found[window] = Sight(first_T, last_T, cu_seqlens, segment_tokens, window, looks_ahead)
    return found


def picture_places(segments: Sequence[int], picture_tokens: int | None, device: torch.device) -> torch.Tensor:
    """Places of features in samples of usual pictures, to measure with: three of four tokens are features.

    Args:
        segments: tokens of each sample.
        picture_tokens: features of a picture; None: there are no pictures.
        device: of the result.

    Returns:
        [T] bool. Text of a third of a picture's length stands between pictures; the last may be cut off.
    """
    token_T = torch.cat([torch.arange(tokens) for tokens in segments]).to(device)
    if picture_tokens is None:
        return torch.zeros_like(token_T, dtype=torch.bool)
    return token_T % -(-picture_tokens * 4 // 3) < picture_tokens


@functools.cache
def _compiled_flex() -> Callable[..., Any]:
    from torch.nn.attention.flex_attention import flex_attention

    return torch.compile(flex_attention)


def _listed(is_read_bk: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """For each block of queries the number of blocks of keys, and these first in a list of all: int32."""
    counts = is_read_bk.sum(1, dtype=torch.int32)
    listed = is_read_bk.to(torch.int8).argsort(dim=1, descending=True, stable=True).to(torch.int32)
    return counts[None, None], listed[None, None].contiguous()
