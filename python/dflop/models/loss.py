"""The loss, without keeping the logits of a whole pack: the backward computes them again, chunk by chunk.

hidden rows [K, D] --chunk of rows--> logits [rows, V] --float32--> cross entropies; the logits are freed

With a vocabulary of 152,064, the logits of one row are 0.6 MB in float32, and their gradient is as large. The
price of chunks is one more product with the head for each chunk. A pack that fits one chunk pays nothing.

PyTorch's `linear_cross_entropy` works in chunks too, but cannot be used (2.15, measured 2026-11). In bfloat16
it also sums the loss in bfloat16, which was 5 % wrong over 3,000 rows. And for each microbatch in flight it
holds a gradient as large as the head, from the forward to the backward.
"""

from __future__ import annotations

from types import MethodType
from typing import TYPE_CHECKING, Any, cast

import torch
import torch.nn.functional as F
from torch.distributed.fsdp import register_fsdp_forward_method
from torch.utils.checkpoint import checkpoint

from dflop.models.tensor import Enter
from dflop.models.vocabulary import cross_entropy_cut

if TYPE_CHECKING:
    from torch import nn

    from dflop.models.sums import Sums

LOGITS_BYTES_MAX = {"cpu": 256 << 20, "cuda": 1 << 30}
"""Bytes of the float32 logits of a chunk, by device. On a GPU 1,765 rows of the largest usual vocabulary:
each chunk adds a gradient as large as the head, which takes 3 ms for 545 million parameters on an H100."""


_LOSSES = "losses_of_rows"


def gather_for_loss(head: nn.Module) -> None:
    """Makes FSDP2 gather a head before its loss, and reduce its gradient behind the loss of all chunks.

    The loss reads the head's matrix itself, so that FSDP2's hooks around a call of the head are not enough.

    Args:
        head: that `fully_shard` has cut alone; changed in place.
    """
    setattr(head, _LOSSES, MethodType(_losses, head))
    register_fsdp_forward_method(head, _LOSSES)


def cap_logits(head: nn.Module, cap: float | None) -> None:
    """Makes the loss cap the logits of a head, as Gemma 4 does.

    Args:
        head: changed in place.
        cap: no logit is above it: `cap * tanh(logit / cap)`; None: they stay as they are.
    """
    cast("Any", head).logit_cap = cap


def capped(head: nn.Module, logits: torch.Tensor) -> torch.Tensor:
    """Logits in float32 as the loss takes them.

    Args:
        head: that made them.
        logits: of any dtype.

    Returns:
        As many, capped where `cap_logits` says so.
    """
    cap: float | None = getattr(head, "logit_cap", None)
    wide = logits.float()
    return wide if cap is None else cap * torch.tanh(wide / cap)


def summed_cross_entropy(head: nn.Module, hidden_KD: torch.Tensor, targets_K: torch.Tensor) -> torch.Tensor:
    """The cross entropy of all rows, summed.

    Args:
        head: Linear map from hidden rows [K, D] to logits [K, V]. Where the vocabulary is cut it gives this
            rank's part of the logits, and the ranks compute the loss together.
        hidden_KD: [K, D], after the final norm, the rows with a target.
        targets_K: [K] int64, ids.

    Returns:
        A float32 scalar; 0 for no rows.
    """
    return cross_entropy_rows(head, hidden_KD, targets_K).sum()


def cross_entropy_rows(head: nn.Module, hidden_KD: torch.Tensor, targets_K: torch.Tensor) -> torch.Tensor:
    """The cross entropy of each row; training takes their sum.

    Args:
        head: Linear map from hidden rows [K, D] to logits [K, V]. Where the vocabulary is cut it gives this
            rank's part of the logits, the ranks compute the losses together, and each gets all of them.
        hidden_KD: [K, D], after the final norm, the rows with a target.
        targets_K: [K] int64, ids.

    Returns:
        [K] float32.
    """
    of_gathered = getattr(head, _LOSSES, None)
    return _losses(head, hidden_KD, targets_K) if of_gathered is None else of_gathered(hidden_KD, targets_K)


def _losses(head: nn.Module, hidden_KD: torch.Tensor, targets_K: torch.Tensor) -> torch.Tensor:
    """As `cross_entropy_rows`, with a head that is whole (or this rank's part of it)."""
    sums: Sums | None = getattr(head, "vocabulary_sums", None)
    if sums is not None:
        # All ranks read these rows for their parts of the vocabulary: the gradient is the sum over the ranks.
        hidden_KD = Enter.apply(hidden_KD, sums)

    def of_logits(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        if sums is not None:
            return cross_entropy_cut(capped(head, logits), targets, head, sums)
        return F.cross_entropy(capped(head, logits), targets, reduction="none")

    vocab_size = int(head.weight.shape[0])  # pyright: ignore[reportIndexIssue, reportArgumentType, reportOptionalSubscript]
    chunk_bytes = LOGITS_BYTES_MAX["cuda" if hidden_KD.is_cuda else "cpu"]
    num_rows = max(1, chunk_bytes // (4 * vocab_size))

    def of_chunk(rows: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        # Not called as a module: a split backward (I, W) would then keep the gradients of all logits until W,
        # and FSDP2 would free the head that it has gathered for all chunks.
        logits = F.linear(rows, head.weight, head.bias)  # pyright: ignore[reportArgumentType]
        return of_logits(logits, targets)

    if hidden_KD.shape[0] <= num_rows:
        return (
            of_chunk(hidden_KD, targets_K)
            if hasattr(head, _LOSSES)
            else of_logits(head(hidden_KD), targets_K)
        )
    chunks = zip(hidden_KD.split(num_rows), targets_K.split(num_rows), strict=True)
    losses = [checkpoint(of_chunk, *chunk, use_reentrant=False, preserve_rng_state=False) for chunk in chunks]
    return torch.cat(losses)
