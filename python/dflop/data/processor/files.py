"""The files of a model's processor: loaded by transformers, and hashed."""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING, Any

from dflop._native import ProfileError
from dflop.models.errors import hinted

if TYPE_CHECKING:
    from pathlib import Path

_FILES = (
    "config.json",
    "preprocessor_config.json",
    "processor_config.json",
    "video_preprocessor_config.json",
    "feature_extractor_config.json",
)
OWN_RULE = "write a function for the family, and name it in `model.family` (CONTRIBUTING.md)"
"""The hint of an error that says why a processor cannot serve as a shape rule."""


def load(directory: Path) -> tuple[Any, Any]:
    """Configuration and processor of a model directory, without network.

    Args:
        directory: Of the model.

    Returns:
        What `AutoConfig` and `AutoProcessor` of transformers make of it.

    Raises:
        ProfileError: There is no transformers, or no processor.
    """
    try:
        from transformers import AutoConfig, AutoProcessor
    except ImportError as error:
        message = f"`model.family` is `transformers`, which cannot be imported: {error}"
        raise hinted(ProfileError(message), "pip install 'dflop[train]'") from error
    try:
        config = AutoConfig.from_pretrained(directory, local_files_only=True)
        processor = AutoProcessor.from_pretrained(directory, local_files_only=True)
    except Exception as error:
        cause = f"{type(error).__name__}: {str(error).strip()}"
        message = f"transformers cannot load a processor from `{directory}`: {cause}"
        hint = "put the processor's files beside config.json (`processor.save_pretrained`)"
        if isinstance(error, ImportError):
            hint = "pip install torchvision pillow"
        raise hinted(ProfileError(message), hint) from error
    if not hasattr(processor, "tokenizer"):
        message = f"transformers has a {type(processor).__name__} in `{directory}`, must have a processor"
        raise hinted(ProfileError(message), OWN_RULE)
    return config, processor


def version(directory: Path, name: str) -> str:
    """Which processor it is.

    Args:
        directory: Of the model.
        name: The processor's class.

    Returns:
        The class, the version of transformers, and a hash of the processor's files.
    """
    import transformers

    digest = hashlib.sha256()
    for file in _FILES:
        path = directory / file
        text = path.read_bytes() if path.is_file() else b""
        digest.update(f"{file} {len(text)}\n".encode() + text)
    return f"{name} of transformers {transformers.__version__}, sha256:{digest.hexdigest()}"


def two_texts(config: Any) -> str | None:
    """The kind of a model whose text is read by an encoder and written by a decoder.

    Args:
        config: The model's configuration.

    Returns:
        Its `model_type`; None for other models.
    """
    for place in (config, getattr(config, "text_config", None)):
        if getattr(place, "is_encoder_decoder", False):
            return str(config.model_type)
    return None
