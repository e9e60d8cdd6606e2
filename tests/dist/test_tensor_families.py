"""Tensor parallelism of every family: gradients on ranks that share layers are those of Hugging Face in one process.

What is compared, and the samples, are those of `test_conformance_ranks.py`.
"""

from __future__ import annotations

import pytest
import torch
import torch._dynamo  # noqa: F401  (FSDP2 asks for it in its first hook: once, for all forked ranks)
from conformance import CPU, ON_RANKS, write_model
from test_conformance_ranks import Case, shared_out
from tiny_families import CONDITION, WITH_EXPERTS
from toy_run import write_plan

from dflop import ProfileError
from dflop.models import load_adapter
from dflop.models.tensor import TensorRank


def in_two(case):
    """Three microbatches on two replicas: text alone, nothing, a microbatch of one replica alone."""
    last = len(case.samples) - 1
    return [[[last, 0]], [[]], [list(range(1, last))]]


REFUSED = "internvl-llama"
"""Its tower has a norm over all heads."""


@pytest.mark.parametrize("name", ON_RANKS)
def test_both_sides_share_their_layers(name, tmp_path):
    """Two replicas of an encoder of two ranks; a backbone of two stages of two ranks."""
    case = Case(name, tmp_path)
    llm = in_two(case)
    # Experts and linear attention are not cut (`tests/unit/test_experts.py`, `tests/unit/test_pieces.py`).
    llm_tp = 1 if name in {*WITH_EXPERTS, *CONDITION} else 2
    degrees = {"encoder_tp": 1 if name == REFUSED else 2, "llm_tp": llm_tp}
    sizes = {"global_batch_size": len(case.samples)}
    plan = write_plan(tmp_path / "plan.json", 2, 1, 2, len(llm), **degrees, **sizes)
    case.check(plan, llm, shared_out(case.samples, llm), CONDITION.get(name, 1))


def test_a_norm_over_all_heads_is_refused(tmp_path):
    """No rank has what such a norm divides by: the field is named."""
    adapter = load_adapter(write_model(tmp_path, REFUSED))
    with pytest.raises(ProfileError, match="`vision_config.use_qk_norm` is True, must be false with tensor"):
        adapter.build_encoder(CPU, torch.float32, 0, tensor=TensorRank(2, 0))
