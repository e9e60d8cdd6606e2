"""Ranks of `make bench-adapt`: slow samples sleep in a real training run, and monitoring is switched off and on."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import pytest
from demo_run import request, run_training, write_demo
from ranks import results

BENCHES = Path(__file__).parents[2] / "benches"
NUM_SAMPLES, BATCH = 24, 12


@pytest.fixture(scope="module")
def demo(tmp_path_factory):
    return write_demo(tmp_path_factory.mktemp("altered") / "demo", NUM_SAMPLES, BATCH, 4)


def found(demo, tmp_path, asked):
    """What the two ranks of an altered run found."""
    path, out = tmp_path / "altered.json", tmp_path / "found.json"
    path.write_text(json.dumps({**asked, "out": str(out)}))

    def alter(index):
        del index
        os.environ["ALTERED"] = str(path)
        sys.path.insert(0, str(BENCHES))
        from altered_rank import AlteredTrainer

        from dflop.runtime import rank

        rank.Trainer = AlteredTrainer

    assert results(run_training(request(demo, tmp_path / "run"), tmp_path, alter)) == [0, 0]
    return json.loads(out.read_text())


@pytest.mark.more
def test_slow_samples_sleep_as_long_as_was_drawn(demo, tmp_path):
    """Two steps are an epoch: each slow sample sleeps once in its forward and once in its backward."""
    asked = {"slow": [[0.2, 4.0], [0.1, 2.0]], "steps": 3, "counted": 1}
    first, second = found(demo, tmp_path, asked)
    assert (first["slow_samples"], second["slow_samples"]) == (5, 2)
    # Of the same schedule, so the longest stage is the same.
    assert first["added_ms"] == pytest.approx([2 * ms for ms in second["added_ms"]], rel=1e-3)
    for row in (first, second):
        assert {way: len(ns) for way, ns in row["steps_ns"].items()} == {"auto": 2, "off": 2, "quiet": 2}
        slept_ns = 1e6 * row["slow_samples"] * sum(row["added_ms"])
        assert slept_ns > 0
        assert sum(row["steps_ns"]["off"]) >= slept_ns
        assert sum(row["steps_ns"]["auto"]) >= slept_ns


@pytest.mark.more
def test_each_batch_is_trained_with_and_without_monitoring(demo, tmp_path):
    answer = found(demo, tmp_path, {"monitored": 3})
    assert {way: len(ns) for way, ns in answer["steps_ns"].items()} == {"on": 3, "off": 3}
    assert all(spent > 0 for spent in answer["monitoring_ns"])
    # Only the steps that were monitored are written, each once.
    written = (tmp_path / "run/metrics.jsonl").read_text().splitlines()
    assert [json.loads(line)["step"] for line in written] == [0, 1, 2]


@pytest.mark.more
def test_equal_steps_stand_between_those_of_the_run(demo, tmp_path):
    answer = found(demo, tmp_path, {"equal": 10})
    assert len(answer["steps"]) == len(answer["equal_ns"]) == 10
    assert all(step_ns > 0 for step_ns, _ in answer["steps"])
    assert all(corrected_ns is None or corrected_ns > 0 for _, corrected_ns in answer["steps"])
