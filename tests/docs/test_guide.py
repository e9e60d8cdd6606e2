"""Each page of the guide is walked as a reader would: its `sh` blocks in order in an empty directory, its Python blocks after them.

Blocks marked `console` or `yaml` are shown, not run. Walking all pages takes minutes, so `make site` does it, `make test` does not.
"""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest
from walking import walk

GUIDE = Path(__file__).parent.parent.parent / "docs" / "guide"
BLOCK = re.compile(r"^```(sh|python)\n(.*?)^```", flags=re.S | re.M)


def blocks(page: Path) -> list[tuple[str, str]]:
    """Language and text of what runs on a page, in order."""
    return BLOCK.findall(page.read_text())


WALKED = sorted(page.name for page in GUIDE.glob("*.md") if blocks(page))


def test_the_guide_has_pages_to_walk() -> None:
    assert {"quick_start.md", "dataset.md", "cluster.md", "resume.md"} <= set(WALKED)


def test_a_slow_step_is_looked_for_in_sections_that_the_report_has() -> None:
    named = re.findall(r"\*\*([^*]+)\*\*", (GUIDE / "slow_step.md").read_text())
    pages = (GUIDE.parent.parent / "crates" / "report" / "src").rglob("*.rs")
    sections = set(re.findall(r'name: "([^"]+)"', "".join(path.read_text() for path in pages)))
    assert len(named) > 3
    assert not set(named) - sections


def test_the_demo_has_as_many_samples_as_the_quick_start_says() -> None:
    said = re.search(r"`demo` now holds (\d+) samples", (GUIDE / "quick_start.md").read_text())
    assert said
    command = [sys.executable, "-m", "dflop", "demo-data", "--help"]
    shown = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    assert f"[default: {said[1]}]" in shown


@pytest.mark.site
@pytest.mark.parametrize("page", WALKED)
def test_a_page_works_as_written(page: str, tmp_path: Path) -> None:
    # Pages name scripts of a clone.
    (tmp_path / "examples").symlink_to(GUIDE.parent.parent / "examples")
    walk(blocks(GUIDE / page), tmp_path)
