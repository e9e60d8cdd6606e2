"""The pieces of each model family, by the `model_type` of its `config.json`."""

from __future__ import annotations

from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING

from dflop._native import families
from dflop.models.rules import read_family

if TYPE_CHECKING:
    import os

    from dflop.profiling.pieces import Piece

FAMILIES = tuple(name for name, can in families().items() if can["measure"])
"""`model_type` of every family whose pieces can be measured; each has a file in this folder."""


def family_of(model_dir: str | os.PathLike[str]) -> str:
    """The family of the model in `model_dir`; see `read_family`.

    Args:
        model_dir: folder with `config.json`, Hugging Face form.

    Returns:
        One of `FAMILIES`.

    Raises:
        FileNotFoundError: there is no `config.json`.
        ProfileError: `config.json` is not JSON, or its family is not known; the message names those that are.
    """
    return read_family(model_dir, FAMILIES)


def feature_width(model_dir: str | os.PathLike[str]) -> int:
    """Values of a feature that passes from the encoder to the LLM backbone.

    Args:
        model_dir: folder with `config.json`, Hugging Face form.

    Returns:
        As many as a hidden state has, or a multiple of that (DeepStack).

    Raises:
        FileNotFoundError: there is no `config.json`.
        ProfileError: as `load_pieces`.
    """
    family = import_module(f"dflop.models.families.{family_of(model_dir)}")
    return family.ADAPTER(Path(model_dir)).feature_width


def load_pieces(model_dir: str | os.PathLike[str]) -> list[Piece]:
    """The pieces of the model in `model_dir`, chosen by its family.

    Imports torch and transformers only once the family is known.

    Args:
        model_dir: folder with `config.json`, Hugging Face form.

    Returns:
        The pieces, in the order in which data passes through them.

    Raises:
        FileNotFoundError: there is no `config.json`.
        ProfileError: its family is not known, or the configuration asks for what the family does not do.
    """
    family = family_of(model_dir)
    return import_module(f"dflop.profiling.families.{family}").pieces(Path(model_dir))
