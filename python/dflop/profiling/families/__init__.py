"""The pieces of each model family, as the profiler runs them: one file a family, each with a `pieces`."""

from __future__ import annotations

import importlib
import json
from pathlib import Path
from typing import TYPE_CHECKING

from dflop.models.errors import profile_error

if TYPE_CHECKING:
    from dflop.profiling.pieces import Piece

# `model_type` of `config.json` -> the file here that has its pieces.
_FILES = {
    "llava_onevision": "llava_onevision",
    "internvl": "internvl",
    "llava_next": "llava_next",
    "qwen2_vl": "qwen2_vl",
    "qwen2_5_vl": "qwen2_5_vl",
    "qwen2_audio": "qwen2_audio",
}


def family_of(model_dir: Path) -> str:
    """The family of a model: `model_type` of its `config.json`.

    Args:
        model_dir: folder with `config.json`, Hugging Face form.

    Returns:
        The name, one of those that have pieces.

    Raises:
        FileNotFoundError: there is no `config.json`.
        ProfileError: it is not JSON, or its family has no pieces; the message names those that have.
    """
    path = Path(model_dir) / "config.json"
    try:
        family = json.loads(path.read_bytes()).get("model_type")
    except (ValueError, AttributeError) as error:
        message = f"`{path}` is not a model configuration: {error}"
        raise profile_error(message) from error
    if family not in _FILES:
        known = ", ".join(f"`{name}`" for name in sorted(_FILES))
        message = f"`{path}` is of model family `{family}`, the profiler knows {known}"
        raise profile_error(message)
    return family


def load_pieces(model_dir: Path) -> list[Piece]:
    """The pieces of the model in `model_dir`; imports torch and transformers.

    Args:
        model_dir: folder with `config.json`, Hugging Face form.

    Returns:
        As the family's file gives them.

    Raises:
        FileNotFoundError: there is no `config.json`.
        ProfileError: the family has no pieces, or the configuration asks for what they do not do.
    """
    name = f"{__name__}.{_FILES[family_of(model_dir)]}"
    return importlib.import_module(name).pieces(Path(model_dir))
