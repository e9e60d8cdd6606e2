"""Samples packed into the tensors of one microbatch; no padding anywhere.

    [Sample]          --llm_input-->     LlmInput: ids, mask, positions, targets [T]; cu_seqlens [M + 1]
    [Sample], [tiles] --encoder_input--> EncoderInput: pixels_NCHW, media

Shape letters as in `models/adapter.py`: N tiles, T LLM tokens of all samples, M samples.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from dflop.models.adapter import EncoderInput, LlmInput

if TYPE_CHECKING:
    from collections.abc import Sequence

    from dflop.data.dataset import Sample


def llm_input(samples: Sequence[Sample]) -> LlmInput:
    """The samples one after the other, as every LLM stage sees them; on the CPU.

    Positions restart with each sample, and so does the next-token shift: a sample's last position has no
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
        positions_T=torch.cat([torch.arange(s.num_tokens) for s in samples]),
        cu_seqlens=lengths.cumsum(0).to(torch.int32),
        targets_T=torch.cat([s.targets_T for s in samples]),
    )


def encoder_input(
    samples: Sequence[Sample], tiles: Sequence[torch.Tensor], dtype: torch.dtype
) -> EncoderInput:
    """The tiles of the samples one after the other, as the encoder reads them; on the CPU.

    Args:
        samples: In packing order; at least one, each with media.
        tiles: All tiles of each sample, [n, 3, S, S].
        dtype: Of the model.

    Returns:
        The packed batch.

    Raises:
        ValueError: A sample has another number of tiles than its media say; the message names it.
    """
    for sample, sample_tiles in zip(samples, tiles, strict=True):
        expected = sum(m.num_tiles for m in sample.media)
        if sample_tiles.shape[0] != expected:
            name, found = f"sample `{sample.id}` ({sample.index})", sample_tiles.shape[0]
            message = f"{name}: {found} tiles, its media have {expected}"
            raise ValueError(message)
    return EncoderInput(
        pixels_NCHW=torch.cat(list(tiles)).to(dtype),
        media=[media for sample in samples for media in sample.media],
    )
