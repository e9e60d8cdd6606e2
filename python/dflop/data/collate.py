"""Samples packed into the tensors of one microbatch; no padding anywhere.

    [Sample]               --llm_input-->     LlmInput: ids, mask, positions, targets [T]; cu_seqlens [M + 1]
    [SampleShare], [tiles] --encoder_input--> EncoderInput: inputs_N, media
    [SampleShare]          --sizes_alone-->   EncoderInput: the same without values, which another rank sends

Shape letters as in `models/adapter.py`: N inputs of the encoder, T LLM tokens of all samples, M samples.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from dflop.models.adapter import EncoderInput, LlmInput

if TYPE_CHECKING:
    from collections.abc import Sequence

    from dflop.data.sample import Sample
    from dflop.data.shares import SampleShare


def llm_input(samples: Sequence[Sample]) -> LlmInput:
    """The samples one after the other, as every LLM stage sees them; on the CPU.

    Positions are each sample's own, from 0, and so is the next-token shift: a sample's last position has no
    target, so no sample is asked for its neighbour's first token.

    Args:
        samples: In packing order; at least one.

    Returns:
        The packed batch.
    """
    lengths = torch.tensor([0, *(s.num_tokens for s in samples)], dtype=torch.int64)
    return LlmInput(
        input_ids_T=torch.cat([s.input_ids_T for s in samples]),
        feature_mask_T=torch.cat([s.feature_mask_T for s in samples]),
        positions_T=torch.cat([s.positions_T for s in samples], dim=-1),
        cu_seqlens=lengths.cumsum(0).to(torch.int32),
        targets_T=torch.cat([s.targets_T for s in samples]),
    )


def encoder_input(
    shares: Sequence[SampleShare], tiles: Sequence[torch.Tensor], dtype: torch.dtype
) -> EncoderInput:
    """What the encoder reads of the shares, one after the other; on the CPU.

    Args:
        shares: In packing order; at least one, each with media.
        tiles: All inputs of each share, [n, *input_shape]: tiles, patches or windows of sound; none where
            this rank runs later layers alone.
        dtype: Of the model.

    Returns:
        The packed batch.

    Raises:
        ValueError: A share has another number of inputs than its media say; the message names the sample.
    """
    for share, share_tiles in zip(shares, tiles, strict=True) if tiles else ():
        if share_tiles.shape[0] != share.num_inputs:
            name, found = f"sample `{share.sample.id}` ({share.sample.index})", share_tiles.shape[0]
            message = f"{name}: {found} inputs of the encoder, its media have {share.num_inputs}"
            raise ValueError(message)
    return EncoderInput(
        inputs_N=torch.cat(list(tiles)).to(dtype) if tiles else torch.empty(0, dtype=dtype),
        media=[run.grid for share in shares for run in share.runs],
    )


def sizes_alone(
    shares: Sequence[SampleShare], input_shape: Sequence[int], dtype: torch.dtype
) -> EncoderInput:
    """What the encoder reads of the shares, where another rank has packed the values and will send them.

    Args:
        shares: In packing order; at least one, each with media.
        input_shape: Tensor shape of one input.
        dtype: Of the model.

    Returns:
        As `encoder_input`, with inputs on the meta device: they have a tensor shape and no memory.
    """
    num_inputs = sum(share.num_inputs for share in shares)
    return EncoderInput(
        inputs_N=torch.empty(num_inputs, *input_shape, dtype=dtype, device="meta"),
        media=[run.grid for share in shares for run in share.runs],
    )
