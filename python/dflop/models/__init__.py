"""Model families: one adapter each, and the table that finds it."""

from __future__ import annotations

from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING

from dflop._native import families
from dflop.models.rules import check_rules, dropout_rules, read_family

if TYPE_CHECKING:
    import os

    from dflop.models.adapter import ModelAdapter

FAMILIES = tuple(name for name, can in families().items() if can["train"])
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
        ProfileError: `config.json` is not JSON, its family has no adapter (the message names those that
            have), or it asks for what cannot be trained (the message names the field).
    """
    family = read_family(model_dir, FAMILIES)
    adapter = import_module(f"dflop.models.families.{family}").ADAPTER(Path(model_dir))
    # Checked here and not in the adapter: a model with dropout can be measured, but not trained.
    rules = dropout_rules(adapter.config.to_dict())
    check_rules(Path(model_dir) / "config.json", rules, adapter.field_prefix)
    return adapter
