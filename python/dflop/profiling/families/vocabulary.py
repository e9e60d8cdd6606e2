"""Embedding and head with the vocabulary cut over the ranks, as Megatron has it.

    ids --> own rows, zeros for the others' ids --(sum)--> embedded
    hidden --(entry)--> own logits --> largest, sum of exponentials, target's --(each over all ranks)--> loss

Ids, hidden states and targets are the same on all ranks.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, cast

import torch
import torch.distributed as dist
from torch import nn

from dflop.profiling.families.shards import Sum

if TYPE_CHECKING:
    from dflop.profiling.families.shards import Sums


def cut_vocabulary(module: nn.Module, degree: int, rank: int = 0) -> None:
    """Leaves of an embedding or a head the rows of one rank; the last rank has what is left.

    Args:
        module: `nn.Embedding` or `nn.Linear`, changed in place.
        degree: ranks.
        rank: whose rows.
    """
    if degree == 1:
        return
    owner = cast("Any", module)
    weight: torch.Tensor = owner.weight
    rows = -(-weight.shape[0] // degree)
    own = weight.detach()[rank * rows : (rank + 1) * rows].contiguous()
    owner.weight = nn.Parameter(own, requires_grad=weight.requires_grad)
    if isinstance(module, nn.Embedding):
        module.num_embeddings, module.padding_idx = own.shape[0], None
    else:
        owner.out_features = own.shape[0]


def _own(ids: torch.Tensor, rows: int, sums: Sums) -> tuple[torch.Tensor, torch.Tensor]:
    """(which ids are of this rank's rows, the ids counted from the first of them, 0 for others)."""
    local = ids - sums.rank * rows
    is_own = (local >= 0) & (local < rows)
    return is_own, local.masked_fill(~is_own, 0)


def embed_cut(embedding: nn.Module, ids_T: torch.Tensor, sums: Sums) -> torch.Tensor:
    """What the whole embedding gives.

    Args:
        embedding: this rank's rows; every rank has as many.
        ids_T: the same on all ranks.
        sums: over the ranks.

    Returns:
        [T, D].
    """
    is_own_T, local_T = _own(ids_T, cast("nn.Embedding", embedding).num_embeddings, sums)
    return Sum.apply(embedding(local_T).masked_fill(~is_own_T[:, None], 0), sums)


class CutEmbedding(nn.Module):
    """One rank's rows of an embedding, in the place of the whole one."""

    def __init__(self, rows: nn.Module) -> None:
        super().__init__()
        self.rows = rows
        # As in `LlmEmbedding`.
        self.vocabulary_sums: Sums | None = None

    def forward(self, ids_T: torch.Tensor) -> torch.Tensor:
        """Embedded ids.

        Args:
            ids_T: of this rank's rows alone, unless the ranks give the whole together.

        Returns:
            [T, D].
        """
        sums = self.vocabulary_sums
        return self.rows(ids_T) if sums is None else embed_cut(self.rows, ids_T, sums)


def cross_entropy_cut(logits_KV: torch.Tensor, targets_K: torch.Tensor, sums: Sums) -> torch.Tensor:
    """Sum of the cross entropy over the whole vocabulary.

    Args:
        logits_KV: of this rank's rows, float32; every rank has as many.
        targets_K: the same on all ranks.
        sums: over the ranks.

    Returns:
        A scalar, the same on all ranks.
    """
    largest_K1 = logits_KV.detach().amax(dim=1, keepdim=True)
    sums.add(largest_K1, dist.ReduceOp.MAX)
    shifted_KV = logits_KV - largest_K1
    is_own_K, local_K = _own(targets_K, logits_KV.shape[1], sums)
    of_target_K = shifted_KV.gather(1, local_K[:, None])[:, 0].masked_fill(~is_own_K, 0)
    # Summands of their own: `Sum` works in place.
    sums_K = Sum.apply(shifted_KV.exp().sum(dim=1), sums)
    return (sums_K.log() - Sum.apply(of_target_K, sums)).sum()
