"""When torchrun's agent starts ranks again, and from where they go on; `test_command.py` has a real kill."""

from __future__ import annotations

import json
import os
from pathlib import Path
from types import SimpleNamespace

import pytest

from dflop._native import ScheduleError
from dflop.runtime.agent import Restarts, told
from dflop.runtime.failure import NAMES_CAUSE, RankError, complain, is_hopeless, tell_agent
from dflop.runtime.resume import MANIFEST, request_of, step_dir, was_started_again


def failure(status, **about):
    """A rank that ended, as torchrun tells it."""
    data = {"message": {"message": "", "extraInfo": {"timestamp": "1", **about}}} if about else {}
    return SimpleNamespace(exitcode=status, error_file_data=data)


KILLED, LEFT_ALONE, REFUSED = failure(-9), failure(1, is_hopeless=False), failure(1, is_hopeless=True)


def checkpoint(out, step):
    """What a run has saved, as far as its directory's name goes."""
    step_dir(out, step).mkdir(parents=True)


@pytest.fixture(autouse=True)
def not_restarted(monkeypatch):
    """What the agent sets in its own process is undone: ranks of later tests would count as started again."""
    monkeypatch.setenv("DFLOP_RESTARTED", "0")
    monkeypatch.delenv("DFLOP_RESTARTED")


def test_restarts_are_counted_from_the_newest_checkpoint(tmp_path, capsys):
    """Two in a row; a checkpoint begins the count anew."""
    restarts = Restarts({"max_restarts": 2, "out": str(tmp_path)})
    assert restarts.may_restart([KILLED, LEFT_ALONE])
    assert os.environ["DFLOP_RESTARTED"] == "1"
    assert restarts.may_restart([KILLED])
    checkpoint(tmp_path, 10)
    assert restarts.may_restart([LEFT_ALONE])
    assert restarts.may_restart([KILLED])
    assert not restarts.may_restart([KILLED])
    said = capsys.readouterr().err.splitlines()
    assert said == [
        "restart 1 of 2: the ranks go on from the beginning",
        "restart 2 of 2: the ranks go on from the beginning",
        "restart 1 of 2: the ranks go on from step 10",
        "restart 2 of 2: the ranks go on from step 10",
        "hint: 2 restarts in a row came to no new checkpoint",
    ]


def test_what_would_be_refused_again_is_not_tried_again(tmp_path):
    """A damaged checkpoint, a full disk; and nothing is without leave."""
    assert not Restarts({"max_restarts": 2, "out": str(tmp_path)}).may_restart([LEFT_ALONE, REFUSED])
    assert not Restarts({}).may_restart([KILLED])


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (RankError("cannot save", is_of_all=True), True),
        (RankError("a list that cannot run"), True),
        (RankError("no message from rank 1", is_of_other=True), False),
        (ScheduleError("a plan of others"), True),
        (RuntimeError("CUDA error: an illegal memory access"), False),
        (OSError("a disk that is gone for a moment"), False),
    ],
)
def test_a_rank_tells_its_agent_whether_to_try_again(error, expected, tmp_path, monkeypatch):
    """In the file that torchrun names, in its own form."""
    assert is_hopeless(error) == expected
    path = tmp_path / "error.json"
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(path))
    tell_agent("[llm] step 3: it", error)
    message = json.loads(path.read_text())["message"]
    assert message["message"] == "[llm] step 3: it"
    assert message["extraInfo"]["is_hopeless"] == expected
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(tmp_path / "no folder/error.json"))
    tell_agent("a disk without room", error)


def test_of_ranks_that_fail_together_the_cause_alone_is_an_error(tmp_path, monkeypatch, capsys):
    """Ranks that waited for another say so in a note. Where none was killed, what the first said is the error."""
    waited, broken = (
        RankError("no message from rank 1", is_of_other=True),
        RankError("a list that cannot run"),
    )

    def ended(number, status, error=None):
        """Rank `number`, as torchrun tells its end."""
        data = {}
        if error is not None:
            path = tmp_path / f"{number}.json"
            monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(path))
            complain(f"[rank {number}] {error}", error)
            tell_agent(f"[rank {number}] {error}", error)
            data = json.loads(path.read_text())
        return SimpleNamespace(exitcode=status, error_file_data=data, timestamp=number)

    def errors(*failures):
        told(dict(enumerate(failures)))
        lines = capsys.readouterr().err.splitlines()
        return [line for line in lines if line.startswith("error: ")], lines

    monkeypatch.setenv(NAMES_CAUSE, "1")
    found, lines = errors(ended(0, 1, waited), ended(1, -9), ended(2, 1, waited))
    assert found == ["error: rank 1 was killed by SIGKILL"]
    assert lines.count("note: [rank 0] no message from rank 1") == 1
    found, _ = errors(ended(0, 1, waited), ended(1, 1, broken))
    assert found == ["error: [rank 1] a list that cannot run"]
    found, _ = errors(ended(0, 1, waited), ended(1, 1, waited))
    assert found == ["error: [rank 0] no message from rank 1"]
    # Torchrun of the user's own says no cause.
    monkeypatch.delenv(NAMES_CAUSE)
    complain("[rank 0] no message from rank 1", waited)
    assert capsys.readouterr().err == "\nerror: [rank 0] no message from rank 1\n"


@pytest.mark.parametrize(
    ("asked", "has_begun", "has_saved", "expected"),
    [
        (None, False, False, None),
        # Checkpoints of an earlier run that this one, by `--force`, has not yet removed.
        (None, False, True, None),
        (None, True, False, "auto"),
        (None, True, True, "auto"),
        ("auto", True, False, "auto"),
        ("other/checkpoints/step-4", True, False, "other/checkpoints/step-4"),
        ("other/checkpoints/step-4", True, True, "auto"),
    ],
)
def test_where_ranks_go_on_that_were_started_again(
    asked, has_begun, has_saved, expected, tmp_path, monkeypatch
):
    """From what the run itself has kept, once it has begun; else as it was asked."""
    monkeypatch.setenv("DFLOP_RESTARTED", "1")
    fresh = tmp_path / "request.new.json"
    request = json.dumps({"out": str(tmp_path), "resume": asked, "request_path": str(fresh)})
    fresh.write_text(request)
    if has_begun:
        fresh.rename(tmp_path / "request.json")
    if has_saved:
        checkpoint(tmp_path, 2)
        (step_dir(tmp_path, 2) / MANIFEST).touch()
    found = request_of(fresh)
    assert found["resume"] == expected
    assert Path(found["request_path"]).exists()
    monkeypatch.delenv("DFLOP_RESTARTED")
    fresh.write_text(request)
    assert request_of(fresh)["resume"] == asked


@pytest.mark.parametrize(
    ("environment", "expected"),
    [
        ({}, False),
        # The first start, and the second, by an external torchrun.
        ({"TORCHELASTIC_RESTART_COUNT": "0"}, False),
        ({"TORCHELASTIC_RESTART_COUNT": "1"}, True),
        # dflop's agent starts torchrun itself again, whose own count stays.
        ({"DFLOP_RESTARTED": "1", "TORCHELASTIC_RESTART_COUNT": "0"}, True),
    ],
)
def test_ranks_know_that_they_were_started_again(environment, expected, monkeypatch):
    """So a rehearsal kills a rank once, whoever starts the ranks."""
    for name in ("DFLOP_RESTARTED", "TORCHELASTIC_RESTART_COUNT"):
        monkeypatch.delenv(name, raising=False)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    assert was_started_again() == expected
