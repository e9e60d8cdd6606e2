"""No schedule of mixed data hangs, in any kind of layout: real lists and executor, threads for ranks."""

from __future__ import annotations

import pytest
from demo_run import python, write_demo
from lists import open_early, random_lists
from made_up import with_experts
from toy_run import make_schedule, write_colocated, write_plan
from virtual_ranks import HangError, VirtualRanks

from dflop import ScheduleError
from dflop._native import GlobalBatches, StepScheduler

NUM_SAMPLES, BATCH, MICROBATCHES = 200, 16, 4

# Replicas of encoder and LLM, stages of the LLM; other fields of the plan.
LAYOUTS = {
    "ddp": ("colocated", 4, {}),
    "zero 1": ("colocated", 3, {"zero": 1}),
    "zero 2": ("colocated", 4, {"zero": 2}),
    "zero 3": ("colocated", 4, {"zero": 3}),
    "dealt experts": ("colocated", 4, {"zero": 1, "expert_parallel_degree": 2}),
    "hybrid": ("colocated", 4, {"zero": 3, "shard_ranks": 2}),
    "hybrid of states": ("colocated", 4, {"zero": 1, "shard_ranks": 2}),
    "hybrid of gradients": ("colocated", 4, {"zero": 2, "shard_ranks": 2}),
    "hybrid tensor": ("colocated", 4, {"zero": 3, "shard_ranks": 2, "encoder_tp": 2, "llm_tp": 2}),
    "colocated tensor": ("colocated", 3, {"zero": 3, "encoder_tp": 2, "llm_tp": 2}),
    "pipeline": ((1, 1, 3), {}),
    "data-aware lists": ((2, 1, 3), {"order": "data-aware"}),
    "zero-bubble": ((1, 1, 3), {"order": "zero-bubble"}),
    "unequal replicas": ((3, 2, 2), {"order": "data-aware", "zero": 2}),
    "tensor": ((2, 1, 2), {"order": "data-aware", "encoder_tp": 2, "llm_tp": 2}),
    "encoder stages": ((2, 1, 2), {"order": "data-aware", "encoder_pp": 2}),
    "replicas side by side": ((2, 2, 2), {"order": "data-aware", "rank_order": "tp-dp-pp"}),
    "uneven cuts": ((1, 2, 2), {"order": "data-aware", "llm_cut": [5, 3]}),
    "interleaved": ((1, 1, 3, 2), {}),
    "interleaved, sharded": ((1, 2, 3, 2), {"zero": 1}),
    "interleaved with encoder stages": ((2, 2, 2, 2), {"encoder_pp": 2, "llm_tp": 2}),
}


@pytest.fixture(scope="module")
def demo(tmp_path_factory):
    """Mixed data; times as estimated for a GPU, with layers cut over tensor groups."""
    demo = write_demo(
        tmp_path_factory.mktemp("no-hang") / "demo", NUM_SAMPLES, BATCH, MICROBATCHES, llm_layers=8
    )
    python(["-m", "dflop", "profile", "model", "--estimate", "--hardware", "h100", "--fresh"], demo)
    return demo


def plan_of(name, path):
    where, *more = LAYOUTS[name]
    if where == "colocated":
        dp, options = more
        return write_colocated(path, dp, MICROBATCHES, global_batch_size=BATCH, **options)
    encoder_dp, llm_dp, llm_pp, *chunks = where
    options = {**more[0], **({"llm_interleave": chunks[0]} if chunks else {})}
    return write_plan(path, encoder_dp, llm_dp, llm_pp, MICROBATCHES, global_batch_size=BATCH, **options)


def check(name, arms, num_batches, demo, tmp_path, monkeypatch):
    """Every rank of every step runs each of its actions, with every arm in turn."""
    path = tmp_path / "plan.json"
    plan = plan_of(name, path)
    profile = str(demo / "model_profile.json")
    if plan.expert_parallel_degree > 1:
        profile = with_experts(demo / "model_profile.json", tmp_path / "model_profile.json", 4)
    scheduler = StepScheduler(str(path), str(demo / "data_profile.parquet"), profile, 0)
    batches = GlobalBatches(NUM_SAMPLES, BATCH, 0, [], 4)
    ranks = VirtualRanks(plan, monkeypatch)
    for step in range(num_batches):
        schedule = scheduler.schedule(step, batches.batch(step), arms[step % len(arms)])
        ran = ranks.step(schedule)
        for rank, actions in enumerate(ran):
            done = {action.replace("I", "B") for action in actions if "W" not in action}
            places = [(stage, j) for stage in plan.stages(rank) for j in range(schedule.num_microbatches)]
            assert done == {f"{stage}{letter}{j}" for stage, j in places for letter in "FB"}


@pytest.mark.parametrize("name", LAYOUTS)
def test_no_schedule_hangs(name, demo, tmp_path, monkeypatch):
    """An epoch, scheduled for its data and in arrival order."""
    check(name, ["aware", "blind", "aware-ahead"], 12, demo, tmp_path, monkeypatch)


@pytest.mark.layouts
@pytest.mark.parametrize("name", LAYOUTS)
def test_no_schedule_of_a_thousand_hangs(name, demo, tmp_path, monkeypatch):
    check(name, ["aware", "aware-ahead"], 1_000, demo, tmp_path, monkeypatch)


def test_a_hang_is_seen(tmp_path, monkeypatch):
    """Two ranks that each wait for what the other does later: the encoder for a gradient, the LLM for features."""
    plan = write_plan(tmp_path / "plan.json", 1, 1, 1, 2)
    llm = [[[0]], [[2]]]
    right = make_schedule(llm, 1, actions=[["0F0", "0B0", "0F1", "0B1"], ["1F0", "1B0", "1F1", "1B1"]])
    VirtualRanks(plan, monkeypatch).step(right)
    wrong = make_schedule(llm, 1, actions=[["0F0", "0B0", "0F1", "0B1"], ["1F1", "1B1", "1F0", "1B0"]])
    with pytest.raises(
        ScheduleError, match="rank 0 waits at `0B0` for `1B0` of rank 1, which waits at `1F1`"
    ):
        VirtualRanks(plan, monkeypatch).step(wrong)
    # So lists are refused before they run.
    open_early(monkeypatch)
    with pytest.raises(HangError, match="rank 0 waits for rank 1; rank 1 waits for rank 0"):
        VirtualRanks(plan, monkeypatch).step(wrong)


def test_a_rank_without_a_sample_takes_part_where_ranks_meet(tmp_path, monkeypatch):
    """ZeRO-3, and one rank has two microbatches where the other has one."""
    plan = write_colocated(tmp_path / "plan.json", 2, 2, zero=3)
    llm = [[[0], [2]], [[3], []]]
    encoder = [[[0], [2]], [[3], []]]
    ran = VirtualRanks(plan, monkeypatch).step(make_schedule(llm, 2, encoder=encoder))
    assert ran[0] == ran[1]


@pytest.mark.parametrize("seed", range(3))
def test_no_list_drawn_at_random_hangs(seed, tmp_path, monkeypatch):
    plan = write_plan(tmp_path / "plan.json", 2, 1, 2, 4, llm_interleave=2)
    llm = [[[5]], [[7, 1, 4]], [[0]], [[3, 6, 2]]]
    schedule = make_schedule(llm, 2, actions=random_lists(plan, len(llm), seed))
    VirtualRanks(plan, monkeypatch).step(schedule)
