"""House rules that no linter knows: paths exist, no stray markers, files are rooms and not halls."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent


def tracked(*patterns: str) -> list[Path]:
    """Files git knows of, or would after `git add`, that match the patterns."""
    listed = subprocess.run(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard", *patterns],
        cwd=ROOT,
        check=True,
        capture_output=True,
        text=True,
    ).stdout.split("\n")
    return [ROOT / name for name in listed if name and (ROOT / name).is_file()]


@pytest.mark.parametrize("page", [p.relative_to(ROOT).as_posix() for p in tracked("*.md")])
def test_links_of_a_page_exist(page: str) -> None:
    text = (ROOT / page).read_text()
    text = re.sub(r"```.*?```", "", text, flags=re.S)
    links = re.findall(r"\]\(([^)#\s]+)(?:#[^)]*)?\)", text)
    missing = [x for x in links if "://" not in x and not ((ROOT / page).parent / x).exists()]
    assert not missing, f"{page} links to what does not exist: {missing}"


@pytest.mark.parametrize("page", ["README.md", "CONTRIBUTING.md", "docs/tour.md"])
def test_paths_a_page_names_exist(page: str) -> None:
    text = (ROOT / page).read_text()
    named = re.findall(r"`((?:crates|python|tests|docs|fixtures|examples|results)/[\w./-]+)`", text)
    # NAME stands for what the reader is to choose.
    missing = [x for x in named if "NAME" not in x and not (ROOT / x).exists()]
    assert not missing, f"{page} names what does not exist: {missing}"


def test_todo_has_an_issue_and_fixme_is_never_merged() -> None:
    bad = []
    for path in tracked("*.rs", "*.py", "Makefile"):
        if path == Path(__file__):
            continue
        for number, line in enumerate(path.read_text().splitlines(), 1):
            if "FIXME" in line or re.search(r"TODO(?!\(#\d+\):)", line):
                bad.append(f"{path.relative_to(ROOT)}:{number}")
    assert not bad


def test_no_file_is_a_hall() -> None:
    sizes = {p.relative_to(ROOT).as_posix(): len(p.read_text().splitlines()) for p in tracked("*.rs", "*.py")}
    halls = {name: lines for name, lines in sizes.items() if lines > 600}
    assert not halls, "a file past 600 lines is two"


def test_sources_are_ascii() -> None:
    bad = [p.relative_to(ROOT).as_posix() for p in tracked("*.rs", "*.py") if not p.read_text().isascii()]
    assert not bad
