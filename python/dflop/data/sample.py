"""One sample as token tensors."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

    from dflop._native import Media
    from dflop.models.adapter import MediaGrid


@dataclass(frozen=True)
class Sample:
    """One sample as token tensors, on the CPU; its tiles are apart because only encoder ranks need them."""

    index: int
    id: str
    input_ids_T: torch.Tensor
    """[T] int64."""
    feature_mask_T: torch.Tensor
    """[T] bool; true where a feature row takes the place of the embedding."""
    targets_T: torch.Tensor
    """[T] int64; the label of position t + 1, so -100 at the last position."""
    positions_T: torch.Tensor
    """[T] int64, from 0; with M-RoPE [3, T]."""
    media: tuple[MediaGrid, ...]
    files: tuple[Media, ...]
    """Where the bytes of each of `media` are; a local file by its path, all others by `read`."""
    num_features: int
    """Feature rows over all media: the rows that pass the boundary for this sample."""
    parts: tuple[tuple[tuple[int, int, int], ...], ...]
    """For each of `media`, groups of equal parts in a row: how many, tiles of each, features of each."""

    @property
    def kind(self) -> str:
        """`text`, `image`, `multi_image`, `video` or `audio`; `mixed` where it has media of several kinds."""
        kinds = {"image" if grid.kind == "multi_image" else grid.kind for grid in self.media}
        if len(kinds) > 1:
            return "mixed"
        return "multi_image" if kinds == {"image"} and len(self.media) > 1 else next(iter(kinds), "text")

    @property
    def num_tokens(self) -> int:
        """LLM tokens of the sample."""
        return int(self.input_ids_T.shape[0])

    @property
    def num_bytes(self) -> int:
        """Bytes of the token tensors, and of media that came with the record."""
        tensors = (self.input_ids_T, self.feature_mask_T, self.targets_T, self.positions_T)
        return sum(t.numel() * t.element_size() for t in tensors) + sum(f.held_bytes for f in self.files)
