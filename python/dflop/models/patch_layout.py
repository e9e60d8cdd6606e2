"""Where the patches of pictures lie: positions, order, segments, and what learnt positions are near.

Computed on the host by Hugging Face's functions, once a microbatch. Shape letters: see `adapter.py`; T
patches.
"""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch
from transformers.vision_utils import (
    get_vision_interpolation_indices_and_weights,
    get_vision_position_ids,
    get_vision_window_index,
)

if TYPE_CHECKING:
    from collections.abc import Sequence


@dataclass(frozen=True)
class Geometry:
    """How pictures are cut."""

    merge: int
    """Patches along each side of the square that becomes one feature."""
    patch_size: int
    """Side of a patch, in pixels."""
    window_size: int | None
    """Side of a window, in pixels; None where the layers have none."""
    grid_side: int | None = None
    """Rows, and columns, of the grid of learnt positions; None where positions are only rotations."""
    is_bicubic: bool = False
    """Whether a learnt position is of sixteen of the grid, at `Patches.points_T2`, not of four."""

    @property
    def feature_patches(self) -> int:
        """How many patches become one feature."""
        return self.merge**2

    @property
    def window_side(self) -> int:
        """Patches along a side of a full window."""
        assert self.window_size is not None, "asked for where there are windows"
        return self.window_size // self.merge // self.patch_size * self.merge

    def square(self, tokens: int) -> tuple[int, int, int]:
        """A picture with so many patches, as close to a square as possible.

        Args:
            tokens: a multiple of `feature_patches`.

        Returns:
            (1, rows, columns) in patches.
        """
        cells = tokens // self.feature_patches
        rows = next(rows for rows in range(math.isqrt(cells), 0, -1) if cells % rows == 0)
        return (1, rows * self.merge, cells // rows * self.merge)


@dataclass(frozen=True)
class Patches:
    """Where the patches of a microbatch lie."""

    positions_T2: torch.Tensor
    """Row and column of each patch."""
    order: torch.Tensor | None
    """Indices of features, sorted by window; None: there are no windows, and features keep their order."""
    segments: tuple[int, ...]
    """Patches of each picture or frame pair."""
    windows: tuple[int, ...]
    """Patches of each window."""
    places_T4: torch.Tensor | None = None
    """The four learnt positions next to each patch; None: positions are not learnt."""
    shares_T4: torch.Tensor | None = None
    """How much each of them counts, float32."""
    points_T2: torch.Tensor | None = None
    """Column and row of each patch in the grid of learnt positions, from -1 to 1, float32; None: no grid."""


def lay_out(pictures: Sequence[tuple[int, int, int]], geometry: Geometry, device: torch.device) -> Patches:
    """Where patches lie, computed on the host by Hugging Face's functions; nothing is read from the device.

    Args:
        pictures: (frame pairs, rows of patches, columns of patches) of each; an image has 1 frame pair.
        geometry: of the model.
        device: of the tensors.

    Returns:
        Positions, order and segments.
    """
    found = _lay_out(tuple(pictures), geometry)
    names = ("positions_T2", "order", "places_T4", "shares_T4", "points_T2")
    tensors = {name: getattr(found, name) for name in names}
    return replace(found, **{name: sent(t, device) for name, t in tensors.items() if t is not None})


# Cached: recomputation in a backward, and each encoder stage of a rank, need the same microbatch again.
@functools.lru_cache(maxsize=16)
def _lay_out(pictures: tuple[tuple[int, int, int], ...], geometry: Geometry) -> Patches:
    """As `lay_out`, on the CPU."""
    grid = torch.tensor(pictures)
    positions_T2 = get_vision_position_ids(grid, geometry.merge)
    segments = tuple(rows * columns for pairs, rows, columns in pictures for _ in range(pairs))
    if geometry.window_size is None:
        if geometry.grid_side is None:
            return Patches(positions_T2, None, segments, ())
        if geometry.is_bicubic:
            # In float32 and in this order, as Hugging Face's `Glm4vVisionEmbeddings` has it.
            sides = grid[:, 1:].repeat_interleave(grid.prod(1), 0).to(torch.float32)
            points_T2 = (((positions_T2 + 0.5) / sides) * 2 - 1).flip(1)
            return Patches(positions_T2, None, segments, (), points_T2=points_T2)
        learnt = get_vision_interpolation_indices_and_weights(
            grid, geometry.grid_side, align_corners=True, spatial_merge_size=geometry.merge
        )
        return Patches(positions_T2, None, segments, (), *learnt)
    order, bounds = get_vision_window_index(
        grid, geometry.merge, window_size=geometry.window_size, patch_size=geometry.patch_size
    )
    return Patches(positions_T2, order, segments, tuple(bounds.diff().tolist()))


def sent(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    """A host tensor on another device. Copied from page-locked memory: else the copy waits for the device.

    Args:
        tensor: on the CPU.
        device: where it is needed.

    Returns:
        The tensor there.
    """
    pinned = tensor.pin_memory() if device.type == "cuda" else tensor
    return pinned.to(device, non_blocking=True)


def reorder(rows: torch.Tensor, order: torch.Tensor | None, feature_patches: int) -> torch.Tensor:
    """Rows of patches with their features in another order.

    Args:
        rows: [T, ...].
        order: indices of features; None: the order stays.
        feature_patches: rows of each feature.

    Returns:
        [T, ...].
    """
    if order is None:
        return rows
    blocks = rows.reshape(rows.shape[0] // feature_patches, feature_patches, -1)
    return blocks[order].reshape(rows.shape)
