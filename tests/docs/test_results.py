"""The table of all numbers: sorted by topic and date, and each row names what made it."""

from __future__ import annotations

import re
from itertools import groupby
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
ROW = re.compile(r"^\| (?P<topic>[^|]+) \| (?P<command>[^|]+) \| (?P<date>[^|]+) \| (?P<showed>[^|]+) \|$")


def rows() -> list[dict[str, str]]:
    """The rows of the table, in order."""
    text = (ROOT / "results/README.md").read_text()
    table = re.search(r"^\| topic \| command \|.*\n\|[-|]+\|\n((?:\|.*\n)+)", text, flags=re.M)
    assert table
    found = [ROW.match(line) for line in table[1].splitlines()]
    assert all(found)
    return [row.groupdict() for row in found if row]


def test_topics_stand_together_and_their_newest_row_first() -> None:
    groups = [(topic, list(group)) for topic, group in groupby(rows(), key=lambda row: row["topic"])]
    topics = [topic for topic, _ in groups]
    assert len(topics) == len(set(topics)) > 10
    for topic, group in groups:
        dates = [re.match(r"20\d\d-\d\d-\d\d", row["date"]) for row in group]
        assert all(dates), topic
        days = [date[0] for date in dates if date]
        assert days == sorted(days, reverse=True), topic


@pytest.mark.parametrize("row", rows(), ids=lambda row: f"{row['topic']}-{row['command'][:30]}")
def test_each_row_has_a_command_that_is_there(row: dict[str, str]) -> None:
    """What was done by hand says so; a target or a script that is named exists."""
    if row["command"] == "by hand, the script was not kept":
        return
    targets = re.findall(r"`make ([a-z-]+)", row["command"])
    scripts = re.findall(r"benches/\w+\.py", row["command"])
    examples = re.findall(r"-p dflop-(\w+) --example (\w+)", row["command"])
    assert targets or scripts or examples or "`dflop " in row["command"]
    makefile = (ROOT / "Makefile").read_text()
    assert not [target for target in targets if not re.search(rf"^{target}:", makefile, flags=re.M)]
    files = [*scripts, *(f"crates/{crate}/examples/{name}.rs" for crate, name in examples)]
    assert not [file for file in files if not (ROOT / file).exists()]
