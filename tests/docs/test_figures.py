"""Each concept page has a figure, which is what `tools/figures.py` draws."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from xml.etree import ElementTree

import pytest

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "tools"))

from figures import FIGURES  # noqa: E402


def concepts() -> list[str]:
    """The concept pages, as the site's contents list them."""
    listed = re.search(r"  - Concepts:\n((?:      - .*\n)+)", (ROOT / "mkdocs.yml").read_text())
    assert listed
    return [page.removesuffix(".md") for page in re.findall(r": (\S+)$", listed[1], flags=re.M)]


def test_each_concept_has_a_figure() -> None:
    assert set(concepts()) == set(FIGURES)
    assert {path.stem for path in (ROOT / "docs/figures").glob("*")} == set(FIGURES)


@pytest.mark.parametrize("name", sorted(FIGURES))
def test_a_figure_is_as_drawn_and_told_in_words(name: str) -> None:
    text = (ROOT / f"docs/figures/{name}.svg").read_text()
    assert text == FIGURES[name](), "run `python tools/figures.py`"
    label = ElementTree.fromstring(text).attrib["aria-label"]
    assert f"![{label}](figures/{name}.svg)" in (ROOT / f"docs/{name}.md").read_text()
