"""The benchmark of correction: what is said to be lost and won back, by hand."""

import importlib.util
import sys
from pathlib import Path

import pytest

FOLDER = Path(__file__).parents[2] / "benches"


@pytest.fixture(scope="module")
def bench():
    # Its siblings are found as they are when the script is run.
    sys.path.insert(0, str(FOLDER))
    try:
        spec = importlib.util.spec_from_file_location("bench_adapt", FOLDER / "adapt.py")
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
    finally:
        sys.path.remove(str(FOLDER))
    return module


def test_what_comes_back_is_a_part_of_what_was_lost(bench):
    """40 of 200 are lost, 30 of them come back; every step loses a fifth, so the interval is a point."""
    row = bench.recovered({"quiet": [100, 100], "off": [120, 120], "auto": [105, 105]})
    assert (row["lost"], row["lost_corrected"]) == (pytest.approx(0.2), pytest.approx(0.05))
    assert row["recovered"] == pytest.approx(0.75)
    assert row["recovered_interval"] == [pytest.approx(0.75)] * 2


def test_nothing_comes_back_of_nothing(bench):
    row = bench.recovered({"quiet": [1000, 1000], "off": [1005, 1005], "auto": [900, 900]})
    assert (row["recovered"], row["recovered_interval"]) == (None, None)


def test_the_interval_holds_what_steps_disagree_on(bench):
    row = bench.recovered({"quiet": [100] * 8, "off": [200] * 8, "auto": [100, 200] * 4})
    low, high = row["recovered_interval"]
    assert row["recovered"] == pytest.approx(0.5)
    assert 0 <= low <= 0.25
    assert 0.75 <= high <= 1


def test_the_step_after_which_correction_rested_is_the_first(bench):
    def event(step, decision):
        return {"step": step, "kind": "correction", "decision": decision, "saved_ns": 1, "cost_ns": 2}

    events = [event(31, "keep"), {"step": 40, "kind": "alarm"}, event(63, "rest"), event(95, "rest")]
    answer = bench.decisions(events)
    assert answer["off_after_step"] == 63
    assert [one["decision"] for one in answer["decisions"]] == ["keep", "rest", "rest"]
    assert bench.decisions(events[:2])["off_after_step"] is None
