"""Ranks whose layers are compiled have the gradients of one process whose layers are not."""

from __future__ import annotations

import pytest
import torch._dynamo  # noqa: F401  (once, for all forked ranks)
from lists import late_weights
from test_gradients import AWARE
from test_layouts import PLACED, check, frozen_none, model_dir, oracles, schedule_of
from toy_run import make_schedule, write_colocated, write_plan

from dflop.models.compiled import compile_layers
from dflop.parallel.shard import layers_of

__all__ = ["model_dir", "oracles"]

BACKEND = "aot_eager"
"""Traces as `inductor` does, and runs PyTorch's own operators: no code is generated, which takes seconds a graph."""


def compiled(pieces):
    """Compiles all layers of a rank."""
    for piece in pieces.values():
        compile_layers(piece, layers_of(piece), BACKEND)


def pipeline(path, **fields):
    """(plan of two stages of the LLM, its schedule)."""
    llm = AWARE[1]
    return write_plan(path, 1, 1, 2, len(llm), **fields), make_schedule(llm, 1)


def split(path):
    """The same with backwards in two parts."""
    llm = AWARE[1]
    plan = write_plan(path, 1, 1, 2, len(llm), order="zero-bubble")
    return plan, make_schedule(llm, 1, actions=late_weights(plan, len(llm)))


def colocated(path, **fields):
    """Two replicas, text alone on one of them beside media on the other; or two ranks that share all layers."""
    llm = PLACED["uneven", 1] if "llm_tp" in fields else PLACED["text", 2]
    return write_colocated(path, len(llm[0]), len(llm), **fields), schedule_of(llm)


# Of these `make test-more` runs `zero3`.
CASES = {
    "zero3": lambda path: colocated(path, zero=3),
    "ddp": colocated,
    "pipeline-full-1": lambda path: pipeline(path, recompute="full:1"),
    "pipeline": pipeline,
    "zero2-full": lambda path: colocated(path, zero=2, recompute="full"),
    "tensor": lambda path: colocated(path, encoder_tp=2, llm_tp=2),
    "pipeline-full": lambda path: pipeline(path, recompute="full"),
    "zero3-full": lambda path: colocated(path, zero=3, recompute="full"),
    "split": split,
    "pipeline-selective-1": lambda path: pipeline(path, recompute="selective:1"),
    "tensor-full": lambda path: colocated(path, encoder_tp=2, llm_tp=2, recompute="full"),
}


@pytest.mark.some(0, 1)
@pytest.mark.parametrize("case", CASES)
def test_compiled_layers_train_as_one_process(case, model_dir, oracles, tmp_path):
    """Colocated and in a pipeline, with recomputation, split backwards and layers that ranks share."""
    plan, schedule = CASES[case](tmp_path / "plan.json")
    check(plan, schedule, model_dir, oracles(frozen_none), tmp_path, prepare=compiled)
