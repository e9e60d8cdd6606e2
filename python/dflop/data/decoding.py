"""One job of decoding: what a medium, or a part of it, becomes for the encoder.

It names files, not samples, so that it can be sent to another process.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from dflop.models.media import MediaBytes

if TYPE_CHECKING:
    from collections.abc import Sequence

    from dflop._native import Media
    from dflop.models.adapter import MediaGrid, ModelAdapter
    from dflop.models.media import MediaFile


@dataclass(frozen=True)
class Job:
    """Tiles of one medium, one after the other."""

    file: MediaFile
    frames: Sequence[int]
    """Of a video, all that the sample takes; none for others."""
    whole: MediaGrid
    """The medium."""
    first_tile: int
    """The first to decode."""
    run: MediaGrid
    """The medium as if it had these tiles only."""


def file_of(medium: Media) -> MediaFile:
    """What a medium of a sample is decoded from.

    Args:
        medium: As the native module names it.

    Returns:
        Its path where it is a whole file of this machine; else its bytes, which are read now.

    Raises:
        ProfileError: They cannot be read.
    """
    return Path(medium.path) if medium.is_local else MediaBytes(medium.path, medium.read())


def decode(adapter: ModelAdapter, job: Job) -> torch.Tensor:
    """The inputs of the encoder.

    Args:
        adapter: Of the family.
        job: What to decode.

    Returns:
        [n, *input_shape] float32 on the CPU.

    Raises:
        Exception: Whatever decoding runs into.
        ValueError: The medium has another number of inputs than profiled.
    """
    tiles = _tiles(adapter, job).to(torch.float32)
    expected = (job.run.num_inputs, *adapter.input_shape)
    if tuple(tiles.shape) != expected:
        message = f"decoded to tiles of shape {tuple(tiles.shape)}, profiled as {expected}"
        raise ValueError(message)
    return tiles


def _tiles(adapter: ModelAdapter, job: Job) -> torch.Tensor:
    whole, frames, first = job.whole, job.frames, job.first_tile
    if frames:
        # Of a video, only the frames of the run: all tiles have as many, but the last may lack one.
        each = -(-len(frames) // whole.num_tiles)
        chosen = frames[each * first : each * (first + job.run.num_tiles)]
        return adapter.pixels(job.file, whole.kind, chosen, job.run)
    tiles = adapter.pixels(job.file, whole.kind, frames, whole)
    if job.run.num_tiles == whole.num_tiles:
        # All of them pass as they are: their number is compared with the profile's.
        return tiles
    start = whole.inputs_before(first)
    return tiles[start : start + job.run.num_inputs]
