"""Lists over groups with the ways of NCCL: messages without tags, one after the other, each until both are there.

`nccl-lazy`, and `nccl` before torch 2.15, have such a queue for two ranks of a group; `nccl` of 2.15 has one for
all of a group. The executor opens receives ahead: with the latter a send waits behind them. So it opens none that
waits for what this rank has still to send (`Plan.openings`).

A GPU that loads a kernel, or gives memory back, first waits for all messages under way, sends too. Here it does
so before every action (`waits`).
"""

from __future__ import annotations

import queue
import threading
from dataclasses import replace
from datetime import timedelta
from types import SimpleNamespace

import pytest
import tiny_llava
import torch
import torch.distributed as dist
from lists import open_by_peer, open_early, open_late, random_lists
from ranks import results, run_ranks
from toy_run import (
    RankParts,
    has_media,
    make_schedule,
    warm_model_dir,
    write_colocated,
    write_plan,
)

from dflop.runtime import messages

LLM = [[[5]], [[7, 1, 4]], [[0]], [[3, 6, 2]]]
WIDE = [[[5], []], [[7, 1], [4]], [[], [0]], [[3, 6], [2]]]
"""The same on two replicas."""
CROSSED = [[[2], [3]], [[0], [1]], [[5], [7]], [[6], [4]]]
"""The same, so that two encoders send to both replicas."""
ENCODED = [[[[3, 0, 1]], [2, [3, 1, 1]]], [[0], []], [[], [5]], [[6], []]]
"""Of `CROSSED`, by encoder: the two pictures of sample 3 are apart."""
THERE, TAKEN = 1, 2
"""Tags of gloo, none of which tells one message from another."""


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory):
    return warm_model_dir(tmp_path_factory.mktemp("model"))


class Work:
    """A message under way."""

    def __init__(self, run):
        self.run, self.done = run, threading.Event()

    def wait(self, timeout=None):
        if not self.done.wait(None if timeout is None else timeout.total_seconds()):
            message = "the queue stands still"
            raise RuntimeError(message)

    def is_completed(self):
        return self.done.is_set()


class Queues:
    """`isend` and `irecv` of gloo as NCCL has them."""

    def __init__(self, is_of_pair):
        self.is_of_pair, self.queues, self.under_way = is_of_pair, {}, []

    def put(self, group, peer, run):
        key = (group.group_name, peer) if self.is_of_pair else group.group_name
        if key not in self.queues:
            self.queues[key] = queue.Queue()
            threading.Thread(target=self.serve, args=[self.queues[key]], daemon=True).start()
        work = Work(run)
        self.queues[key].put(work)
        self.under_way.append(work)
        return work

    def wait(self, timeout):
        """Until everything is done that was begun, sends too."""
        while self.under_way:
            self.under_way.pop().wait(timeout)

    def serve(self, waiting):
        while True:
            work = waiting.get()
            try:
                work.run()
            except RuntimeError:
                # A peer has ended: so does this queue.
                return
            work.done.set()

    def isend(self, tensor, peer, group, tag):
        del tag

        def run():
            dist.send(tensor, peer, group=group, tag=THERE)
            # Until the other side has come.
            dist.recv(torch.zeros(1), peer, group=group, tag=TAKEN)

        return self.put(group, peer, run)

    def irecv(self, tensor, peer, group, tag):
        del tag

        def run():
            dist.recv(tensor, peer, group=group, tag=THERE)
            dist.send(torch.zeros(1), peer, group=group, tag=TAKEN)

        return self.put(group, peer, run)


def waiting(call, queues, timeout):
    """`call`, once nothing is under way."""

    def run(*arguments, **options):
        queues.wait(timeout)
        return call(*arguments, **options)

    return run


def parts_of(plan, model_dir, directory, rank, is_of_pair, timeout_s=100.0, *, has_ways=True, waits=False):
    """A rank whose messages go through queues; without ways apart, those of a kind share a group."""
    parts = RankParts(plan, model_dir, directory / "store", rank, timeout_s)
    ways = [dist.new_group() for _ in range(4)]
    crossing = (ways[2], ways[3]) if has_ways else (ways[0], ways[1])
    mesh = replace(parts.mesh, downward=ways[0], upward=ways[1], crossing=crossing)
    queues = Queues(is_of_pair)
    messages.dist = SimpleNamespace(isend=queues.isend, irecv=queues.irecv)
    parts.executor._messages._mesh = mesh
    for stage in parts.executor._stages.values() if waits else ():
        for name in ("forward", "backward"):
            setattr(stage, name, waiting(getattr(stage, name), queues, timedelta(seconds=timeout_s)))
    return parts


def losses(plan, schedule, model_dir, tmp_path, is_of_pair=True, **more):
    """The loss of a step, all ranks together."""

    def rank(index):
        parts = parts_of(plan, model_dir, tmp_path, index, is_of_pair, **more)
        return parts.step(schedule)

    return sum(results(run_ranks(plan.num_ranks, rank, tmp_path)))


def expected(schedule, model_dir, tmp_path):
    """The loss of the same samples over plain gloo."""
    plan = write_plan(tmp_path / "plain.json", 1, 1, 1, len(LLM))

    def rank(index):
        return RankParts(plan, model_dir, tmp_path / "plain store", index).step(schedule)

    return sum(results(run_ranks(plan.num_ranks, rank, tmp_path / "plain")))


def in_turn(stages):
    """One microbatch after the other, as in `0F0 0B0 0F1 0B1`."""
    return [[f"{s}{letter}{j}" for j in range(len(LLM)) for letter in "FB"] for s in range(stages)]


@pytest.mark.some(1, 1)
@pytest.mark.parametrize("seed", [None, 1, 2])
def test_lists_end_with_a_queue_for_two_ranks(seed, model_dir, tmp_path):
    plan = write_plan(tmp_path / "plan.json", 1, 1, 2, len(LLM))
    lists = in_turn(3) if seed is None else random_lists(plan, len(LLM), seed)
    schedule = make_schedule(LLM, 1, actions=lists)
    plain = expected(make_schedule(LLM, 1), model_dir, tmp_path)
    assert losses(plan, schedule, model_dir, tmp_path) == pytest.approx(plain, rel=1e-6)


@pytest.mark.some(1, 1)
@pytest.mark.parametrize(("pp", "seed"), [(2, None), (3, None), (2, 4)])
def test_lists_of_chunks_end_with_them(pp, seed, tmp_path):
    """Of two ranks both send rows and gradients to each other; of three the last sends rows to the first."""
    warm_model_dir(tmp_path / "warm")
    model_dir = tiny_llava.write_model_dir(tmp_path / "model", num_hidden_layers=6)
    plan = write_plan(tmp_path / "plan.json", 1, 1, pp, len(LLM), llm_interleave=2)
    lists = () if seed is None else random_lists(plan, len(LLM), seed)
    schedule = make_schedule(LLM, 1, actions=lists)
    plain = expected(make_schedule(LLM, 1), model_dir, tmp_path)
    assert losses(plan, schedule, model_dir, tmp_path) == pytest.approx(plain, rel=1e-6)


@pytest.mark.some(1, 1)
@pytest.mark.parametrize("seed", [None, 1])
def test_lists_end_with_a_queue_for_all_ranks(seed, model_dir, tmp_path):
    """A receive stands before a send only if it waits for nothing that this rank has still to do."""
    plan = write_plan(tmp_path / "plan.json", 1, 1, 2, len(LLM))
    lists = in_turn(3) if seed is None else random_lists(plan, len(LLM), seed)
    schedule = make_schedule(LLM, 1, actions=lists)
    plain = expected(make_schedule(LLM, 1), model_dir, tmp_path)
    assert losses(plan, schedule, model_dir, tmp_path, False) == pytest.approx(plain, rel=1e-6)


@pytest.mark.some(1, 1)
@pytest.mark.parametrize("seed", [None, 1, 2, 3])
def test_replicas_end_with_a_queue_for_all_ranks(seed, model_dir, tmp_path):
    """Two encoders send to two replicas of the LLM: each opens receives in the order in which both send."""
    plan = write_plan(tmp_path / "plan.json", 2, 2, 1, len(CROSSED))
    lists = () if seed is None else random_lists(plan, len(CROSSED), seed)
    schedule = make_schedule(CROSSED, 2, actions=lists, encoder=ENCODED)
    plain = expected(make_schedule(LLM, 1), model_dir, tmp_path)
    assert losses(plan, schedule, model_dir, tmp_path, False) == pytest.approx(plain, rel=1e-6)


def check_hangs(plan, schedule, model_dir, tmp_path, is_of_pair, **more):
    """Each rank gives up, or its device stands still."""

    def rank(index):
        parts = parts_of(plan, model_dir, tmp_path, index, is_of_pair, 5.0, **more)
        with pytest.raises(RuntimeError, match="the queue stands still|it stopped or is too slow"):
            parts.step(schedule)
        # Those that wait for this one give up by themselves.
        threading.Event().wait(5.0)

    results(run_ranks(plan.num_ranks, rank, tmp_path))


def test_receives_opened_too_early_hang_with_it(model_dir, tmp_path, monkeypatch):
    """That the queues of this file are what they say: the middle rank's receive stands before its send."""
    open_early(monkeypatch)
    plan = write_plan(tmp_path / "plan.json", 1, 1, 2, len(LLM))
    check_hangs(plan, make_schedule(LLM, 1, actions=in_turn(3)), model_dir, tmp_path, False)


@pytest.mark.more
def test_receives_in_another_order_hang_with_it(model_dir, tmp_path, monkeypatch):
    """Each replica of the LLM waits first for the encoder that the other waits for last."""
    open_by_peer(monkeypatch)
    plan = write_plan(tmp_path / "plan.json", 2, 2, 1, len(CROSSED))
    check_hangs(plan, make_schedule(CROSSED, 2, encoder=ENCODED), model_dir, tmp_path, False)


@pytest.mark.some(1, 1)
@pytest.mark.parametrize("has_ways", [True, False])
def test_ranks_that_encode_for_each_other(has_ways, model_dir, tmp_path):
    """Features go both ways between two colocated ranks: in one group each would wait for the other."""
    plan = write_colocated(tmp_path / "plan.json", 2, len(LLM))
    llm = [[[5], [0]], [[7, 1], [4]], [[2], [3]], [[6], []]]
    # Each encodes what the other reads.
    encoder = [[[s for s in held if has_media(s)] for held in replicas[::-1]] for replicas in llm]
    schedule = make_schedule(llm, 2, encoder=encoder)
    if has_ways:
        plain = expected(make_schedule(LLM, 1), model_dir, tmp_path)
        for waits in (False, True):
            found = losses(plan, schedule, model_dir, tmp_path / str(waits), waits=waits)
            assert found == pytest.approx(plain, rel=1e-6)
        return

    check_hangs(plan, schedule, model_dir, tmp_path, True, has_ways=False)


@pytest.mark.some(1, 1)
@pytest.mark.parametrize(
    ("sizes", "order", "seed"),
    [
        ((1, 1, 2), "1f1b", None),
        ((2, 2, 2), "1f1b", None),
        ((1, 2, 3), "gpipe", None),
        ((2, 1, 2), "1f1b", 3),
    ],
)
def test_lists_end_where_each_action_waits_for_all_messages(sizes, order, seed, model_dir, tmp_path):
    plan = write_plan(tmp_path / "plan.json", *sizes, len(WIDE), order)
    llm = WIDE if sizes[1] == 2 else [[a + b] for a, b in WIDE]
    lists = () if seed is None else random_lists(plan, len(llm), seed)
    schedule = make_schedule(llm, sizes[0], actions=lists)
    plain = expected(make_schedule(LLM, 1), model_dir, tmp_path)
    assert losses(plan, schedule, model_dir, tmp_path, waits=True) == pytest.approx(plain, rel=1e-6)


def test_tensor_groups_end_where_each_action_waits_for_all_messages(model_dir, tmp_path):
    """The first rank of the encoder sends the second what it reads, beside messages to the LLM that are under way."""
    plan = write_plan(tmp_path / "plan.json", 1, 1, 2, len(LLM), encoder_tp=2)
    schedule = make_schedule(LLM, 1)
    plain = expected(make_schedule(LLM, 1), model_dir, tmp_path)
    assert losses(plan, schedule, model_dir, tmp_path, waits=True) == pytest.approx(plain, rel=1e-6)


def test_chunks_end_where_each_action_waits_for_all_messages(tmp_path):
    warm_model_dir(tmp_path / "warm")
    model_dir = tiny_llava.write_model_dir(tmp_path / "model", num_hidden_layers=6)
    plan = write_plan(tmp_path / "plan.json", 1, 1, 2, len(LLM), llm_interleave=2)
    schedule = make_schedule(LLM, 1)
    plain = expected(schedule, model_dir, tmp_path)
    assert losses(plan, schedule, model_dir, tmp_path, waits=True) == pytest.approx(plain, rel=1e-6)


def test_receives_opened_too_early_hang_there(model_dir, tmp_path, monkeypatch):
    """That this file's waiting is what it says: an encoder waits for the gradient of what it has still to send."""
    open_early(monkeypatch)
    plan = write_plan(tmp_path / "plan.json", 1, 1, 1, len(LLM))
    check_hangs(plan, make_schedule(LLM, 1), model_dir, tmp_path, True, waits=True)


def ahead(num_microbatches):
    """The encoder runs all its forwards first; the LLM takes forward and backward in turn."""
    microbatches = range(num_microbatches)
    return [
        [f"0{letter}{j}" for letter in "FB" for j in microbatches],
        [f"1{letter}{j}" for j in microbatches for letter in "FB"],
    ]


def test_an_encoder_far_ahead_ends_where_each_action_waits_for_all_messages(model_dir, tmp_path):
    """The encoder waits for what it sent: the LLM's rank opens it in time, long before it needs it."""
    plan = write_plan(tmp_path / "plan.json", 1, 1, 1, len(LLM))
    schedule = make_schedule(LLM, 1, actions=ahead(len(LLM)))
    plain = expected(make_schedule(LLM, 1), model_dir, tmp_path)
    assert losses(plan, schedule, model_dir, tmp_path, waits=True) == pytest.approx(plain, rel=1e-6)


@pytest.mark.more
def test_receives_opened_too_late_hang_there(model_dir, tmp_path, monkeypatch):
    """The LLM's rank waits to send a gradient that the encoder opens after its forwards, which wait for the LLM."""
    open_late(monkeypatch)
    plan = write_plan(tmp_path / "plan.json", 1, 1, 1, len(LLM))
    check_hangs(plan, make_schedule(LLM, 1, actions=ahead(len(LLM))), model_dir, tmp_path, True, waits=True)
