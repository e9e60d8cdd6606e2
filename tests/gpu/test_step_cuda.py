"""On GPUs: a training step over NCCL gives the loss and the gradients of one process on a CPU.

One GPU a rank. Where there are fewer, ranks share them: each then tells NCCL that it is a host of its own, since
NCCL refuses two ranks of one host on one GPU, and they talk over the loopback interface.
"""

from __future__ import annotations

import faulthandler
import math
import multiprocessing
import os
import warnings

import pytest
import tiny_llava
import torch
import torch.distributed as dist
from toy_run import (
    CONTENTS,
    SEED,
    RankParts,
    label_tokens,
    make_schedule,
    toy_sample,
    warm_model_dir,
    write_colocated,
    write_plan,
)

from dflop._native import Plan
from dflop.device import take_device
from dflop.models import load_adapter

pytestmark = pytest.mark.gpu

LLM = {
    1: [[[5]], [[7, 1, 4]], [[]], [[3, 0, 6, 2]]],
    2: [[[5, 1], [3]], [[7, 4], []], [[], []], [[6, 0], [2]]],
}
TIMEOUT_S = 90.0


def play(index, kind, plan_path, model_dir, store, llm, encoder_dp, is_shared, answer):
    """One rank: two steps, the second with all connections and kernels there."""
    # Where a rank hangs, its error output says where.
    faulthandler.dump_traceback_later(0.7 * TIMEOUT_S)
    try:
        os.environ["LOCAL_RANK"] = str(index)
        if is_shared:
            os.environ |= {"NCCL_HOSTID": f"rank {index}", "NCCL_SOCKET_IFNAME": "lo", "LOCAL_RANK": "0"}
        device = take_device(kind)
        plan = Plan.read(str(plan_path))
        parts = RankParts(plan, model_dir, store, index, TIMEOUT_S, device)
        found = []
        for _ in range(2):
            parts.gradients.zero()
            loss = parts.step(make_schedule(llm, encoder_dp))
            norm = float(parts.gradients.clip(None))
            parts.recorder.add("tail", parts.recorder.now())
            spans = parts.recorder.finish()
            ends = [end for _, start, end in spans.actions for end in (start, end)]
            found.append((loss, norm, ends == sorted(ends) and ends[0] >= spans.start_ns))
        answer.send(found)
        dist.destroy_process_group()
    except Exception as error:
        answer.send(f"{type(error).__name__}: {error}")


def steps_of(kind, plan_path, num_ranks, model_dir, store, llm, encoder_dp, is_shared):
    """What each rank answers."""
    context = multiprocessing.get_context("spawn")
    pipes = [context.Pipe(duplex=False) for _ in range(num_ranks)]
    processes = [
        context.Process(
            target=play,
            args=(r, kind, plan_path, model_dir, store, llm, encoder_dp, is_shared, sending),
            daemon=True,
        )
        for r, (_, sending) in enumerate(pipes)
    ]
    for process in processes:
        process.start()
    try:
        answers = [receiving.recv() if receiving.poll(TIMEOUT_S) else "hangs" for receiving, _ in pipes]
    finally:
        for process in processes:
            process.join(timeout=5.0)
            if process.is_alive():
                process.kill()
    return answers


def expected_of(model_dir):
    """Loss and norm of the gradient of all samples, by Hugging Face's own model on the CPU."""
    model = load_adapter(model_dir).reference_model(SEED)
    model.train()
    samples = range(len(CONTENTS))
    total = 0.0
    for sample in samples:
        _, loss = tiny_llava.hf_loss(model, toy_sample(sample).oracle)
        (loss / label_tokens(samples)).backward()
        total += float(loss.detach()) / label_tokens(samples)
    squares = sum(float(p.grad.double().square().sum()) for p in model.parameters() if p.grad is not None)
    return total, math.sqrt(squares)


@pytest.mark.parametrize("layout", [(1, 1, 1), (1, 1, 2), (2, 2, 2)], ids=str)
def test_a_step_over_nccl_is_that_of_one_process(layout, tmp_path):
    """A first step that hangs is found here: NCCL connects ranks when they first talk."""
    encoder_dp, llm_dp, llm_pp = layout
    model_dir = warm_model_dir(tmp_path)
    plan = write_plan(tmp_path / "plan.json", encoder_dp, llm_dp, llm_pp, len(LLM[llm_dp]))
    is_shared = torch.cuda.device_count() < plan.num_ranks
    paths = (tmp_path / "plan.json", plan.num_ranks, model_dir, tmp_path / "store")
    answers = steps_of("cuda", *paths, LLM[llm_dp], encoder_dp, is_shared)
    assert not [answer for answer in answers if isinstance(answer, str)], answers
    loss, norm = expected_of(model_dir)
    for step in range(2):
        assert sum(answer[step][0] for answer in answers) == pytest.approx(loss, rel=1e-4)
        assert all(answer[step][1] == pytest.approx(norm, rel=1e-3) for answer in answers)
        assert all(answer[step][2] for answer in answers), "spans do not follow each other"


def test_no_action_waits_for_the_device(tmp_path):
    """The host only issues: between the first action and the last it never waits, so the GPU never waits for it."""
    model_dir = warm_model_dir(tmp_path)
    plan = write_colocated(tmp_path / "plan.json", 1, len(LLM[1]))
    parts = RankParts(plan, model_dir, tmp_path / "store", 0, TIMEOUT_S, take_device("cuda"))
    try:
        schedule = make_schedule(LLM[1], 1)
        parts.step(schedule)
        work = parts.work(schedule)
        steps = parts.executor.prepare(work, schedule)
        found = []
        with warnings.catch_warnings(record=True) as told:
            warnings.simplefilter("always")

            def watch(action):
                found.append((action, sum("called a synchronizing" in str(one.message) for one in told)))

            torch.cuda.set_sync_debug_mode("warn")
            try:
                parts.executor.run_step(work, steps, watch)
            finally:
                torch.cuda.set_sync_debug_mode("default")
        # After the last action the loss is read, which waits.
        assert len(found) == 4 * len(LLM[1])
        assert found[-1][1] == 0, [str(warning.message) for warning in told]
    finally:
        dist.destroy_process_group()
