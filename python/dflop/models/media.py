"""Decoding: from files to RGB pictures, rotated as they are displayed."""

from __future__ import annotations

import io
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, TypeAlias

from PIL import Image, ImageOps, ImageSequence

from dflop.models.errors import profile_error

if TYPE_CHECKING:
    from collections.abc import Sequence

    import numpy as np


@dataclass(frozen=True)
class MediaBytes:
    """A medium in memory: the member of a shard, the cell of a table, an object of a remote store."""

    name: str
    """What to call it in messages."""
    data: bytes
    """All its bytes."""

    def __str__(self) -> str:
        """Its name."""
        return self.name


MediaFile: TypeAlias = Path | MediaBytes
"""What is decoded: a file, or its bytes."""


def decode_image(file: MediaFile) -> Image.Image:
    """One image in RGB, turned as its EXIF data says.

    Args:
        file: an image; of an animation, its first frame.

    Returns:
        A Pillow image in mode RGB.

    Raises:
        FileNotFoundError: there is no such file.
        ProfileError: the file cannot be decoded; the message names it.
    """
    try:
        with Image.open(opened(file)) as image:
            # Both would copy a picture that they have nothing to do on.
            ImageOps.exif_transpose(image, in_place=True)
            image.load()
            return image if image.mode == "RGB" else image.convert("RGB")
    except FileNotFoundError:
        raise
    # Pillow's plugins may raise any exception on a damaged file.
    except Exception as error:
        raise _undecodable(file, str(error)) from error


def decode_frames(file: MediaFile, frame_indices: Sequence[int]) -> list[Image.Image]:
    """The named frames of a video or animation in RGB, rotated as its container says.

    *Complexity*: decodes all frames from the first to the last one named. It does not seek to keyframes,
    since indices count decoded frames.

    Args:
        file: a video (mp4, mkv, webm, ...) or animation (GIF, WebP, PNG).
        frame_indices: from 0, in any order; an index may be named twice.

    Returns:
        One Pillow image in mode RGB for each index, in their order.

    Raises:
        FileNotFoundError: there is no such file.
        ProfileError: the file cannot be decoded, or has no such frame; the message names it.
    """
    wanted = set(frame_indices)
    if not wanted:
        return []
    try:
        decode = _decode_animation if _is_animation(file) else _decode_video
        frames, num_frames = decode(file, wanted)
    except FileNotFoundError:
        raise
    except Exception as error:
        raise _undecodable(file, str(error)) from error
    missing = sorted(wanted - frames.keys())
    if missing:
        raise _undecodable(file, f"it has {num_frames} frames, frame {missing[0]} was asked for")
    return [frames[index] for index in frame_indices]


def opened(file: MediaFile) -> str | io.BytesIO:
    """What decoders open: the path of a file, or its bytes.

    Args:
        file: the file.

    Returns:
        Its path, or a stream of its bytes.

    Raises:
        ValueError: it is no regular file.
    """
    if isinstance(file, MediaBytes):
        return io.BytesIO(file.data)
    # If the file has become a pipe since it was profiled, opening it would block.
    if file.exists() and not file.is_file():
        message = "it is a directory, device, pipe or socket, must be a regular file"
        raise ValueError(message)
    return str(file)


def _is_animation(file: MediaFile) -> bool:
    """Whether Pillow reads it (GIF, PNG, WebP), by its first bytes; other videos are containers for PyAV."""
    found = opened(file)
    if isinstance(found, io.BytesIO):
        start = found.read(12)
    else:
        with Path(found).open("rb") as start_of_file:
            start = start_of_file.read(12)
    is_webp = start[:4] == b"RIFF" and start[8:] == b"WEBP"
    return is_webp or start[:4] == b"GIF8" or start[:8] == b"\x89PNG\r\n\x1a\n"


def _decode_animation(file: MediaFile, wanted: set[int]) -> tuple[dict[int, Image.Image], int]:
    frames: dict[int, Image.Image] = {}
    with Image.open(opened(file)) as image:
        num_frames = getattr(image, "n_frames", 1)
        last = max(wanted)
        for index, frame in enumerate(ImageSequence.Iterator(image)):
            if index in wanted:
                frames[index] = frame.convert("RGB")
            if index >= last:
                break
    return frames, num_frames


def _decode_video(file: MediaFile, wanted: set[int]) -> tuple[dict[int, Image.Image], int]:
    import av

    frames: dict[int, Image.Image] = {}
    num_frames = 0
    last = max(wanted)
    with av.open(opened(file)) as container:
        if not container.streams.video:
            message = "it has no video stream"
            raise ValueError(message)
        stream = container.streams.video[0]
        # One thread, since ranks and workers fill the cores already.
        stream.codec_context.thread_count = 1
        for index, frame in enumerate(container.decode(stream)):
            num_frames = index + 1
            if index in wanted:
                frames[index] = Image.fromarray(_upright(frame.to_ndarray(format="rgb24"), frame.rotation))
            if index >= last:
                break
    return frames, num_frames


def _upright(pixels_HWC: np.ndarray, rotation: int) -> np.ndarray:
    import numpy as np

    # `rotation` counts degrees counterclockwise from the stored to the displayed frame, as `rot90` does.
    return np.ascontiguousarray(np.rot90(pixels_HWC, k=(rotation // 90) % 4)) if rotation else pixels_HWC


def _undecodable(file: MediaFile, cause: str) -> Exception:
    return profile_error(f"cannot decode `{file}`: {cause}")
