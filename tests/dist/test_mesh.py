"""Ranks are connected before the first step, because on NCCL the first message between two ranks waits for both."""

from __future__ import annotations

from dataclasses import replace
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from lists import open_early
from ranks import results, run_ranks
from toy_run import CPU, RankParts, make_schedule, warm_model_dir, write_plan

from dflop import Error
from dflop.device import take_device
from dflop.runtime.executor import Executor
from dflop.runtime.failure import RankError
from dflop.runtime.mesh import connect
from dflop.runtime.messages import Messages
from dflop.runtime.stage import Stage

LLM = {1: [[[5]], [[7, 1, 4]], [[0]], [[3, 6, 2]]], 2: [[[5], [3]], [[7, 4], [1]], [[], []], [[6, 0], [2]]]}


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory):
    return warm_model_dir(tmp_path_factory.mktemp("model"))


class Meetings:
    """gloo with the ways of NCCL: at the first message of a group between two ranks, each waits for the other."""

    def __init__(self, rank, timeout_s):
        self.rank, self.timeout = rank, timedelta(seconds=timeout_s)
        self.store = dist.distributed_c10d._get_default_store()
        self.met, self.late, self.is_stepping = set(), [], False

    def meet(self, peer, group):
        pair = (group.group_name, *sorted((self.rank, peer)))
        if pair in self.met:
            return
        if self.is_stepping:
            self.late.append(pair)
        name = " ".join(map(str, pair))
        self.store.set(f"{name} {self.rank}", "here")
        self.store.wait([f"{name} {peer}"], self.timeout)
        self.met.add(pair)

    def wrapped(self, talk):
        def meet_and_talk(tensor, peer, group, **more):
            self.meet(peer, group)
            return talk(tensor, peer, group=group, **more)

        return meet_and_talk


def parts_of(plan, model_dir, directory, rank, timeout_s):
    """A rank whose messages up go apart from those down, and its meetings."""
    parts = RankParts(plan, model_dir, directory / "store", rank)
    meetings = Meetings(rank, timeout_s)
    for name in ("send", "recv", "isend", "irecv"):
        # In a process of its own.
        setattr(dist, name, meetings.wrapped(getattr(dist, name)))
    mesh = replace(parts.mesh, upward=dist.new_group())
    stages = {stage: Stage(piece, mesh.is_last_stage, CPU) for stage, piece in parts.pieces.items()}
    widths = parts.executor._messages._widths
    parts.executor = Executor(
        mesh, stages, parts.recorder, Messages(mesh, widths, parts.executor._messages._dtype)
    )
    return parts, mesh, meetings


@pytest.mark.some(3)
@pytest.mark.parametrize("layout", [(1, 1, 1), (2, 1, 1), (1, 2, 1), (1, 1, 2), (2, 2, 2)], ids=str)
def test_all_that_a_step_needs_is_connected_before(layout, model_dir, tmp_path):
    """No two ranks meet for the first time in a step, where each may wait for something else of the other."""
    encoder_dp, llm_dp, llm_pp = layout
    plan = write_plan(tmp_path / "plan.json", encoder_dp, llm_dp, llm_pp, len(LLM[llm_dp]))
    schedule = make_schedule(LLM[llm_dp], encoder_dp)

    def rank(index):
        parts, mesh, meetings = parts_of(plan, model_dir, tmp_path, index, 20.0)
        connect(mesh)
        meetings.is_stepping = True
        return parts.step(schedule), meetings.late

    found = results(run_ranks(plan.num_ranks, rank, tmp_path))
    assert all(late == [] for _, late in found)
    assert sum(loss for loss, _ in found) > 0.0


def test_without_it_the_first_step_hangs(model_dir, tmp_path, monkeypatch):
    """That the meetings of this file are what they say: both ranks open a receive that the other cannot serve yet."""
    open_early(monkeypatch)
    plan = write_plan(tmp_path / "plan.json", 1, 1, 1, 4)
    schedule = make_schedule(LLM[1], 1)

    def rank(index):
        parts, _, _ = parts_of(plan, model_dir, tmp_path, index, 2.0)
        with pytest.raises(RankError, match="no message from rank"):
            parts.step(schedule)

    results(run_ranks(plan.num_ranks, rank, tmp_path))


def test_a_rank_without_a_gpu_says_so(monkeypatch):
    """More ranks than GPUs: NCCL would say it later, and at length."""
    monkeypatch.setenv("CUDA_DEVICE_MAX_CONNECTIONS", "32")
    monkeypatch.setenv("LOCAL_RANK", "2")
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    with pytest.raises(Error, match="local rank 2 has no GPU, this machine has 2") as caught:
        take_device("cuda")
    assert "nvidia-smi" in caught.value.__notes__[0]
