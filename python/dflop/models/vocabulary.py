"""Embedding and head with the vocabulary cut over the ranks, as Megatron has it.

    ids --> own rows, zeros for the others' ids --(sum)--> embedded
    hidden --(entry)--> own logits --> maximum, sum of exp, target's logit --(each over all ranks)--> loss

Ids, hidden states and targets are the same on all ranks. Where the vocabulary does not divide, the last rank
has fewer rows.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, cast

import torch
import torch.distributed as dist
from torch import nn

from dflop.models.errors import profile_error
from dflop.models.tensor import Slice, Sum, own_rows, take_slice

if TYPE_CHECKING:
    from dflop.models.sums import Sums


def cut_vocabulary(module: nn.Module, degree: int, rank: int = 0) -> None:
    """Reduces an embedding or a head to the rows of one rank; the last rank has what is left.

    Args:
        module: `nn.Embedding` or `nn.Linear`, changed in place.
        degree: ranks.
        rank: whose rows.

    Raises:
        ProfileError: a rank would have no row.
    """
    if degree == 1:
        return
    owner = cast("Any", module)
    shape = tuple(owner.weight.shape)
    rows = -(-shape[0] // degree)
    if rows * (degree - 1) >= shape[0]:
        message = (
            f"`text_config.vocab_size` is {shape[0]}, in parts of {rows} there is none left for the last of "
            f"{degree} ranks, must be more than {rows * (degree - 1)} with tensor parallel degree {degree}"
        )
        raise profile_error(message)
    first = rank * rows
    count = min(rows, shape[0] - first)
    take_slice(module, "weight", Slice(0, shape, ((first, count),)))
    owner.first_row = first
    if isinstance(module, nn.Embedding):
        padding = module.padding_idx
        is_own = padding is not None and first <= padding < first + count
        module.num_embeddings = count
        module.padding_idx = padding - first if is_own and padding is not None else None
    else:
        owner.out_features = count
        if owner.bias is not None:
            take_slice(module, "bias", Slice(0, shape[:1], ((first, count),)))


def cross_entropy_cut(
    logits_KV: torch.Tensor, targets_K: torch.Tensor, head: nn.Module, sums: Sums
) -> torch.Tensor:
    """The cross entropy of each row over the whole vocabulary.

    Args:
        logits_KV: of this rank's rows of the vocabulary, float32.
        targets_K: the same on all ranks.
        head: as `cut_vocabulary` left it.
        sums: over the ranks.

    Returns:
        [K], the same on all ranks.
    """
    largest_K1 = logits_KV.detach().amax(dim=1, keepdim=True)
    sums.add(largest_K1, dist.ReduceOp.MAX)
    shifted_KV = logits_KV - largest_K1
    is_own_K, local_K = own_rows(targets_K, head)
    of_target_K = shifted_KV.gather(1, local_K[:, None])[:, 0].masked_fill(~is_own_K, 0)
    # `Sum` works in place, so both sums are given new tensors.
    sums_K = Sum.apply(shifted_KV.exp().sum(dim=1), sums)
    return sums_K.log() - Sum.apply(of_target_K, sums)
