"""`dflop rehearse`: real ranks, schedules and messages; actions that sleep as long as predicted."""

from __future__ import annotations

import json
import re
import signal

import pytest
import torch.distributed as dist
from demo_run import lines, request, run_training, write_demo
from made_up import with_experts
from ranks import results, run_ranks
from toy_run import write_colocated

from dflop._native import Dataset, Schedule, StepScheduler
from dflop.runtime.meeting import Meeting
from dflop.runtime.rehearse import summary

NUM_SAMPLES, BATCH = 24, 12
SPEED = 20.0


@pytest.fixture(scope="module")
def demo(tmp_path_factory):
    demo = write_demo(tmp_path_factory.mktemp("rehearse") / "demo", NUM_SAMPLES, BATCH, 4)
    # A rehearsal asks for no section `train`: it is told how many steps.
    text = (demo / "dflop.yaml").read_text()
    (demo / "no_train.yaml").write_text(re.sub(r"^train:\n(  .*\n)*", "", text, flags=re.MULTILINE))
    assert "steps" not in (demo / "no_train.yaml").read_text()
    return demo


def with_layout(demo, encoder_dp, llm_pp, llm_dp):
    """The plan of the demo with other degrees, as a file beside it."""
    plan = json.loads((demo / "plan.json").read_text())
    layout = plan["best"]["layout"]
    layout["encoder"]["data_parallel_degree"] = encoder_dp
    layout["llm"] |= {"pipeline_parallel_degree": llm_pp, "data_parallel_degree": llm_dp}
    path = demo / f"plan_{encoder_dp}_{llm_pp}_{llm_dp}.json"
    path.write_text(json.dumps(plan))
    return path


def rehearsal(demo, out, layout, steps, **asked):
    encoder_dp, llm_pp, llm_dp = layout
    wanted = {
        "speed": SPEED,
        "slow_ranks": [],
        "slow_shapes": None,
        "network_latency_ns": 0,
        "kill": None,
    } | asked
    return request(
        demo,
        out,
        encoder_dp + llm_pp * llm_dp,
        steps=steps,
        rehearsal=wanted,
        plan=str(with_layout(demo, *layout)),
        config_path=str(demo / "no_train.yaml"),
    )


@pytest.mark.parametrize("layout", [(1, 1, 1), (2, 2, 2)])
def test_every_action_runs_once_and_as_long_as_predicted(layout, demo, tmp_path):
    """Two steps, an epoch: each sample once, each action once and no shorter than its predicted time."""
    out = tmp_path / "out"
    asked = rehearsal(demo, out, layout, 2)
    assert results(run_training(asked, tmp_path)) == [0] * asked["num_ranks"]
    schedules = lines(out / "schedules.jsonl")
    assert sorted(s for line in schedules for s in line["samples"]) == list(range(NUM_SAMPLES))
    # Of the cluster that is rehearsed, whatever this machine has: the report predicts with it.
    nodes = asked["config"]["cluster"]["ranks_per_node"]
    assert {line["ranks_per_node"] for line in schedules} == {nodes}
    metrics = lines(out / "metrics.jsonl")
    assert all(m["is_rehearsed"] and m["loss"] == 0.0 for m in metrics)
    # It cannot be faster than simulated: nothing in it takes less than its time.
    assert all(m["step_ns"] >= m["predicted_ns"] for m in metrics)
    for trace in lines(out / "trace.jsonl"):
        names = [(rank, action) for rank, action, _, _ in trace["spans"]]
        assert len(names) == len(set(names)) == 2 * 4 * asked["num_ranks"]
    found = summary(out)
    assert found["ranks"] == asked["num_ranks"]
    assert found["steps"] == 1


def test_ranks_that_meet_know_the_largest_of_their_numbers(tmp_path):
    """Seven ranks, two levels of the tree: all of them, and at the same time the last five in an order of their own."""
    some = [6, 2, 3, 5, 4]

    def rank(index):
        store = f"file://{tmp_path / 'store'}"
        dist.init_process_group("gloo", init_method=store, rank=index, world_size=7)
        every = Meeting(range(7), index, dist.group.WORLD)
        few = Meeting(some, index, dist.group.WORLD, 1) if index in some else None
        found = [every.largest(-5 * index - 1), every.largest(10 + index, lambda largest: -largest)]
        if few is not None:
            found.append(few.largest(index**2, lambda largest: largest + 2**40))
        found.append(every.largest(100 - index))
        return found

    for index, found in enumerate(results(run_ranks(7, rank, tmp_path))):
        assert found == [-1, -16, *([36 + 2**40] if index in some else []), 100]


@pytest.mark.parametrize(("zero", "ep"), [(0, 1), (3, 1), pytest.param(0, 3, marks=pytest.mark.more)])
def test_colocated_ranks_run_both_components(zero, ep, demo, tmp_path):
    """Three ranks that each hold all: every list has both stages; where they meet they start each action together."""
    plan = json.loads((demo / "plan.json").read_text())
    degrees = {"tensor_parallel_degree": 1, "pipeline_parallel_degree": 1, "data_parallel_degree": 3}
    plan["best"]["layout"] = {"encoder": degrees, "llm": degrees, "placement": "colocated", "zero": zero}
    plan["best"]["layout"]["expert_parallel_degree"] = ep
    path = demo / f"plan_colocated_{zero}_{ep}.json"
    path.write_text(json.dumps(plan))
    out = tmp_path / "out"
    wanted = {"speed": SPEED, "slow_ranks": [], "slow_shapes": None, "network_latency_ns": 0, "kill": None}
    asked = request(demo, out, 3, steps=2, rehearsal=wanted, plan=str(path))
    if ep > 1:
        asked["model_profile"] = with_experts(demo / "model_profile.json", tmp_path / "model_profile.json", 3)
    assert results(run_training(asked, tmp_path)) == [0, 0, 0]
    assert sorted(s for line in lines(out / "schedules.jsonl") for s in line["samples"]) == list(
        range(NUM_SAMPLES)
    )
    for trace in lines(out / "trace.jsonl"):
        for rank in range(3):
            own = [action for r, action, _, _ in trace["spans"] if r == rank]
            assert {action[0] for action in own} == {"0", "1"}
            assert len(own) == len(set(own)) == 2 * 2 * 4
    assert all(m["step_ns"] >= m["predicted_ns"] for m in lines(out / "metrics.jsonl"))


@pytest.mark.parametrize("zero", [0, 3])
def test_ranks_with_whole_encoders_send_each_other_features(zero, demo, tmp_path):
    """Two groups of two ranks that share the LLM's layers: each rank has its own shares, and all run the same lists."""
    path = tmp_path / "plan.json"
    write_colocated(path, 2, 4, llm_tp=2, zero=zero, global_batch_size=BATCH)
    out = tmp_path / "out"
    wanted = {"speed": SPEED, "slow_ranks": [], "slow_shapes": None, "network_latency_ns": 0, "kill": None}
    asked = request(demo, out, 4, steps=2, rehearsal=wanted, plan=str(path))
    assert results(run_training(asked, tmp_path)) == [0] * 4
    schedules = lines(out / "schedules.jsonl")
    assert sorted(s for line in schedules for s in line["samples"]) == list(range(NUM_SAMPLES))
    assert {len(column) for line in schedules for column in line["schedule"]["encoder"]} == {4}
    for trace in lines(out / "trace.jsonl"):
        own = [[action for r, action, _, _ in trace["spans"] if r == rank] for rank in range(4)]
        assert all(len(actions) == len(set(actions)) == 2 * 2 * 4 for actions in own)
    assert all(m["step_ns"] >= m["predicted_ns"] for m in lines(out / "metrics.jsonl"))


def test_a_slow_rank_takes_as_much_longer(demo, tmp_path):
    """Rank 1 sleeps 50 times as long as predicted in each action, rank 0 as predicted."""
    out = tmp_path / "out"
    slow = [{"rank": 1, "factor": 50.0}]
    asked = rehearsal(demo, out, (1, 1, 1), 1, slow_ranks=slow, speed=50.0)
    assert results(run_training(asked, tmp_path)) == [0, 0]
    (metrics,) = lines(out / "metrics.jsonl")
    trace = lines(out / "trace.jsonl")[0]
    busy_ns = sum(end - start for rank, _, start, end in trace["spans"] if rank == 1)
    # Its predicted time is what the simulator has it work, 50 times of which passed and were multiplied by 50 again.
    scheduler = StepScheduler(asked["plan"], asked["data_profile"], asked["model_profile"], 0)
    scheduler.submit(0, lines(out / "schedules.jsonl")[0]["samples"], "aware")
    schedule = scheduler.take(0, "aware")[0]
    predicted_ns = sum(
        end - start for rank, _, start, end in scheduler.predicted_spans(schedule)[0] if rank == 1
    )
    assert busy_ns >= 50 * predicted_ns
    assert metrics["step_ns"] >= busy_ns


def test_slow_shapes_take_as_much_longer_as_was_drawn(demo, tmp_path):
    """Every LLM action is at least as long as predicted, and as its slow samples add."""
    out = tmp_path / "out"
    asked = rehearsal(demo, out, (1, 1, 1), 2, slow_shapes={"share": 0.2, "times": 5.0}, speed=2.0)
    ranks = run_training(asked, tmp_path)
    assert results(ranks) == [0, 0]
    scheduler = StepScheduler(asked["plan"], asked["data_profile"], asked["model_profile"], 0)
    dataset = Dataset(asked["config_path"], asked["data_profile"])
    seed = asked["config"]["train"]["seed"]
    turns, traces = lines(out / "schedules.jsonl"), lines(out / "trace.jsonl")
    slow = None
    num_longer = 0
    for turn, trace in zip(turns, traces, strict=True):
        schedule = scheduler.schedule(turn["step"], turn["samples"], "aware")
        if slow is None:
            slow = scheduler.slow_shapes(schedule, 0.2, 5.0, seed)
            assert f"slow shapes: {slow.tokens_min} to {slow.tokens_max} LLM tokens" in ranks[0].stderr
        assert schedule.digest() == Schedule.from_record(turn["schedule"]).digest()
        predicted = {
            (rank, action): end - start for rank, action, start, end in scheduler.predicted_spans(schedule)[0]
        }
        spans = {(rank, action): end - start for rank, action, start, end in trace["spans"]}
        for microbatch in range(schedule.num_microbatches):
            tokens = [dataset.shape(sample)[1] for sample in schedule.llm(microbatch, 0)]
            count = sum(slow.tokens_min <= of_sample <= slow.tokens_max for of_sample in tokens)
            num_longer += count
            for letter, more in (("F", slow.forward_ns), ("B", slow.backward_ns)):
                action = (1, f"1{letter}{microbatch}")
                assert spans[action] >= predicted[action] + count * more
    assert num_longer == slow.num_samples == round(0.2 * NUM_SAMPLES)


def test_a_killed_rank_ends_the_others_by_name(demo, tmp_path):
    """Rank 1 dies in the middle of step 1: step 0 is written, and the other ranks say whom they miss."""
    out = tmp_path / "out"
    ranks = run_training(rehearsal(demo, out, (1, 1, 1), 3, kill={"rank": 1, "step": 1}), tmp_path)
    assert ranks[1].status == -signal.SIGKILL
    assert ranks[0].result == 1
    assert "[encoder dp 0/1] step 1" in ranks[0].stderr
    assert "Traceback" not in ranks[0].stderr
    assert [m["step"] for m in lines(out / "metrics.jsonl")] == [0]


def test_a_rank_is_killed_whose_actions_are_few(demo, tmp_path):
    """Colocated ranks have a list of many microbatches, most of which have no sample."""
    asked = rehearsal(demo, tmp_path / "out", (1, 1, 1), 2, kill={"rank": 1, "step": 1})
    plan = json.loads((demo / "plan.json").read_text())
    degrees = {"tensor_parallel_degree": 1, "pipeline_parallel_degree": 1, "data_parallel_degree": 2}
    plan["best"]["layout"] = {"encoder": degrees, "llm": degrees, "placement": "colocated", "zero": 3}
    plan["best"]["num_microbatches"] = 12
    path = tmp_path / "plan.json"
    path.write_text(json.dumps(plan))
    killed = run_training(asked | {"plan": str(path)}, tmp_path)
    assert killed[1].status == -signal.SIGKILL, killed[1].stderr
    assert "rehearse: rank 1 is killed in step 1, as --kill asks" in killed[1].stderr
    assert [m["step"] for m in lines(tmp_path / "out/metrics.jsonl")] == [0]


def test_the_summary_counts_all_but_the_first_step(tmp_path):
    """Steps of 100 (first), 102, 98 and 110 against 100: errors 0.02, 0.02, 0.10."""
    steps = [100, 102, 98, 110]
    rows = [{"step_ns": ms * 1_000_000, "predicted_ns": 100_000_000} for ms in steps]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (tmp_path / "trace.jsonl").write_text(json.dumps({"tails": [[0, 0, 1], [1, 0, 1]]}) + "\n")
    found = summary(tmp_path)
    assert found["ranks"] == 2
    assert found["steps"] == 3
    assert found["step_ms_median"] == pytest.approx(102)
    assert found["simulated_ms_median"] == pytest.approx(100)
    assert found["error_median"] == pytest.approx(0.02)
    assert found["error_p95"] == pytest.approx(0.10)


def test_a_slow_rank_is_named_and_gets_less(demo, tmp_path):
    """One of two LLM replicas takes three times as long: an alarm names it, and schedules give it less."""
    out = tmp_path / "out"
    asked = rehearsal(demo, out, (2, 1, 2), 16, speed=0.5, slow_ranks=[{"rank": 3, "factor": 3.0}])
    config = asked["config"]
    config["train"]["correction"] = "on"
    asked["config"] = config
    assert results(run_training(asked, tmp_path)) == [0] * 4
    alarms = [event for event in lines(out / "events.jsonl") if event.get("cause") == "rank"]
    assert [alarm["words"].split(" takes")[0] for alarm in alarms] == ["rank 3"]
    turns = lines(out / "schedules.jsonl")
    # The first schedules are made before anything is measured.
    assert turns[0]["correction"] is None
    assert turns[-1]["correction"]["rows"][3]["forward"] > 1.5
    dataset = Dataset(str(demo / "dflop.yaml"), str(demo / "data_profile.parquet"))

    def tokens(turn, replica):
        return sum(dataset.shape(s)[1] for column in turn["schedule"]["llm"] for s in column[replica])

    usual, slow = (sum(tokens(turn, replica) for turn in turns[-4:]) for replica in (0, 1))
    assert slow < 0.75 * usual
    # The log has all that its schedules were made with.
    scheduler = StepScheduler(
        asked["plan"], str(demo / "data_profile.parquet"), str(demo / "model_profile.json"), 0
    )
    last = turns[-1]
    again = scheduler.schedule(last["step"], last["samples"], last["arm"], last["correction"])
    assert json.loads(again.to_json())["llm"] == last["schedule"]["llm"]
