"""The reference names all that there is: public names of Python, every field of `dflop.yaml`, every crate."""

from __future__ import annotations

import importlib
import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

import dflop
import dflop.integrations

ROOT = Path(__file__).resolve().parents[2]
SECTIONS = ["model", "data", "cluster", "train", "checkpoint", "evaluation", "plan"]


def documented() -> set[str]:
    """The full name of each thing on the page of Python."""
    page = (ROOT / "docs/reference/python.md").read_text()
    return {*re.findall(r"^::: (\S+)$", page, flags=re.M), *re.findall(r"`(dflop\.\w+)` is", page)}


def imported() -> set[tuple[str, str]]:
    """What examples, README and guides import of the trainers' modules: (module, name)."""
    pages = [*(ROOT / "examples").glob("*.py"), ROOT / "README.md", *(ROOT / "docs").rglob("*.md")]
    found = set()
    for page in pages:
        text = page.read_text()
        for module, names in re.findall(
            r"^from (dflop\.integrations\.\w+) import ([\w, ]+)", text, flags=re.M
        ):
            found |= {(module, name) for name in names.split(", ")}
        found |= set(re.findall(r"(dflop\.integrations\.(?!loader|encoder|padding|loss)[\w.]+)\.(\w+)", text))
    return found


def test_python_has_every_public_name() -> None:
    public = {*dflop.__all__, *dflop.integrations.__all__}
    assert not public - {name.rpartition(".")[2] for name in documented()}


def test_python_has_what_each_trainer_needs() -> None:
    asked = imported()
    modules = {module.rpartition(".")[2] for module, _ in asked}
    assert modules >= {"transformers", "accelerate", "lightning", "torchtitan", "energon", "verl", "easyr1"}
    assert not {".".join(name) for name in asked} - documented()


@pytest.mark.parametrize("name", sorted(documented()))
def test_what_python_has_is_there(name: str) -> None:
    """The site is made from the sources; what it shows must also be importable."""
    module, _, attribute = name.rpartition(".")
    if module.startswith("dflop.integrations."):
        package = module.split(".")[2]
        if package not in {"loader", "encoder", "padding", "loss", "script", "verl", "easyr1"}:
            others = {"energon": "megatron.energon", "nemo": "nemo_automodel"}
            pytest.importorskip(others.get(package, package))
    assert hasattr(importlib.import_module(module), attribute)


def known(section: str, tmp_path: Path) -> list[str]:
    """The fields of a section, as `dflop` lists them where it does not know one."""
    (tmp_path / "dflop.yaml").write_text(f"{section}: {{no_such_field_of_any_section: 1}}\n")
    asked = [sys.executable, "-m", "dflop", "plan"]
    said = subprocess.run(asked, cwd=tmp_path, capture_output=True, text=True).stderr
    names = re.search(r"no_such_field_of_any_section: unknown key, known are: (.*)$", said, flags=re.M)
    assert names, said
    return names[1].split(", ")


@pytest.mark.parametrize("section", SECTIONS)
def test_the_page_of_the_configuration_has_every_field(section: str, tmp_path: Path) -> None:
    page = (ROOT / "docs/configuration.md").read_text()
    rows = re.findall(r"^\| (`[^|]*) \|", page, flags=re.M)
    named = {name for row in rows for name in re.findall(rf"`{section}\.(\w+)`", row)}
    assert named == set(known(section, tmp_path))


def test_the_page_of_the_configuration_has_every_section(tmp_path: Path) -> None:
    (tmp_path / "dflop.yaml").write_text("no_such_section_at_all: 1\n")
    said = subprocess.run(
        [sys.executable, "-m", "dflop", "plan"], cwd=tmp_path, capture_output=True, text=True
    ).stderr
    names = re.search(r"no_such_section_at_all: unknown key, known are: (.*)$", said, flags=re.M)
    assert names, said
    assert names[1].split(", ") == SECTIONS
    assert (
        f"has {['six', 'seven', 'eight'][len(SECTIONS) - 6]} sections"
        in (ROOT / "docs/configuration.md").read_text()
    )


def test_rust_has_every_crate_that_is_documented() -> None:
    asked = ["cargo", "metadata", "--no-deps", "--format-version", "1", "--locked", "--offline"]
    found = json.loads(subprocess.run(asked, cwd=ROOT, capture_output=True, text=True, check=True).stdout)
    libraries = {
        target["name"]
        for package in found["packages"]
        if Path(package["manifest_path"]).is_relative_to(ROOT / "crates")
        for target in package["targets"]
        if "lib" in target["kind"]
    }
    page = (ROOT / "docs/reference/rust.md").read_text()
    assert len(libraries) >= 10
    assert set(re.findall(r'href="\.\./rust/(\w+)/index\.html"', page)) == libraries
