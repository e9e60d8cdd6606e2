"""Media without content, of a size that somebody asks for: what a processor is called with.

A processor decides sizes by the sizes that it gets, so nothing is decoded. Frames of a video share one byte.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Mapping

BYTES_MAX = 4 << 30
"""Bytes of a blank medium as a processor holds it; a larger one is refused."""

# A processor works with numbers of four bytes.
_NUMBER_BYTES = 4
_CHANNELS = 3


class AllFrames(list[int]):
    """Positions of all frames of a file: what a reader of videos says before a processor chooses."""


def image(height: int, width: int) -> Any:
    """A black picture, as PIL has it: what `apply_chat_template` gives to a processor.

    Args:
        height: In pixels.
        width: In pixels.

    Returns:
        The picture, RGB.

    Raises:
        ValueError: It is larger than `BYTES_MAX`.
    """
    from PIL import Image

    _check(f"an image of {height} x {width} pixels", height * width * _CHANNELS * _NUMBER_BYTES)
    return Image.new("RGB", (width, height))


def video(question: Mapping[str, Any]) -> tuple[Any, Any]:
    """Black frames, and what a file would say of them.

    Args:
        question: `num_frames`, `height`, `width`, `fps` and `duration_s`.

    Returns:
        Frames (num_frames, 3, height, width), uint8, which share one byte; and their `VideoMetadata`.

    Raises:
        ValueError: So many frames have more than 2^31 pixels a side or as a number.
    """
    import torch
    from transformers.video_utils import VideoMetadata

    frames, height, width = (int(question[name]) for name in ("num_frames", "height", "width"))
    blank = torch.zeros((), dtype=torch.uint8).expand(frames, _CHANNELS, height, width)
    fps, seconds = question["fps"], question["duration_s"]
    if seconds is None and fps:
        seconds = frames / fps
    metadata = VideoMetadata(
        total_num_frames=frames,
        fps=fps,
        width=width,
        height=height,
        duration=seconds,
        video_backend="dflop",
        frames_indices=AllFrames(range(frames)),
    )
    return blank, metadata


def check_frames(question: Mapping[str, Any], num_frames: int) -> None:
    """Refuses a video whose frames, as a processor reads them, are too large to hold.

    Args:
        question: `height` and `width`.
        num_frames: Frames that are read.

    Raises:
        ValueError: They are larger than `BYTES_MAX`.
    """
    height, width = int(question["height"]), int(question["width"])
    what = f"{num_frames} frames of {height} x {width} pixels"
    _check(what, num_frames * height * width * _CHANNELS, "; read fewer: `data.video_max_frames`")


def sound(duration_s: float, sample_rate: int, wanted_rate: int) -> Any:
    """Silence, as it is after it has been resampled.

    Args:
        duration_s: Seconds of the file.
        sample_rate: Samples a second of the file.
        wanted_rate: Samples a second that the processor wants.

    Returns:
        Samples (ceil(n x wanted_rate / sample_rate),), float32, where the file has n; as librosa counts.

    Raises:
        ValueError: It is larger than `BYTES_MAX`.
    """
    import numpy as np

    in_file = round(duration_s * sample_rate)
    samples = -(-in_file * wanted_rate // max(sample_rate, 1))
    _check(f"a sound of {duration_s} s", samples * _NUMBER_BYTES)
    return np.zeros(samples, dtype=np.float32)


def _check(what: str, num_bytes: int, hint: str = "") -> None:
    if num_bytes > BYTES_MAX:
        message = f"{what}: {num_bytes} bytes, a processor is asked with at most {BYTES_MAX}{hint}"
        raise ValueError(message)
