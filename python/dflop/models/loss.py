"""The loss without the logits of a whole pack: rows in chunks, whose logits the backward computes again.

hidden rows [K, D] --chunk of rows--> logits [rows, V] --float32--> cross entropies; the logits are freed

K rows of a vocabulary of 152,064 are 0.6 MB of logits each in float32, and their gradient as much. One more
product with the head for each chunk is the price; a pack that fits one chunk pays nothing.

PyTorch's `linear_cross_entropy` in chunks is no substitute (2.15, measured 2026-11): in bfloat16 it also sums
the loss in bfloat16, 5 % off over 3,000 rows, and from forward to backward it holds a gradient of the head's
size for each microbatch in flight.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch.utils.checkpoint import checkpoint

from dflop.models.tensor import Enter
from dflop.models.vocabulary import cross_entropy_cut

if TYPE_CHECKING:
    from torch import nn

    from dflop.models.sums import Sums

LOGITS_BYTES_MAX = 256 << 20
"""Of the logits of a chunk in float32: 441 rows of the largest usual vocabulary, enough to fill a GPU."""


def summed_cross_entropy(head: nn.Module, hidden_KD: torch.Tensor, targets_K: torch.Tensor) -> torch.Tensor:
    """The cross entropy of all rows, summed.

    Args:
        head: Gives logits [K, V] of hidden rows [K, D]; a linear map. Of a rank's part of the vocabulary,
            where it is cut: the ranks then find the loss together.
        hidden_KD: [K, D], after the final norm, the rows with a target.
        targets_K: [K] int64, ids.

    Returns:
        A float32 scalar; 0 for no rows.
    """
    return cross_entropy_rows(head, hidden_KD, targets_K).sum()


def cross_entropy_rows(head: nn.Module, hidden_KD: torch.Tensor, targets_K: torch.Tensor) -> torch.Tensor:
    """The cross entropy of each row; training takes their sum.

    Args:
        head: Gives logits [K, V] of hidden rows [K, D]; a linear map. Of a rank's part of the vocabulary,
            where it is cut: the ranks then find the losses together, and each of them has all.
        hidden_KD: [K, D], after the final norm, the rows with a target.
        targets_K: [K] int64, ids.

    Returns:
        [K] float32.
    """
    sums: Sums | None = getattr(head, "vocabulary_sums", None)
    if sums is not None:
        # The gradient of what all ranks read is the sum of theirs.
        hidden_KD = Enter.apply(hidden_KD, sums)

    def of_logits(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        if sums is not None:
            return cross_entropy_cut(logits.float(), targets, head, sums)
        return F.cross_entropy(logits.float(), targets, reduction="none")

    vocab_size = int(head.weight.shape[0])  # pyright: ignore[reportIndexIssue, reportArgumentType, reportOptionalSubscript]
    num_rows = max(1, LOGITS_BYTES_MAX // (4 * vocab_size))

    def of_chunk(rows: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        # Past the module: a backward in two parts would keep the gradients of all logits until the second.
        logits = F.linear(rows, head.weight, head.bias)  # pyright: ignore[reportArgumentType]
        return of_logits(logits, targets)

    if hidden_KD.shape[0] <= num_rows:
        return of_logits(head(hidden_KD), targets_K)
    chunks = zip(hidden_KD.split(num_rows), targets_K.split(num_rows), strict=True)
    losses = [checkpoint(of_chunk, *chunk, use_reentrant=False, preserve_rng_state=False) for chunk in chunks]
    return torch.cat(losses)
