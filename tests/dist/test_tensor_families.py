"""Tensor parallelism of every family: gradients on ranks that share layers are those of Hugging Face in one process.

What is compared, and the samples, are those of `test_conformance_ranks.py`.
"""

from __future__ import annotations

import pytest
import torch
import torch._dynamo  # noqa: F401  (FSDP2 asks for it in its first hook: once, for all forked ranks)
from conformance import CPU, ON_RANKS, SETTINGS, write_model
from test_conformance_ranks import Case, shared_out
from tiny_families import CONDITION
from toy_run import write_colocated, write_plan

from dflop import ProfileError
from dflop.models import load_adapter
from dflop.models.tensor import TensorRank


def in_two(case):
    """Three microbatches on two replicas: text alone, nothing, a microbatch of one replica alone."""
    last = len(case.samples) - 1
    return [[[last, 0]], [[]], [list(range(1, last))]]


REFUSED = "internvl-llama"
"""Its tower has a norm over all heads."""


@pytest.mark.some(1, 9)
@pytest.mark.parametrize("name", ON_RANKS)
def test_both_sides_share_their_layers(name, tmp_path):
    """Two replicas of an encoder of two ranks; a backbone of two stages of two ranks."""
    case = Case(name, tmp_path)
    llm = in_two(case)
    degrees = {"encoder_tp": 1 if name == REFUSED else 2, "llm_tp": 2}
    sizes = {"global_batch_size": len(case.samples)}
    plan = write_plan(tmp_path / "plan.json", 2, 1, 2, len(llm), **degrees, **sizes)
    case.check(plan, llm, shared_out(case.samples, llm), CONDITION.get(name, 1))


@pytest.mark.layouts
@pytest.mark.parametrize("name", SETTINGS)
def test_both_sides_on_four_ranks(name, tmp_path):
    """A head of the tower a rank; of two heads of keys and values of the LLM each lies on two of its ranks."""
    case = Case(name, tmp_path)
    llm = in_two(case)
    degrees = {"encoder_tp": 1 if name == REFUSED else 4, "llm_tp": 4}
    sizes = {"global_batch_size": len(case.samples)}
    plan = write_plan(tmp_path / "plan.json", 1, 1, 1, len(llm), **degrees, **sizes)
    encoder = [[[s for s in held if case.samples[s].media] for held in replicas] for replicas in llm]
    case.check(plan, llm, encoder, CONDITION.get(name, 1))


@pytest.mark.layouts
@pytest.mark.parametrize("zero", [0, 3])
@pytest.mark.parametrize("name", [name for name in SETTINGS if name != REFUSED])
def test_four_ranks_that_hold_both_sides(name, zero, tmp_path):
    """Two such groups; in the second microbatch the second group has nothing."""
    case = Case(name, tmp_path)
    last = len(case.samples) - 1
    llm = [[[last], [0]], [list(range(1, last)), []]]
    degrees = {"encoder_tp": 4, "llm_tp": 4, "global_batch_size": len(case.samples)}
    plan = write_colocated(tmp_path / "plan.json", 2, len(llm), zero=zero, **degrees)
    encoder = [[[s for s in held if case.samples[s].media] for held in replicas] for replicas in llm]
    case.check(plan, llm, encoder, CONDITION.get(name, 1))


def test_a_norm_over_all_heads_is_refused(tmp_path):
    """No rank has what such a norm divides by: the field is named."""
    adapter = load_adapter(write_model(tmp_path, REFUSED))
    with pytest.raises(ProfileError, match="`vision_config.use_qk_norm` is True, must be false with tensor"):
        adapter.build_encoder(CPU, torch.float32, 0, tensor=TensorRank(2, 0))
