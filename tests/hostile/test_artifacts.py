"""Files between the verbs, and the configuration, in the form that an attacker or a fault gives them."""

from __future__ import annotations

import json
import os
import random
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from conftest import Answer

READERS = {
    "model_profile.json": [["plan"], ["show", "model_profile"], ["simulate"], ["report", "."]],
    "plan.json": [["show", "plan"], ["simulate"], ["report", "."]],
    "data_profile.parquet": [["show", "data_profile"], ["plan"], ["report", "."]],
    "dflop.yaml": [["plan"], ["profile", "data"]],
}
"""Who reads each file."""


def numbers(value: Any, place: tuple = ()) -> list[tuple]:
    """The places of all whole numbers in a document."""
    if isinstance(value, bool):
        return []
    if isinstance(value, int):
        return [place]
    inner = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    return [found for key, item in inner for found in numbers(item, (*place, key))]


def changed(value: Any, place: tuple, number: int) -> Any:
    """The document with another number at a place."""
    document = json.loads(json.dumps(value))
    at = document
    for key in place[:-1]:
        at = at[key]
    at[place[-1]] = number
    return document


@pytest.mark.some(1)
@pytest.mark.parametrize("name", ["model_profile.json", "plan.json"])
def test_numbers_at_the_ends_of_their_types(name: str, planned: Path, dflop: Callable[..., Answer]) -> None:
    """Numbers of a file, drawn by seed, become 2^63 and the like: it is refused or used, no crash."""
    good = json.loads((planned / name).read_text())
    rng = random.Random(name)
    places = numbers(good)
    for number in (2**63, 2**64 - 1, 2**53, 0):
        document = changed(good, rng.choice(places), number)
        (planned / name).write_text(json.dumps(document))
        for verb in READERS[name]:
            answer = dflop(*verb)
            assert answer.is_sound, (number, verb, answer)


@pytest.mark.some(1)
@pytest.mark.parametrize("name", READERS)
def test_damaged_files(name: str, planned: Path, dflop: Callable[..., Answer]) -> None:
    """A file cut short, empty, of other bytes or of endless brackets is refused by name."""
    good = (planned / name).read_bytes()
    for bad in (b"", good[: len(good) // 2], b"\xff" * 64, b"[" * 200_000, b'{"a":' * 100_000):
        (planned / name).write_bytes(bad)
        for verb in READERS[name]:
            answer = dflop(*verb)
            assert answer.is_sound, (bad[:8], verb, answer)
            # Half a configuration may be a whole one for a verb that needs half of the sections.
            if name != "dflop.yaml" or bad[:8] != good[:8]:
                assert answer.refuses(name), (bad[:8], verb, answer)


@pytest.mark.parametrize("name", READERS)
def test_files_that_never_end(name: str, planned: Path, dflop: Callable[..., Answer]) -> None:
    """A pipe in the place of a file is refused: waiting for a writer would hang."""
    (planned / name).unlink()
    os.mkfifo(planned / name)
    for verb in READERS[name]:
        answer = dflop(*verb)
        assert answer.refuses(name), (verb, answer)


def test_no_file_that_dflop_did_not_write_is_replaced(planned: Path, dflop: Callable[..., Answer]) -> None:
    config = planned / "model/config.json"
    before = config.read_bytes()
    for verb in (["plan"], ["profile", "data"], ["report", "."]):
        assert dflop(*verb, "--out", "model/config.json").refuses("model/config.json")
    assert config.read_bytes() == before


def test_a_run_of_another_plan_is_not_reported(planned: Path, dflop: Callable[..., Answer]) -> None:
    """What a run says of its plan is compared with the plan beside it."""
    run = planned / "run"
    run.mkdir()
    schedule = {"step": 0, "llm": [], "encoder": [], "label_tokens": 0}
    schedule |= {"predicted_makespan_ns": 0, "max_load_ns": 0, "lower_bound_ns": 0}
    line = {"step": 0, "arm": "aware", "samples": [], "schedule": schedule}
    line["made_from"] = {"plan": "sha256:0", "data_profile": "sha256:0"}
    (run / "schedules.jsonl").write_text(json.dumps(line) + "\n")
    metrics = {"step": 0, "arm": "aware", "loss": 1.0, "step_ns": 9, "predicted_ns": 9, "bubble_ratio": 0.5}
    (run / "metrics.jsonl").write_text(json.dumps(metrics) + "\n")
    assert dflop("report", ".").refuses("schedules.jsonl", "was made from another")
    (run / "schedules.jsonl").unlink()
    (run / "metrics.jsonl").write_text(json.dumps(metrics | {"step_ns": 2**63}) + "\n")
    assert dflop("report", ".").refuses("metrics.jsonl", "step_ns: 9223372036854775808, must be at most")
