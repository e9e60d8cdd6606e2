"""The loss that does not depend on which rank holds which sample.

Buckets hold unequal numbers of samples and of label tokens. The mean over each bucket would give the tokens
of small buckets too much weight. So the loss is summed over a bucket and divided by the label tokens of the
whole global batch. Where gradients are averaged over ranks (DDP, FSDP), it is multiplied by their number.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import distributed
from torch.nn import functional as F

if TYPE_CHECKING:
    from collections.abc import Iterable

    from torch.distributed import ProcessGroup

_IGNORED = -100
"""The label that carries no loss, as all of Hugging Face writes it."""


def num_label_tokens(
    labels: torch.Tensor | Iterable[torch.Tensor],
    group: ProcessGroup | None = None,
    *,
    is_shifted: bool = False,
) -> torch.Tensor:
    """Label tokens of a global batch, as a tensor on the device of the labels.

    Every rank of `group` must call it, once a step: it sums one number over them.

    Args:
        labels: [..., T] of this rank's microbatch, or those of all its microbatches of the step; -100 carries
            no loss.
        group: the data-parallel ranks; None: all, or none where `torch.distributed` is not used.
        is_shifted: the labels stand already at the position that predicts them; otherwise the first of each
            row is predicted by none and does not count.

    Returns:
        A number, int64.
    """
    parts = [labels] if isinstance(labels, torch.Tensor) else list(labels)
    counts = [(part if is_shifted else part[..., 1:]).ne(_IGNORED).sum() for part in parts]
    total = torch.stack(counts).sum()
    if distributed.is_available() and distributed.is_initialized():
        distributed.all_reduce(total, group=group)
    return total


def token_loss(
    logits: torch.Tensor,
    labels: torch.Tensor,
    num_tokens: torch.Tensor | int,
    num_ranks: int = 1,
    *,
    is_shifted: bool = False,
) -> torch.Tensor:
    """Cross entropy of a microbatch as its part of the mean over the label tokens of the global batch.

    Args:
        logits: [..., T, V].
        labels: [..., T].
        num_tokens: of `num_label_tokens`.
        num_ranks: how many ranks' gradients are averaged afterwards; 1 where they are summed.
        is_shifted: as for `num_label_tokens`.

    Returns:
        A number, float32. Summed over microbatches and averaged over ranks it is the global batch's loss.
    """
    if not is_shifted:
        logits, labels = logits[..., :-1, :], labels[..., 1:]
    flat: Any = logits.reshape(-1, logits.shape[-1]).float()
    total = F.cross_entropy(flat, labels.reshape(-1).to(flat.device), ignore_index=_IGNORED, reduction="sum")
    return total * num_ranks / num_tokens
