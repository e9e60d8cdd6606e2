"""The executor runs the plan's actions verbatim, and a rank that fails stops the others with names."""

from __future__ import annotations

import pickle
import re
import time

import pytest
import torch.distributed as dist
from ranks import results, run_ranks
from toy_run import RankParts, make_schedule, warm_model_dir, write_plan

from dflop import ScheduleError
from dflop._native import Action
from dflop.runtime.actions import check_actions
from dflop.runtime.agreement import Agreement, Statement, agree
from dflop.runtime.failure import RankError, describe
from dflop.runtime.spans import RankSpans, align

LLM = [[[5], [1]], [[7, 4], []], [[], []], [[6, 0], [3]]]


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory):
    return warm_model_dir(tmp_path_factory.mktemp("model"))


@pytest.mark.parametrize("order", ["1f1b", "gpipe"])
def test_the_actions_run_are_those_of_the_plan(order, model_dir, tmp_path):
    """Two steps: on each rank the plan's list in its order, no two spans at once, peers' inputs first."""
    plan = write_plan(tmp_path / "plan.json", 2, 2, 2, len(LLM), order)
    schedule = make_schedule(LLM, 2)

    def rank(index):
        parts = RankParts(plan, model_dir, tmp_path / "store", index)
        measured = []
        for _ in range(2):
            dist.barrier()
            parts.gradients.zero()
            parts.recorder.begin()
            parts.run_actions(schedule)
            parts.recorder.add("tail", parts.recorder.now())
            measured.append(parts.recorder.finish())
        return measured

    found = results(run_ranks(plan.num_ranks, rank, tmp_path))
    for step in range(2):
        spans, tails, step_ns = align([measured[step] for measured in found])
        at = {}
        for index in range(plan.num_ranks):
            own = [span for span in spans if span[0] == index]
            assert [action for _, action, _, _ in own] == [str(action) for action in plan.actions(index)]
            assert all(a[3] <= b[2] for a, b in zip(own, own[1:], strict=False)), "spans overlap"
            assert all(0 <= start <= end <= step_ns for _, _, start, end in own)
            at |= {(index, action): (start, end) for _, action, start, end in own}
        assert [tail[0] for tail in tails] == list(range(plan.num_ranks))
        for replica in range(2):
            first, last = plan.rank(replica, 1), plan.rank(replica, 2)
            for j, samples in enumerate(LLM):
                if not samples[replica]:
                    continue
                # A message may be there before its sender has done with it.
                assert at[first, f"1F{j}"][0] < at[last, f"2F{j}"][0]
                assert at[last, f"2B{j}"][0] < at[first, f"1B{j}"][0]
                for encoder in range(2):
                    if {s for s, _ in schedule.encoder(j, encoder)} & set(samples[replica]):
                        assert at[encoder, f"0F{j}"][0] < at[first, f"1F{j}"][0]
                        assert at[first, f"1B{j}"][0] < at[encoder, f"0B{j}"][0]


def test_a_rank_that_raises_stops_the_others(model_dir, tmp_path):
    """The encoder fails in its third action; the others end long before the timeout, and say at which action."""
    llm = [[[5]], [[7, 1, 4]], [[3]], [[0, 6, 2]]]
    plan = write_plan(tmp_path / "plan.json", 1, 1, 2, len(llm))
    schedule = make_schedule(llm, 1)
    # They end by the closed connection: this test does not last as long as the timeout.
    timeout_s = 3600.0

    def rank(index):
        parts = RankParts(plan, model_dir, tmp_path / "store", index, timeout_s)
        if index == 0:
            forward = parts.pieces[0].forward
            calls = []

            def failing(batch):
                calls.append(1)
                if len(calls) == 2:
                    message = "the device caught fire"
                    raise RuntimeError(message)
                return forward(batch)

            parts.pieces[0].forward = failing
        try:
            parts.step(schedule)
        except Exception as error:
            action = parts.executor.running
            raise SystemExit(print_error(describe(parts.mesh.coordinates, 37, action, error))) from error

    ranks = run_ranks(plan.num_ranks, rank, tmp_path)
    assert [r.status for r in ranks] == [7, 7, 7]
    # 1F1B of three stages: 0F0, 0F1 (text alone: nothing to run), 0F2.
    assert "[encoder dp 0/1] step 37, action 0F2: the device caught fire" in ranks[0].stderr
    # Where the others stand by then is a matter of time; whom they miss is not.
    lost = r"(no message from|cannot send to)"
    for stage, peer in [(1, r"0 \(encoder"), (2, r"1 \(llm")]:
        line = rf"\[llm pp {stage - 1}/2 dp 0/1\] step 37, action {stage}[FB]\d: {lost} rank {peer}"
        assert re.search(line, ranks[stage].stderr), ranks[stage].stderr


def print_error(line):
    import sys

    print(line, file=sys.stderr)
    return 7


def test_a_silent_rank_ends_the_others_at_the_timeout(model_dir, tmp_path):
    """A rank that neither sends nor dies: its peer gives up while it is still there."""
    plan = write_plan(tmp_path / "plan.json", 1, 1, 1, 1)
    schedule = make_schedule([[[0]]], 1)

    def rank(index):
        parts = RankParts(plan, model_dir, tmp_path / "store", index, timeout_s=8.0)
        if index == 0:
            # Nothing else ends the other's wait; if it never gave up, both would be killed in the end.
            while not (tmp_path / "given up").exists():
                time.sleep(0.02)
            return
        with pytest.raises(RankError, match="no message from rank 0"):
            parts.step(schedule)
        (tmp_path / "given up").touch()

    results(run_ranks(plan.num_ranks, rank, tmp_path))


def test_ranks_that_disagree_are_named(model_dir, tmp_path):
    """Schedule, samples and label tokens are compared before each step; a wish to stop reaches all."""
    plan = write_plan(tmp_path / "plan.json", 1, 1, 2, 1)

    def rank(index):
        mesh = RankParts(plan, model_dir, tmp_path / "store", index).mesh
        num_targets = 10 if index == 2 else 0
        same = {"step": 4, "schedule": "aaa", "samples": "bbb"}
        same |= {"num_targets": num_targets, "stop": 0}
        outcomes = [agree(mesh, Statement(**same), 10)]
        outcomes.append(agree(mesh, Statement(**{**same, "stop": 15 * (index == 1)}), 10))
        outcomes.append(agree(mesh, Statement(**{**same, "save_failed": index == 2}), 10))
        for changes, label_tokens in [
            ({"schedule": "ccc" if index == 1 else "aaa"}, 10),
            ({"samples": "ddd" if index == 2 else "bbb"}, 10),
            ({}, 11),
        ]:
            with pytest.raises(RankError) as error:
                agree(mesh, Statement(**{**same, **changes}), label_tokens)
            outcomes.append(str(error.value))
        return outcomes

    for outcomes in results(run_ranks(plan.num_ranks, rank, tmp_path)):
        assert outcomes == [
            Agreement(0, False),
            Agreement(15, False),
            Agreement(0, True),
            "ranks disagree about the schedule (ranks [0, 2]: aaa; ranks [1]: ccc), must be equal",
            "ranks disagree about the samples (ranks [0, 1]: bbb; ranks [2]: ddd), must be equal",
            "the ranks hold 10 label tokens, the schedule divides by 11",
        ]


def test_actions_of_another_stage_or_kind_are_refused():
    """The runtime does not guess what an action it does not know would mean."""
    known = [Action.parse(name) for name in ("1F0", "1B12", "1I3", "1W3")]
    assert [(a.stage, a.letter, a.microbatch) for a in known] == [
        (1, "F", 0), (1, "B", 12), (1, "I", 3), (1, "W", 3),
    ]  # fmt: skip
    assert [a.takes_gradient for a in known] == [False, True, True, False]
    for name in ("2F0", "0B0"):
        with pytest.raises(RankError, match=f"on rank 1: `{name}`, must be of its own stage 1"):
            check_actions([Action.parse(name)], 37, 1, [1], 4)
    for name in ("1X0", "F1", "1F", "", "1F-1"):
        with pytest.raises(ScheduleError, match=f"`{name}` is not an action"):
            Action.parse(name)
        with pytest.raises(ScheduleError, match=f"not a schedule: `{name}` is not an action"):
            make_schedule([[[0]]], 1, actions=[[name], []])


def test_actions_are_frozen_values_and_schedules_can_be_sent():
    """An action cannot be changed, equal ones are one in a set; a pickled schedule is the same schedule."""
    action = Action.parse("1F0")
    with pytest.raises(AttributeError):
        action.microbatch = 1
    assert {action, Action.parse("1F0")} == {action}
    assert action != Action.parse("1B0")
    assert (str(action), action.name) == ("1F0", "1F0")
    schedule = make_schedule([[[0, 1]], [[2, 3]]], 1, step=7, actions=[["0F0", "0F1"], ["1F0", "1F1"]])
    sent = pickle.loads(pickle.dumps(schedule))
    assert (sent.step, sent.digest()) == (7, schedule.digest())
    assert sent.actions(1) == [Action.parse("1F0"), Action.parse("1F1")]


@pytest.mark.parametrize(
    ("names", "message"),
    [
        ("F0 B0 F1 I1 W1", None),
        ("F1 F0 I1 I0 W0 W1", None),
        ("F0 B0 F1", "microbatch 1 is not done, there is no backward"),
        ("F0 B0", "microbatch 1 is not done, there is nothing of it"),
        ("F0 B0 F1 I1", "microbatch 1 is not done, there is no W"),
        ("B0 F0 F1 B1", "`1B0` comes first of its microbatch"),
        ("F0 F0 B0 F1 B1", "`1F0` comes after F of its microbatch"),
        ("F0 B0 B0 F1 B1", "`1B0` comes after B of its microbatch"),
        ("F0 W0 I0 F1 B1", "`1W0` comes after F of its microbatch"),
        ("F0 I0 B0 F1 B1", "`1B0` comes after I of its microbatch"),
        ("F0 B0 W0 F1 B1", "`1W0` comes after B of its microbatch"),
        ("F0 B0 F1 B1 F2 B2", "`1F2`, the step has 2 microbatches"),
    ],
)
def test_a_list_that_does_not_do_each_microbatch_once_is_refused(names, message):
    """With step, rank and action."""
    actions = [Action.parse(f"1{name}") for name in names.split()]
    if message is None:
        check_actions(actions, 37, 1, [1], 2)
    else:
        with pytest.raises(RankError, match=re.escape(f"the actions of step 37 on rank 1: {message}")):
            check_actions(actions, 37, 1, [1], 2)


def test_a_peers_list_is_checked_too(model_dir, tmp_path):
    """What a rank receives when is in the list of the rank that sends it: none of them begins the step."""
    plan = write_plan(tmp_path / "plan.json", 1, 1, 1, 2)
    lists = [["0F0", "0B0"], ["1F0", "1B0", "1F1", "1B1"]]
    schedule = make_schedule([[[0]], [[2]]], 1, step=5, actions=lists)

    def rank(index):
        parts = RankParts(plan, model_dir, tmp_path / "store", index)
        with pytest.raises(RankError, match="step 5 on rank 0: microbatch 1 is not done"):
            parts.step(schedule)

    results(run_ranks(plan.num_ranks, rank, tmp_path))


def test_clocks_of_one_machine_share_a_zero():
    """Ranks 0 and 1 read one clock, rank 2 another: by hand."""
    ranks = [
        RankSpans(0, "a", 1000, (("0F0", 1010, 1050),), (1060, 1070)),
        RankSpans(1, "a", 1004, (("1F0", 1052, 1060),), (1060, 1080)),
        RankSpans(2, "b", 50, (("2F0", 70, 90),), (90, 95)),
    ]
    spans, tails, step_ns = align(ranks)
    assert spans == [(0, "0F0", 10, 50), (1, "1F0", 52, 60), (2, "2F0", 20, 40)]
    assert tails == [(0, 60, 70), (1, 60, 80), (2, 40, 45)]
    assert step_ns == 80
