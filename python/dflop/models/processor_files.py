"""The files of a model directory that describe its processors, in the forms that transformers has given them.

processor_config.json            newer: all processors, each a part of its name; goes before the files below
preprocessor_config.json         the image processor or feature extractor: its fields, or a part of its name
video_preprocessor_config.json   the video processor; without this file it has the image processor's fields
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

from dflop.models.errors import hinted, profile_error

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    import torch

_FILE, _WHOLE_FILE = "preprocessor_config.json", "processor_config.json"
_VIDEO_FILE = "video_preprocessor_config.json"


def processor_file(model_dir: Path, part: str = "image_processor") -> Path:
    """The file of a processor.

    Args:
        model_dir: of the model.
        part: `image_processor` or `feature_extractor`.

    Returns:
        `processor_config.json` where it holds the part, as in transformers; else that of the part alone.
    """
    path = model_dir / _WHOLE_FILE
    return path if _part(_content(path), part) is not None else model_dir / _FILE


def processor_fields(model_dir: Path, part: str) -> dict[str, Any]:
    """The fields of one processor.

    Args:
        model_dir: of the model.
        part: `image_processor`, `feature_extractor` or `video_processor`.

    Returns:
        As in the file.

    Raises:
        FileNotFoundError: there is no file.
        ProfileError: it is not JSON.
    """
    whole = _content(model_dir / _WHOLE_FILE)
    if (own := _part(whole, part)) is not None:
        return own
    if part != "video_processor":
        content = _read(model_dir / _FILE)
        return content.get(part, content)
    if (model_dir / _VIDEO_FILE).is_file():
        return _read(model_dir / _VIDEO_FILE)
    # An old file may give the type of the image processor, which is not one of the video's fields.
    path = model_dir / _FILE
    content = whole if not path.is_file() and whole else _read(path)
    if part in content:
        return content[part]
    fields = content.get("image_processor", content)
    return {name: value for name, value in fields.items() if not name.endswith("_type")}


def settings_of_processor(model_dir: Path, part: str) -> dict[str, Any]:
    """The fields of the processor that holds the others.

    Args:
        model_dir: of the model.
        part: one that it holds, as in `processor_fields`.

    Returns:
        Those of `processor_config.json`; without it, of the part's file where it holds the whole processor;
        else none.

    Raises:
        FileNotFoundError: neither file is there.
        ProfileError: one is not JSON.
    """
    path = model_dir / _WHOLE_FILE
    if path.is_file():
        return _read(path)
    content = _read(model_dir / _FILE)
    return content if part in content else {}


def _part(content: dict[str, Any], part: str) -> Any:
    """A part of `processor_config.json`; None where it has none. A feature extractor has two names."""
    if part == "feature_extractor" and part not in content:
        part = "audio_processor"
    return content.get(part)


def _content(path: Path) -> dict[str, Any]:
    return _read(path) if path.is_file() else {}


def _read(path: Path) -> dict[str, Any]:
    try:
        return json.loads(path.read_bytes())
    except ValueError as error:
        message = f"`{path}` is not a processor's configuration: {error}"
        raise profile_error(message) from error


def processor_of_videos(model_dir: Path, name: str) -> Any:
    """A video processor of Hugging Face.

    Args:
        model_dir: of the model.
        name: of its class in transformers.

    Returns:
        The processor, as the files of the model describe it.

    Raises:
        FileNotFoundError: there is no file.
        ProfileError: torchvision is missing, which these processors need.
    """
    import transformers

    try:
        return getattr(transformers, name).from_dict(processor_fields(model_dir, "video_processor"))
    except ImportError as error:
        message = f"`{name}` reads videos with torchvision, which is not installed"
        raise hinted(profile_error(message), "pip install torchvision") from error


def stacked(frames: Sequence[Any]) -> torch.Tensor:
    """Frames as a video processor takes them.

    Args:
        frames: Pillow images in mode RGB, of one size; at least one.

    Returns:
        [frames, 3, height, width] uint8.
    """
    import numpy as np
    import torch

    return torch.from_numpy(np.stack([np.asarray(frame) for frame in frames])).permute(0, 3, 1, 2)
