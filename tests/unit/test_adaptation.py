"""When schedules are corrected: as long as that saves more than it costs."""

from __future__ import annotations

import json

import pytest

from dflop.runtime import records
from dflop.runtime.adaptation import REST, WINDOW, Adaptation


def run(adaptation, num_steps, saved_ns, cost_ns, first=0):
    """Steps that the correction makes shorter by `saved_ns`, and learning from which costs `cost_ns`."""
    decisions = []
    for step in range(first, first + num_steps):
        corrected, compared = adaptation.asks()
        learned = adaptation.is_monitored(step)
        events = adaptation.after(
            step,
            {"rows": []} if corrected else None,
            (10_000_000, 10_000_000 - saved_ns) if compared else None,
            10_000_000,
            1_000 + (cost_ns if learned else 0),
        )
        decisions += [(step, event["decision"], event) for event in events]
    return decisions


def test_it_stays_on_while_it_pays():
    """Each window ends in a decision that holds its numbers."""
    decisions = run(Adaptation("auto"), 4 * WINDOW, 500_000, 40_000)
    assert [(step, name) for step, name, _ in decisions] == [(WINDOW * k - 1, "keep") for k in (1, 2, 3, 4)]
    event = decisions[0][2]
    assert event["saved_ns"] == 500_000
    assert event["cost_ns"] == 40_000
    assert event["num_compared"] == WINDOW // 4
    assert "saves 0.50 ms a step and costs 0.04 ms" in event["words"]


def test_it_rests_where_it_does_not_pay_and_tries_again():
    """Off after a window, and again after a rest and another window."""
    adaptation = Adaptation("auto")
    decisions = run(adaptation, 2 * WINDOW + REST, 30_000, 40_000)
    names = [(step, name) for step, name, _ in decisions]
    again = WINDOW + REST - 1
    assert names == [(WINDOW - 1, "rest"), (again, "watch"), (again + WINDOW, "rest")]
    # While it rests, nothing is corrected, compared or learned from.
    assert adaptation.is_resting
    assert adaptation.asks() == (False, False)
    assert not any(adaptation.is_monitored(step) for step in range(20))


def test_an_alarm_ends_a_rest():
    """What did not pay may pay now."""
    adaptation = Adaptation("auto")
    run(adaptation, WINDOW, 0, 40_000)
    adaptation.wake()
    assert [name for _, name, _ in run(adaptation, 1, 0, 0, WINDOW)] == ["watch"]
    assert adaptation.asks()[0]


@pytest.mark.parametrize("saved_ns", [30_000, 500_000])
def test_a_run_that_goes_on_decides_as_one_that_never_ended(saved_ns):
    """Kept through JSON between any two steps, in a window and in a rest."""
    whole = run(Adaptation("auto"), 3 * WINDOW + REST, saved_ns, 40_000)
    adaptation, parts, first = Adaptation("auto"), [], 0
    for num_steps in (5, WINDOW, 40, 3 * WINDOW + REST - 45 - WINDOW):
        parts += run(adaptation, num_steps, saved_ns, 40_000, first)
        first += num_steps
        state = json.loads(json.dumps(adaptation.state()))
        adaptation = Adaptation("auto")
        adaptation.load(state)
    assert parts == whole
    # Who asks for something else decides anew.
    other = Adaptation("on")
    other.load(state)
    assert other.asks() == (True, False)


@pytest.mark.parametrize(("mode", "is_on"), [("on", True), ("off", False)])
def test_a_fixed_mode_decides_nothing(mode, is_on):
    """`on` corrects each step, `off` none; neither compares."""
    adaptation = Adaptation(mode)
    assert run(adaptation, REST, 0, 40_000) == []
    assert adaptation.asks() == (is_on, False)
    assert adaptation.is_monitored(7) is is_on


def test_a_checkpoint_is_read_in_its_form_and_in_an_earlier_one():
    """Of sums by shape bin, as earlier versions kept them, no pack can be had again: ranks alone are read."""

    class Scheduler:
        def correct_by(self, steps, packs):
            self.read = (steps, packs)

    def read(kept):
        scheduler = Scheduler()
        records.restore({"correction": json.loads(json.dumps(kept))}, scheduler, None, None)
        return scheduler.read

    steps = [([(0, "F", 10, 12, 1.2)], 5, -3)]
    packs = [[[(0.5, 1.0, [(729, 729), (1458, 729)])], []], []]
    assert read((steps, packs)) == (steps, packs)
    assert read(([], [[], []])) == ([], [[], []])
    # One number of what follows the actions, as earlier versions kept it.
    assert read(([([(0, "F", 10, 12, 1.2)], 5)], packs)) == ([([(0, "F", 10, 12, 1.2)], 5, None)], packs)
    assert read((steps, [([0.5], [0.1], (1.0, 0.1), [3])] * 2)) == (steps, [[], []])
