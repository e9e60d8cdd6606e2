"""Which weight files a model directory has. Imports neither torch nor safetensors."""

from __future__ import annotations

import json
from pathlib import Path

from dflop.models.errors import hinted, profile_error

WHOLE = "model.safetensors"
"""All weights in one file."""
INDEX = "model.safetensors.index.json"
"""Which shard holds which tensor; beside the shards."""
_OTHER = ("pytorch_model.bin", "pytorch_model.bin.index.json", "tf_model.h5", "flax_model.msgpack")


def weight_files(model_dir: Path) -> list[Path]:
    """The safetensors files of a model directory, sorted by name; none where it has no weights.

    As in transformers, shards are ignored if there is one whole file.

    Args:
        model_dir: folder in Hugging Face form.

    Returns:
        Paths of files that exist.

    Raises:
        ProfileError: the index cannot be read, a shard that it names is missing, or the weights exist only in
            another format.
    """
    if (model_dir / WHOLE).exists():
        return [model_dir / WHOLE]
    index = model_dir / INDEX
    if index.exists():
        return _shards(index)
    for name in _OTHER:
        if (model_dir / name).exists():
            message = (
                f"`{model_dir / name}` is no safetensors file, weights must be `{WHOLE}` or shards of it"
            )
            hint = "load the model with transformers once, and write it again with `save_pretrained`"
            raise hinted(profile_error(message), hint)
    return []


def _shards(index: Path) -> list[Path]:
    """The shards that an index names."""
    try:
        names = sorted({str(name) for name in json.loads(index.read_bytes())["weight_map"].values()})
    except (ValueError, KeyError, AttributeError, TypeError) as error:
        message = f"`{index}` is no index of safetensors: it needs `weight_map`, a file for each tensor"
        raise profile_error(message) from error
    foreign = next((name for name in names if Path(name).name != name), None)
    if foreign is not None:
        message = f"`{index}` names `{foreign}`, must be a file beside it"
        raise profile_error(message)
    missing = [name for name in names if not (index.parent / name).exists()]
    if missing:
        message = (
            f"`{index.parent}` lacks {len(missing)} of the {len(names)} files of its weights, "
            f"`{missing[0]}` first"
        )
        raise hinted(profile_error(message), f"download the missing files; `{INDEX}` names them all")
    return [index.parent / name for name in names]


def check_has_weights(model_dir: Path) -> None:
    """Raises unless a model directory has weights to start from.

    Args:
        model_dir: folder in Hugging Face form.

    Raises:
        ProfileError: it has none, or they cannot be used; see `weight_files`.
    """
    if not weight_files(model_dir):
        message = f"`{model_dir}` has no weights, neither `{WHOLE}` nor `{INDEX}`"
        hint = (
            "put the model's safetensors files there, or set `train.init: random` to train from random ones"
        )
        raise hinted(profile_error(message), hint)
