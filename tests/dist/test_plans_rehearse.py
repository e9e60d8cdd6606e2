"""Plans as the planner writes them, from first to last: the ranks of each run all of its schedules to their end."""

from __future__ import annotations

import json

import pytest
from demo_run import lines, python, request, run_training, write_demo
from ranks import results

from dflop._native import Plan

NUM_SAMPLES, BATCH = 24, 12
NUM_RANKS = 8
SPEED = 20.0
NUM_PLANS = 10


@pytest.fixture(scope="module")
def demo(tmp_path_factory):
    """A demo with what the planner found for eight ranks: the first ten, in order of their predicted steps."""
    demo = write_demo(tmp_path_factory.mktemp("plans") / "demo", NUM_SAMPLES, BATCH, 4)
    config = demo / "dflop.yaml"
    config.write_text(config.read_text().replace("num_ranks: 2", f"num_ranks: {NUM_RANKS}"))
    found = {}
    # A list has six plans. What is in front of one placement alone fills up the ten.
    for only in ([], ["--only", "colocated=false"], ["--only", "colocated=true"]):
        path = demo / "found.json"
        python(["-m", "dflop", "plan", *only, "--out", str(path)], demo)
        plan = json.loads(path.read_text())
        for ranked in [plan["best"], *plan["runners_up"]]:
            predicted_ns = ranked["prediction"]["step_ns_mean"]
            key = json.dumps({name: value for name, value in ranked.items() if name != "prediction"})
            found.setdefault(key, (predicted_ns, plan | {"best": ranked, "runners_up": []}))
    ordered = [plan for _, plan in sorted(found.values(), key=lambda one: one[0])]
    assert len(ordered) >= NUM_PLANS
    for place, plan in enumerate(ordered[:NUM_PLANS]):
        (demo / f"plan_{place}.json").write_text(json.dumps(plan))
    return demo


def check(demo, place, directory):
    """Two steps are an epoch: every sample once, no action twice, and no step shorter than it was simulated."""
    out = directory / "out"
    wanted = {"speed": SPEED, "slow_ranks": [], "slow_shapes": None, "network_latency_ns": 0, "kill": None}
    path = demo / f"plan_{place}.json"
    # A plan may leave ranks free.
    num_ranks = Plan.read(str(path)).num_ranks
    asked = request(demo, out, num_ranks, steps=2, rehearsal=wanted, plan=str(path))
    assert results(run_training(asked, directory)) == [0] * num_ranks, path.read_text()
    schedules = lines(out / "schedules.jsonl")
    assert sorted(s for line in schedules for s in line["samples"]) == list(range(NUM_SAMPLES))
    metrics = lines(out / "metrics.jsonl")
    assert len(metrics) == 2
    assert all(m["is_rehearsed"] and m["step_ns"] >= m["predicted_ns"] for m in metrics)
    for trace in lines(out / "trace.jsonl"):
        names = [(rank, action) for rank, action, _, _ in trace["spans"]]
        assert len(names) == len(set(names))
        assert {rank for rank, _ in names} == set(range(num_ranks))


@pytest.mark.parametrize("is_colocated", [True, False])
def test_the_best_plan_of_each_placement_rehearses(is_colocated, demo, tmp_path):
    places = [json.loads((demo / f"plan_{k}.json").read_text())["best"]["layout"] for k in range(NUM_PLANS)]
    placed = [layout.get("placement") == "colocated" for layout in places]
    check(demo, placed.index(is_colocated), tmp_path)


@pytest.mark.layouts
@pytest.mark.parametrize("place", range(NUM_PLANS))
def test_every_plan_of_the_first_ten_rehearses(place, demo, tmp_path):
    check(demo, place, tmp_path)
