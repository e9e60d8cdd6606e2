"""Every layout of up to eight ranks: gradients and three steps of AdamW are those of one process.

The oracle and the comparison are those of `test_layouts.py`: weights after three steps are within 1e-5 of their change, and
so are those of any two layouts. Each layout has the gradients twice: of samples in arrival order under the plan's lists of
actions, and of uneven microbatches, as a scheduler makes them, under lists drawn at random. `make test-layouts` runs them;
of `make test`, `test_layouts.py`, `test_tensor.py`, `test_encoder_stages.py` and `test_interleaved.py` have some of each kind.
"""

from __future__ import annotations

import pytest
import tiny_llava
import torch._dynamo  # noqa: F401  (FSDP2 asks for it in its first hook: once, for all forked ranks)
from lists import random_lists
from matrix import all_layouts, colocated_layouts
from test_encoder_stages import deepen
from test_layouts import (
    PLACED,
    Oracle,
    check,
    frozen_all_but_projector,
    frozen_llm,
    frozen_none,
    frozen_tower,
    model_dir,
    oracles,
    schedule_of,
)
from toy_run import make_schedule, warm_model_dir, write_colocated, write_plan

pytestmark = pytest.mark.layouts
__all__ = ["model_dir", "oracles"]


@pytest.fixture(scope="module")
def deep(tmp_path_factory):
    """A model of more layers on either side than any of the stages, and its oracle."""
    warm_model_dir(tmp_path_factory.mktemp("warm"))
    model_dir = tiny_llava.write_model_dir(tmp_path_factory.mktemp("deep"), num_hidden_layers=7)
    return deepen(model_dir), Oracle(deepen(model_dir), tmp_path_factory.mktemp("pretrained"), frozen_none)


def name(value):
    return "-".join(map(str, value.values())) if isinstance(value, dict) else str(value)


@pytest.mark.parametrize("layout", all_layouts(), ids=name)
def test_a_disaggregated_layout_trains_as_one_process(layout, deep, tmp_path):
    """Degrees of both sides, chunks, sharding and the order of ranks."""
    model_dir, oracle = deep
    encoder_dp, llm_dp = layout["encoder_dp"], layout["llm_dp"]
    uneven, even = (list(PLACED[placed, llm_dp]) for placed in ("uneven", "even"))
    # The plan's lists have as many.
    even += [[[]] * llm_dp] * (len(uneven) - len(even))
    degrees = {**layout, "num_microbatches": len(uneven)}
    plan = write_plan(tmp_path / "plan.json", **degrees)
    groups = write_plan(tmp_path / "groups.json", **degrees | {"encoder_tp": 1, "llm_tp": 1})
    # All ranks of a tensor group run the same.
    drawn = make_schedule(uneven, encoder_dp, actions=random_lists(groups, len(uneven), 7))
    check(plan, drawn, model_dir, oracle, tmp_path, others=[make_schedule(even, encoder_dp)])


@pytest.mark.parametrize("layout", colocated_layouts(), ids=name)
def test_a_colocated_layout_trains_as_one_process(layout, model_dir, oracles, tmp_path):
    """Replicas, tensor degrees, ZeRO and hybrid shards; where there are several replicas, text alone on some ranks."""
    dp, tp = layout["dp"], layout["tp"]
    sharding = {key: layout[key] for key in ("zero", "shard_ranks") if layout[key]}
    kinds = [PLACED[kind, dp] for kind in ("even", "text", "uneven") if (kind, dp) in PLACED]
    most = max(map(len, kinds))
    plan = write_colocated(tmp_path / "plan.json", dp, most, encoder_tp=tp, llm_tp=tp, **sharding)
    *others, last = (schedule_of([*kind, *[[[]] * dp] * (most - len(kind))]) for kind in kinds)
    check(plan, last, model_dir, oracles(frozen_none), tmp_path, others=others)


@pytest.mark.parametrize("is_frozen", [frozen_tower, frozen_llm, frozen_all_but_projector])
@pytest.mark.parametrize("zero", range(4))
def test_every_frozen_part_in_every_sharding(zero, is_frozen, model_dir, oracles, tmp_path):
    """Colocated, with what the recipes freeze."""
    text, uneven = (PLACED[placed, 2] for placed in ("text", "uneven"))
    plan = write_colocated(tmp_path / "plan.json", 2, len(uneven), zero=zero)
    others = [schedule_of([*text, *[[[]] * 2] * (len(uneven) - len(text))])]
    check(plan, schedule_of(uneven), model_dir, oracles(is_frozen), tmp_path, is_frozen, others)
