"""Shares: some parts of a sample, one after the other, as one encoder rank reads them.

    sample: image (5 tiles) | video (4 frames)       parts 0 | 1 2 3 4
    share of parts 2 to 4:    video, tiles 1 to 4, its end   --> its rows among the sample's features

A part is what can be encoded alone: an image with all its tiles, a frame of a video.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, TypeAlias

if TYPE_CHECKING:
    from dflop.data.sample import Sample
    from dflop.models.adapter import MediaGrid

Parts: TypeAlias = "tuple[int, int] | None"
"""The first part and how many; none: all of the sample."""
Share: TypeAlias = "tuple[int, Parts]"
"""The index of a sample and its parts, as the schedule has them."""


@dataclass(frozen=True)
class MediumRun:
    """Tiles of one medium, one after the other."""

    medium: int
    """Position among the media of the sample."""
    first_tile: int
    """The first, among those of the medium."""
    grid: MediaGrid
    """The medium as if it had these tiles only."""


@dataclass(frozen=True)
class SampleShare:
    """What one encoder rank does of a sample."""

    sample: Sample
    runs: tuple[MediumRun, ...]
    rows: range
    """Its features among those of the sample."""

    @property
    def num_inputs(self) -> int:
        """Inputs of the encoder over all runs: tiles, patches or windows of sound."""
        return sum(run.grid.num_inputs for run in self.runs)


def share_of(sample: Sample, parts: Parts = None) -> SampleShare:
    """These parts of a sample.

    Args:
        sample: The sample.
        parts: As in a schedule; none: all.

    Returns:
        Their tiles, medium after medium, and their rows.

    Raises:
        ValueError: The sample has no such parts; the message names it.
    """
    if parts is None:
        runs = tuple(MediumRun(index, 0, grid) for index, grid in enumerate(sample.media))
        return SampleShare(sample, runs, range(sample.num_features))
    first, end = parts[0], parts[0] + parts[1]
    found: list[MediumRun] = []
    part = row = num_rows = first_row = 0
    for index, (grid, groups) in enumerate(zip(sample.media, sample.parts, strict=True)):
        tile, first_tile, num_tiles, num_features = 0, 0, 0, 0
        for count, part_tiles, part_features in groups:
            start, stop = max(first, part), min(end, part + count)
            if start < stop:
                if num_tiles == 0:
                    first_tile = tile + (start - part) * part_tiles
                if num_rows == 0 and num_features == 0:
                    first_row = row + (start - part) * part_features
                num_tiles += (stop - start) * part_tiles
                num_features += (stop - start) * part_features
            part += count
            tile += count * part_tiles
            row += count * part_features
        if num_tiles:
            is_end = first_tile + num_tiles == grid.num_tiles
            run = replace(
                grid,
                num_tiles=num_tiles,
                num_features=num_features,
                is_start=first_tile == 0,
                is_end=is_end,
            )
            found.append(MediumRun(index, first_tile, run))
            num_rows += num_features
    if not 0 <= first < end <= part:
        message = f"sample `{sample.id}` ({sample.index}): parts {first} to {end - 1}, it has {part}"
        raise ValueError(message)
    return SampleShare(sample, tuple(found), range(first_row, first_row + num_rows))
