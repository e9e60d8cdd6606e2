"""The one list of families (`crates/types/src/family.rs`) says what the parts in Python can do."""

from __future__ import annotations

from importlib import import_module
from pathlib import Path

from test_other_families import SHARED, TABLE

import dflop.models
import dflop.profiling.families
from dflop._native import families
from dflop.integrations.encoder_families import TOWERS
from dflop.models import FAMILIES as TRAINED
from dflop.profiling.families import FAMILIES as MEASURED


def test_every_measured_family_has_pieces_and_no_other() -> None:
    folder = Path(dflop.profiling.families.__file__).parent
    with_pieces = {path.stem for path in folder.glob("*.py") if "\ndef pieces(" in path.read_text()}
    assert set(MEASURED) == with_pieces == {name for name, can in families().items() if can["measure"]}


def test_every_trained_family_has_an_adapter_and_no_other() -> None:
    folder = Path(dflop.models.__file__).parent / "families"
    with_adapter = {path.stem for path in folder.glob("*.py") if "\nADAPTER = " in path.read_text()}
    assert set(TRAINED) == with_adapter == {name for name, can in families().items() if can["train"]}
    for family in TRAINED:
        assert import_module(f"dflop.models.families.{family}").ADAPTER.family == family


def test_every_family_whose_encoder_is_shared_out_has_a_tower_and_no_other() -> None:
    # Of these dflop has no rule: models in other people's trainers alone.
    others = {"aya_vision", "cohere2_vision", "llama4", "paligemma"}
    others |= {name for name, (*_, second) in TABLE.items() if second == SHARED}
    assert set(TOWERS) - others == {name for name, can in families().items() if can["share"]}
    assert others <= set(TOWERS) - set(families())
