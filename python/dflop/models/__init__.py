"""Model families: one adapter each, and the table that finds it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING

from dflop.models.errors import profile_error

if TYPE_CHECKING:
    import os

    from dflop.models.adapter import ModelAdapter

FAMILIES = ("llava_onevision",)
"""`model_type` of every family with an adapter, as in `config.json`."""


def load_adapter(model_dir: str | os.PathLike[str]) -> ModelAdapter:
    """The adapter of the model in `model_dir`, chosen by the `model_type` of its `config.json`.

    Imports torch and transformers only once the family is known.

    Args:
        model_dir: folder with `config.json` and `preprocessor_config.json`, Hugging Face form.

    Returns:
        The adapter; it holds configuration, never parameters.

    Raises:
        FileNotFoundError: there is no `config.json`.
        ProfileError: `config.json` is not JSON, or its family has no adapter; the message names those that
            have.
    """
    path = Path(model_dir) / "config.json"
    try:
        family = json.loads(path.read_bytes()).get("model_type")
    except (ValueError, AttributeError) as error:
        message = f"`{path}` is not a model configuration: {error}"
        raise profile_error(message) from error
    if family == "llava_onevision":
        from dflop.models.llava_onevision import LlavaOnevisionAdapter

        return LlavaOnevisionAdapter(Path(model_dir))
    known = ", ".join(f"`{name}`" for name in FAMILIES)
    message = f"`{path}` is of model family `{family}`, known are {known}"
    raise profile_error(message)
