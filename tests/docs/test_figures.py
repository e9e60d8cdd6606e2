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


def test_the_picture_of_the_report_is_small_and_said_to_be_made_up() -> None:
    """`make picture` draws it; a page that shows it says that nothing in it was measured."""
    picture = ROOT / "docs/report.png"
    assert picture.read_bytes().startswith(b"\x89PNG")
    assert picture.stat().st_size < 150_000
    for page in ("docs/report.md", "docs/guide/quick_start.md"):
        _, after = re.split(r"!\[[^\]]+\]\((?:\.\./)?report\.png\)\n\n", (ROOT / page).read_text())
        assert "made-up numbers" in after.splitlines()[0], page
