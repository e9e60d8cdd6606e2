"""Samples as tensors: tokens by the native module.

    index --Dataset.encode--> EncodedSample --> Sample (token tensors, media)            every rank

`loader.py` has what becomes of their media.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from dflop._native import ProfileError
from dflop.data.sample import Sample
from dflop.models.adapter import MediaGrid

if TYPE_CHECKING:
    from dflop._native import EncodedSample
    from dflop.models.adapter import ModelAdapter

IGNORED_LABEL = -100
"""A position without loss, as PyTorch's cross entropy has it."""


def sample_from_encoded(index: int, encoded: EncodedSample, adapter: ModelAdapter) -> Sample:
    """The sample as tensors, with labels moved to the position that predicts them.

    Args:
        index: Position in the data profile.
        encoded: What the native module made of it.
        adapter: Knows its positions.

    Returns:
        The sample, on the CPU.

    Raises:
        ProfileError: Lists of unequal length, features that do not fill the mask, or loss on the first token;
            the message names the sample.
    """
    ids, mask, labels = encoded.input_ids, encoded.feature_mask, encoded.labels
    name = f"sample `{encoded.id}` ({index})"
    if not len(ids) == len(mask) == len(labels) or not ids:
        counts = f"{len(ids)} ids, {len(mask)} mask entries, {len(labels)} labels"
        message = f"{name}: {counts}, must be equal and above 0"
        raise ProfileError(message)
    media = tuple(
        MediaGrid(
            m.kind,
            m.num_tiles,
            m.height,
            m.width,
            m.num_features,
            patches=m.patches,
            first_patches=m.first_patches,
            last_patches=m.last_patches,
            last_segment_tokens=m.last_segment_tokens,
            sampled_fps=m.sampled_fps,
        )
        for m in encoded.media
    )
    num_features = sum(m.num_features for m in media)
    if num_features != sum(mask):
        message = f"{name}: its media fill {num_features} LLM tokens, its feature mask has {sum(mask)} places"
        raise ProfileError(message)
    if labels[0] != IGNORED_LABEL:
        # The profile counts it as a label token, yet no position predicts it: the loss would be too small.
        message = f"{name}: its first token carries loss, no position can predict it"
        raise ProfileError(message)
    input_ids_T = torch.tensor(ids, dtype=torch.int64)
    feature_mask_T = torch.tensor(mask, dtype=torch.bool)
    try:
        positions_T = adapter.positions(input_ids_T, feature_mask_T, media)
    except ValueError as error:
        message = f"{name}: {error}"
        raise ProfileError(message) from error
    return Sample(
        index=index,
        id=encoded.id,
        input_ids_T=input_ids_T,
        feature_mask_T=feature_mask_T,
        targets_T=torch.tensor([*labels[1:], IGNORED_LABEL], dtype=torch.int64),
        positions_T=positions_T,
        media=media,
        files=tuple(encoded.media),
        num_features=num_features,
        parts=tuple(tuple(m.parts) for m in encoded.media),
    )
