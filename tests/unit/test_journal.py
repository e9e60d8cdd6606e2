"""What a run writes: each line is there when its step ends, and a disk that has no room is named."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from dflop.runtime.journal import FILES, Journal

LIMITED = """
import pathlib, resource
from dflop.runtime.journal import Journal

journal = Journal(pathlib.Path("run"), 1)
journal.schedule({"step": 0, "text": "a" * 100})
# As a disk that becomes full: the file takes some bytes more, then none.
resource.setrlimit(resource.RLIMIT_FSIZE, (200, 200))
try:
    journal.schedule({"step": 1, "text": "b" * 100})
except OSError as error:
    print(error)
journal.close()
"""


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


def test_a_line_that_has_no_room_is_taken_back(tmp_path: Path) -> None:
    """The file ends in a whole line, and the error names it."""
    command = [sys.executable, "-c", LIMITED]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=300, check=True)
    assert done.stdout == "[Errno 27] File too large: 'run/schedules.jsonl'\n"
    assert (tmp_path / "run/schedules.jsonl").read_text() == json.dumps({"step": 0, "text": "a" * 100}) + "\n"


def test_an_earlier_run_is_there_until_a_step_has_ended(tmp_path: Path) -> None:
    """A run that comes to nothing leaves what was there; one that begins leaves nothing of it."""
    earlier = {f"{name}.jsonl": '{"step": 7}\n' for name in (*FILES, "memory")} | {"request.json": "{}"}
    for name, text in earlier.items():
        (tmp_path / name).write_text(text)
    (tmp_path / "tensorboard/blind").mkdir(parents=True)
    request = tmp_path / "request.new.json"
    request.write_text("new")
    Journal(tmp_path, 1, request).close()
    assert {name: (tmp_path / name).read_text() for name in earlier} == earlier
    journal = Journal(tmp_path, 1, request)
    assert not journal.has_begun
    journal.schedule({"step": 0})
    journal.close()
    assert journal.has_begun
    found = {path.name: path.read_text() for path in tmp_path.iterdir()}
    empty = dict.fromkeys(("metrics.jsonl", "trace.jsonl", "events.jsonl"), "")
    assert found == {**empty, "schedules.jsonl": '{"step": 0}\n', "request.json": "new"}


def test_a_run_keeps_copies_of_the_plans_that_its_steps_were_trained_with(tmp_path: Path) -> None:
    """Those of an earlier run go once a step has ended; a run that goes on keeps those before its own."""
    (tmp_path / "plan.0123456789ab.json").write_text("earlier")
    journal = Journal(tmp_path, 1, kept={"plan.first.json": b"first"})
    assert (tmp_path / "plan.0123456789ab.json").exists()
    journal.schedule({"step": 0})
    journal.close()
    assert sorted(path.name for path in tmp_path.glob("plan.*")) == ["plan.first.json"]
    journal = Journal(tmp_path, 1, first_step=1, kept={"plan.second.json": b"second"})
    journal.schedule({"step": 1})
    journal.close()
    found = {path.name: path.read_bytes() for path in tmp_path.glob("plan.*")}
    assert found == {"plan.first.json": b"first", "plan.second.json": b"second"}


def test_a_new_run_removes_what_dflop_wrote_and_nothing_of_the_users(tmp_path: Path, capsys) -> None:
    """A checkpoint that was copied beside those of the run, curves of another run, a plan that was kept by hand."""
    written = [f"checkpoints/{name}" for name in ("step-2", "step-4", "step-6.new", "step-8.undone")]
    written += ["tensorboard/aware", "tensorboard/blind-ahead", "tensorboard/aware-rehearsed"]
    own = ["checkpoints/best", "checkpoints/step-4-best", "tensorboard/last week"]
    for folder in (*written, *own):
        (tmp_path / folder).mkdir(parents=True)
        (tmp_path / folder / "file").write_text(folder)
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    (elsewhere / "file").write_text("weights")
    (tmp_path / "checkpoints/step-10").symlink_to(elsewhere)
    for name in ("plan.mine.json", "plan.0123456789ab.json", "model_profile.0123456789ab.json"):
        (tmp_path / name).write_text(name)
    journal = Journal(tmp_path, 1)
    journal.schedule({"step": 0})
    journal.close()
    for folder in own:
        assert (tmp_path / folder / "file").read_text() == folder
    left = {
        str(path.relative_to(tmp_path))
        for top in ("checkpoints", "tensorboard")
        for path in (tmp_path / top).iterdir()
    }
    assert left == set(own)
    assert (elsewhere / "file").read_text() == "weights"
    assert sorted(path.name for path in tmp_path.glob("*.json")) == ["plan.mine.json"]
    said = capsys.readouterr().err
    assert all(f"`{tmp_path / folder}`" in said for folder in own), said
    assert "not of dflop, left as they are" in said


def test_a_run_that_goes_on_leaves_the_users_own_checkpoints(tmp_path: Path) -> None:
    """Later checkpoints move out of the way, half ones go; a copy of another name stays."""
    for name in ("step-2", "step-4", "step-6.new", "step-best.new", "best"):
        (tmp_path / "checkpoints" / name).mkdir(parents=True)
    journal = Journal(tmp_path, 4, first_step=2)
    journal.schedule({"step": 2})
    journal.close()
    left = sorted(path.name for path in (tmp_path / "checkpoints").iterdir())
    assert left == ["best", "step-2", "step-4.undone", "step-best.new"]
