"""The log of experiments: newest first, and each topic of its table once."""

from __future__ import annotations

import re
from pathlib import Path

LOG = (Path(__file__).resolve().parents[2] / "docs/log.md").read_text()


def test_entries_are_newest_first() -> None:
    days = re.findall(r"^## (\S+)", LOG, flags=re.M)
    assert len(days) > 20
    assert all(re.match(r"20\d\d-\d\d-\d\d", day) for day in days)
    assert [day[:10] for day in days] == sorted((day[:10] for day in days), reverse=True)


def test_each_topic_has_one_row_that_links_to_entries() -> None:
    table, *_ = LOG.split("\n## ")
    rows = re.findall(r"^\| (?!topic)([^|]+) \| (.*) \|$", table, flags=re.M)
    topics = [topic for topic, _ in rows]
    assert len(topics) == len(set(topics)) > 10
    for topic, links in rows:
        days = [int(day) for day in re.findall(r"\((\d+)\)\]\(#20", links)]
        assert days, topic
        assert days == sorted(days, reverse=True), topic
