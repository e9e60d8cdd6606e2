"""What a run writes: each line is there when its step ends, and a disk that has no room is named."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import pytest

from dflop.runtime.journal import Journal

if TYPE_CHECKING:
    from pathlib import Path


def test_a_line_is_on_disk_as_soon_as_it_is_written(tmp_path: Path) -> None:
    """Read again while the journal is still open."""
    journal = Journal(tmp_path, 1)
    journal.schedule({"step": 0})
    assert [json.loads(line) for line in (tmp_path / "schedules.jsonl").open()] == [{"step": 0}]
    journal.close()


def test_a_full_disk_names_the_file(tmp_path: Path) -> None:
    """`/dev/full` takes no byte; its error alone says no path."""
    (tmp_path / "schedules.jsonl").symlink_to("/dev/full")
    journal = Journal(tmp_path, 1)
    with pytest.raises(OSError, match=r"No space left on device: .*schedules\.jsonl"):
        journal.schedule({"step": 0})
