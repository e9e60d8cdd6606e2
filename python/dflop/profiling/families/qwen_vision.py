"""The modules of Qwen2-VL's and Qwen2.5-VL's encoders, and where patches lie.

Shape letters: T patches (encoder tokens), C values of a patch, E feature tokens, V and D widths of encoder
and backbone. With windows, patches lie window by window between embedding and projector.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from transformers.vision_utils import get_vision_position_ids, get_vision_window_index

from dflop.profiling.families.source import bounds_of

if TYPE_CHECKING:
    from collections.abc import Sequence


@dataclass(frozen=True)
class Geometry:
    """How pictures are cut."""

    merge: int
    """Patches a feature, each way."""
    patch_size: int
    """Side of a patch, in pixels."""
    window_size: int | None
    """Side of a window, in pixels; None where the layers have none."""

    @property
    def feature_patches(self) -> int:
        """Patches a feature."""
        return self.merge**2

    @property
    def window_side(self) -> int:
        """Patches along a side of a whole window."""
        assert self.window_size is not None, "asked for where there are windows"
        return self.window_size // self.merge // self.patch_size * self.merge

    def square(self, tokens: int) -> tuple[int, int, int]:
        """The picture of so many patches that is nearest to a square.

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
    """Row and column of each."""
    order: torch.Tensor | None
    """Features in the order of their windows; None: as they come."""
    segments: tuple[int, ...]
    """Patches of each picture or frame pair."""
    windows: tuple[int, ...]
    """Patches of each window."""


def lay_out(pictures: Sequence[tuple[int, int, int]], geometry: Geometry, device: torch.device) -> Patches:
    """Where patches lie, by Hugging Face's own functions.

    Args:
        pictures: (frame pairs, rows, columns) each, in patches.
        geometry: of the model.
        device: of the tensors.

    Returns:
        Positions, order and segments.
    """
    grid = torch.tensor(pictures)
    positions_T2 = get_vision_position_ids(grid, geometry.merge).to(device)
    segments = tuple(rows * columns for pairs, rows, columns in pictures for _ in range(pairs))
    if geometry.window_size is None:
        return Patches(positions_T2, None, segments, ())
    order, bounds = get_vision_window_index(
        grid, geometry.merge, window_size=geometry.window_size, patch_size=geometry.patch_size
    )
    return Patches(positions_T2, order.to(device), segments, tuple(bounds.diff().tolist()))


def _reorder(rows: torch.Tensor, order: torch.Tensor, feature_patches: int) -> torch.Tensor:
    blocks = rows.reshape(rows.shape[0] // feature_patches, feature_patches, -1)
    return blocks[order].reshape(rows.shape)


class PatchEmbedding(nn.Module):
    """Patches to hidden states, window by window."""

    def __init__(self, tower: Any, geometry: Geometry) -> None:
        super().__init__()
        self.patch_embed, self.rotary, self.geometry = tower.patch_embed, tower.rotary_pos_emb, geometry

    def forward(self, patches_TC: torch.Tensor, patches: Patches) -> torch.Tensor:
        """Hidden states before the first layer.

        Args:
            patches_TC: pixels.
            patches: where they lie.

        Returns:
            hidden_TV.
        """
        hidden_TV = self.patch_embed(patches_TC)
        # Not of the layers, whose time is multiplied by their number: a call does it once.
        angles = self.rotary(hidden_TV, patches.positions_T2)
        if patches.order is None:
            return hidden_TV
        each = self.geometry.feature_patches
        for angle in angles:
            _reorder(angle, patches.order, each)
        return _reorder(hidden_TV, patches.order, each)


@dataclass(frozen=True)
class Bounds:
    """Who sees whom in a layer."""

    cu_seqlens: torch.Tensor
    """[M + 1] int32."""
    segment_tokens: tuple[int, ...]
    """Its differences."""
    angles: tuple[torch.Tensor, ...]
    """Cosine and sine of the rotary embedding."""


class EncoderLayers(nn.Module):
    """A run of encoder layers, all of them with windows or all without."""

    def __init__(self, tower: Any, geometry: Geometry, has_windows: bool) -> None:
        super().__init__()
        self.layers, self.rotary = tower.blocks, tower.rotary_pos_emb
        self.geometry, self.has_windows = geometry, has_windows

    def bounds(self, patches: Patches, like: torch.Tensor) -> Bounds:
        """What the layers must know of these patches.

        Args:
            patches: where they lie.
            like: tells device and dtype.

        Returns:
            Argument of `forward`.
        """
        angles = self.rotary(like, patches.positions_T2)
        if patches.order is not None:
            each = self.geometry.feature_patches
            angles = tuple(_reorder(angle, patches.order, each) for angle in angles)
        tokens = patches.windows if self.has_windows else patches.segments
        return Bounds(bounds_of(tokens, like.device), tokens, angles)

    def forward(self, hidden_TV: torch.Tensor, bounds: Bounds) -> torch.Tensor:
        """Hidden states after the layers.

        Args:
            hidden_TV: before.
            bounds: who sees whom.

        Returns:
            hidden_TV.
        """
        longest = max(bounds.segment_tokens)
        for layer in self.layers:
            hidden_TV = layer(
                hidden_TV,
                cu_seqlens=bounds.cu_seqlens,
                max_seqlen=longest,
                position_embeddings=bounds.angles,
                segment_tokens=bounds.segment_tokens,
            )
        return hidden_TV


class Merger(nn.Module):
    """Hidden states to features, back in their own order."""

    def __init__(self, tower: Any) -> None:
        super().__init__()
        self.merger = tower.merger

    def forward(self, hidden_TV: torch.Tensor, order: torch.Tensor | None) -> torch.Tensor:
        """Features of all pictures, one after the other.

        Args:
            hidden_TV: after the last layer.
            order: that of `Patches`.

        Returns:
            features_ED.
        """
        features_ED = self.merger(hidden_TV)
        return features_ED if order is None else features_ED[order.argsort()]
