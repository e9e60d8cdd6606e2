"""The model profile as a file, with the same text and hash as in Rust, which also writes it."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dflop._native import write_text

if TYPE_CHECKING:
    import os
    from collections.abc import Iterable, Mapping

KIND = "model_profile"
FORMAT_VERSION = 2


def hash_parts(parts: Iterable[bytes]) -> str:
    """SHA-256 of the parts, each preceded by its length, as `sha256:...`.

    Args:
        parts: any bytes.

    Returns:
        The hash; equal to that of Rust's `artifact::hash_parts`.
    """
    digest = hashlib.sha256()
    for part in parts:
        digest.update(len(part).to_bytes(8, "little"))
        digest.update(part)
    return f"sha256:{digest.hexdigest()}"


def hash_config(model_dir: Path) -> str:
    """Hash of the bytes of `config.json`: what an artifact was made from under `model_config`.

    Args:
        model_dir: folder of the model.

    Returns:
        `sha256:...`.

    Raises:
        FileNotFoundError: there is no `config.json`.
    """
    return hash_parts([(Path(model_dir) / "config.json").read_bytes()])


def to_text(profile: Mapping[str, Any]) -> str:
    """The model profile as the text of its file, a top-level field on a line of its own.

    Args:
        profile: the fields of `ModelProfile`, in order.

    Returns:
        JSON, as Rust's `artifact::to_text` lays it out.
    """
    fields = {"dflop": KIND, "format_version": FORMAT_VERSION, **profile}
    lines = [
        f'"{name}": {json.dumps(value, separators=(",", ":"), ensure_ascii=False, allow_nan=False)}'
        for name, value in fields.items()
    ]
    return "{\n" + ",\n".join(lines) + "\n}\n"


def write_artifact(path: str | os.PathLike[str], profile: Mapping[str, Any]) -> None:
    """Writes the model profile whole to `path`, or leaves what was there; makes the folder if it is missing.

    Args:
        path: the file.
        profile: as `profile_model` returns it.

    Raises:
        ArtifactError: the folder cannot be made or the file cannot be written, or a folder, a device or a
            file of another kind stands there.
    """
    write_text(path, KIND, to_text(profile))
