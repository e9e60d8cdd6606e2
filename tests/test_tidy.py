"""House rules that no linter knows: paths exist, no stray markers, files are rooms and not halls."""

from __future__ import annotations

import re
import subprocess
from collections import Counter
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


def anchors(page: Path) -> set[str]:
    """The names of a page's headings, as GitHub and the site make them."""
    text = re.sub(r"^```.*?^```", "", page.read_text(), flags=re.S | re.M)
    titles = re.findall(r"^#+ (.*)$", text, flags=re.M)
    return {re.sub(r"[^\w\- ]", "", title.lower()).strip().replace(" ", "-") for title in titles}


@pytest.mark.parametrize("page", [p.relative_to(ROOT).as_posix() for p in tracked("*.md")])
def test_links_into_a_page_name_one_of_its_headings(page: str) -> None:
    text = re.sub(r"```.*?```", "", (ROOT / page).read_text(), flags=re.S)
    missing = []
    for path, anchor in re.findall(r"\]\(([^)#\s]*)#([^)]+)\)", text):
        if "://" not in path and not path.endswith(".rs"):
            target = (ROOT / page).parent / path if path else ROOT / page
            if anchor not in anchors(target):
                missing.append(f"{path}#{anchor}")
    assert not missing, f"{page} links to no heading: {missing}"


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
    halls = {name for name, lines in sizes.items() if lines > 500}
    assert not halls, "a file past 500 lines is two"


def test_sources_are_ascii() -> None:
    bad = [p.relative_to(ROOT).as_posix() for p in tracked("*.rs", "*.py") if not p.read_text().isascii()]
    assert not bad


def rooms_of_the_data_crate() -> dict[str, set[str]]:
    """What each room of `crates/data` may import, as the table in its `lib.rs` says."""
    text = (ROOT / "crates/data/src/lib.rs").read_text()
    rows = re.findall(r"^//! \| `(\w+)` \|[^|]*\|([^|]*)\|$", text, flags=re.M)
    return {room: set(re.findall(r"`(\w+)`", names)) for room, names in rows}


def test_rooms_of_the_data_crate_have_an_order() -> None:
    """No room may import, through others, itself; and every directory is a room."""
    rooms = rooms_of_the_data_crate()
    assert set(rooms) == {p.name for p in (ROOT / "crates/data/src").iterdir() if p.is_dir()}
    done: set[str] = set()
    while ready := {room for room, may in rooms.items() if room not in done and may <= done}:
        done |= ready
    assert done == set(rooms), f"these import each other: {sorted(set(rooms) - done)}"


@pytest.mark.parametrize("room", sorted(rooms_of_the_data_crate()))
def test_a_room_of_the_data_crate_imports_what_its_row_names(room: str) -> None:
    src = ROOT / "crates/data/src"
    allowed = rooms_of_the_data_crate()[room] | {room, "DataError"} | {p.stem for p in src.glob("*.rs")}
    bad = []
    for path in sorted((src / room).rglob("*.rs")):
        if path.name == "tests.rs":
            continue
        code = path.read_text().split("#[cfg(test)]\nmod tests {")[0]
        named = set(re.findall(r"^(?!\s*//).*?\bcrate::(\w+)", code, flags=re.M))
        assert "use crate::{" not in code, f"{path.name}: one line a room"
        bad += [f"{path.relative_to(src)}: crate::{name}" for name in sorted(named - allowed)]
    assert not bad, f"`{room}` may import {sorted(rooms_of_the_data_crate()[room])}"


def test_root_files_of_the_data_crate_import_no_room() -> None:
    rooms = set(rooms_of_the_data_crate())
    for path in (ROOT / "crates/data/src").glob("*.rs"):
        if path.name != "lib.rs":
            assert not rooms & set(re.findall(r"\bcrate::(\w+)", path.read_text())), path.name


def test_no_two_test_files_have_one_name() -> None:
    """By it pytest imports them: the second would end the whole run, while each folder by itself passes."""
    names = Counter(path.name for path in (ROOT / "tests").rglob("test_*.py"))
    assert [name for name, count in names.items() if count > 1] == []


@pytest.mark.parametrize("main", [p.relative_to(ROOT).as_posix() for p in tracked("crates/*/tests/main.rs")])
def test_every_file_of_a_test_binary_is_named_in_it(main: str) -> None:
    """Cargo builds no other file of the folder (`autotests = false`): one that is not named would not run."""
    folder = (ROOT / main).parent
    assert "autotests = false\n" in (folder.parent / "Cargo.toml").read_text()
    named = set(re.findall(r"^mod (\w+);$", (ROOT / main).read_text(), flags=re.M))
    assert {path.stem for path in folder.glob("*.rs")} - {"main"} <= named
