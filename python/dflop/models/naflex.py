"""SigLIP 2's tower for pictures of any size (NaFlex), and a projector of neighbouring patches.

    patches_NC --linear, positions--> hidden_NV --layers--> hidden_NV --norm, unshuffle, MLP--> features_ED

A tile, a thumbnail or a picture that is not cut is a segment, and attention stays within it. The table of
learnt positions is scaled to the size of each. Shape letters: see `models/adapter.py`; C values of a patch, V
width of the encoder, T patches. An input is one encoder token.
"""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any

import torch

from dflop.models.patch_layout import sent
from dflop.models.patches import Bounds, bounds_of_patches

if TYPE_CHECKING:
    from collections.abc import Sequence

Sides = tuple[int, int]
"""Rows and columns of patches of a segment."""


def embed(embeddings: Any, patches_NC: torch.Tensor, segments: Sequence[Sides]) -> torch.Tensor:
    """Hidden states before the first layer.

    Args:
        embeddings: Hugging Face's.
        patches_NC: pixels of each patch, row by row, segment after segment.
        segments: sides of each.

    Returns:
        hidden_NV.
    """
    hidden_NV = embeddings.patch_embedding(patches_NC)
    table = embeddings.position_embedding.weight
    side = embeddings.position_embedding_size
    table_SSV = table.reshape(side, side, -1)

    def scaled(sides: Sides) -> torch.Tensor:
        # On the host, whatever device is the default one: transformers before 5.24 asks for the numbers.
        shapes = torch.tensor([sides], device="cpu")
        return embeddings.resize_positional_embeddings(table_SSV, shapes, sides[0] * sides[1])[0]

    # Tiles have one size, so most segments share what is computed here.
    by_sides = {sides: scaled(sides) for sides in dict.fromkeys(segments)}
    return hidden_NV + torch.cat([by_sides[sides] for sides in segments])


def bounds_of(segments: Sequence[Sides], device: torch.device) -> Bounds:
    """Who sees whom.

    Args:
        segments: sides of each.
        device: of the tensors.

    Returns:
        Bounds without angles.
    """
    return bounds_of_patches([rows * columns for rows, columns in segments], (), device)


def run_layer(layer: Any, hidden_TV: torch.Tensor, bounds: Bounds) -> torch.Tensor:
    """One layer of the encoder.

    Args:
        layer: Hugging Face's, with the attention function `PACKED_BY_MASK`.
        hidden_TV: before it.
        bounds: of the segments.

    Returns:
        hidden_TV after it.
    """
    return layer(hidden_TV[None], bounds)[0]


def project(
    last_norm: Any, projector: Any, hidden_NV: torch.Tensor, segments: Sequence[Sides]
) -> torch.Tensor:
    """Features of all segments, one after the other.

    Args:
        last_norm: of Hugging Face's tower.
        projector: Hugging Face's.
        hidden_NV: after the last layer.
        segments: sides of each.

    Returns:
        features_ED.
    """
    order_T = sent(_by_feature(tuple(segments), projector.factor), hidden_NV.device)
    cells_EW = last_norm(hidden_NV)[order_T].reshape(-1, projector.linear_1.in_features)
    if projector.use_layer_norm:
        cells_EW = projector.layer_norm(cells_EW)
    return projector.linear_2(projector.act(projector.linear_1(cells_EW)))


# Cached: recomputation in a backward needs the same microbatch again.
@functools.lru_cache(maxsize=16)
def _by_feature(segments: tuple[Sides, ...], factor: int) -> torch.Tensor:
    """Patches feature by feature, in the order of the projector's `pixel_unshuffle`."""
    orders, first = [], 0
    for rows, columns in segments:
        places = torch.arange(first, first + rows * columns)
        cells = places.view(rows // factor, factor, columns // factor, factor)
        orders.append(cells.transpose(1, 2).flatten())
        first += rows * columns
    return torch.cat(orders)
