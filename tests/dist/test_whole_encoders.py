"""Colocated tensor groups whose ranks each hold a whole encoder, and encode a part of what the group reads.

Gradients and three steps of AdamW are those of one process, with the oracle of `test_layouts.py`. A rank without a share of a
microbatch, a microbatch of text alone and one of nothing hang nobody.
"""

from __future__ import annotations

import pytest
import torch._dynamo  # noqa: F401  (FSDP2 asks for it in its first hook: once, for all forked ranks)
from conformance import ON_RANKS
from test_conformance_ranks import Case
from test_layouts import (
    PLACED,
    check,
    frozen_all_but_projector,
    frozen_llm,
    frozen_none,
    frozen_tower,
    model_dir,
    oracles,
)
from tiny_families import CONDITION
from toy_run import make_schedule, toy_sample, write_colocated

__all__ = ["model_dir", "oracles"]


def divided(llm, tp, num_parts):
    """Encoder side: each group encodes its own samples, its ranks in turn; samples of several parts are cut in two.

    The later half comes first, on the next rank: rows that came in the order of the ranks would be at wrong places.
    """
    encoder = []
    for groups in llm:
        shares = []
        for samples in groups:
            own = [[] for _ in range(tp)]
            for turn, sample in enumerate(s for s in samples if num_parts(s)):
                parts = num_parts(sample)
                if parts > 1:
                    own[turn % tp].append([sample, parts // 2, parts - parts // 2])
                    own[(turn + 1) % tp].insert(0, [sample, 0, parts // 2])
                else:
                    own[turn % tp].append(sample)
            shares += own
        encoder.append(shares)
    return encoder


def parts_of_toy(index):
    """Parts of a sample of the toy's data."""
    return sum(count for groups in toy_sample(index).sample.parts for count, *_ in groups)


CASES = [
    ("text", 2, 2, {}),
    ("uneven", 1, 2, {"zero": 1}),
    ("uneven", 2, 2, {"zero": 3}),
    ("uneven", 1, 4, {}),
    ("uneven", 1, 2, {}),
    ("uneven", 1, 2, {"zero": 3}),
    ("text", 2, 2, {"zero": 1}),
    ("uneven", 1, 4, {"zero": 1}),
    ("uneven", 1, 4, {"zero": 3}),
    ("text", 2, 2, {"zero": 3}),
    # Shards of the encoder over two ranks each, whose copies are in other tensor groups.
    ("uneven", 2, 2, {"zero": 1, "shard_ranks": 2}),
    ("text", 4, 2, {"zero": 2}),
]


@pytest.mark.some(1, 3)
@pytest.mark.parametrize(("placed", "dp", "tp", "sharding"), CASES, ids=str)
def test_ranks_with_whole_encoders_train_as_one_process(
    placed, dp, tp, sharding, model_dir, oracles, tmp_path
):
    """Each rank encodes its share; all of them, over all groups, sum the encoder's gradients."""
    llm = PLACED[placed, dp]
    assert parts_of_toy(5) > 1, "a sample is cut over ranks"
    plan = write_colocated(tmp_path / "plan.json", dp, len(llm), llm_tp=tp, **sharding)
    schedule = make_schedule(llm, tp * dp, encoder=divided(llm, tp, parts_of_toy))
    check(plan, schedule, model_dir, oracles(frozen_none), tmp_path)


@pytest.mark.some(1)
@pytest.mark.parametrize("zero", [0, 3])
def test_ranks_encode_for_other_groups(zero, model_dir, oracles, tmp_path):
    """Shares go to any rank, be it in the group that reads the sample or not."""
    llm = PLACED["text", 2]
    plan = write_colocated(tmp_path / "plan.json", 2, len(llm), llm_tp=2, zero=zero)
    check(plan, make_schedule(llm, 4), model_dir, oracles(frozen_none), tmp_path)


@pytest.mark.some(1, 3)
@pytest.mark.parametrize("is_frozen", [frozen_tower, frozen_llm, frozen_all_but_projector])
@pytest.mark.parametrize("zero", [0, 1, 3])
def test_what_is_frozen_stays(zero, is_frozen, model_dir, oracles, tmp_path):
    llm = PLACED["uneven", 1]
    plan = write_colocated(tmp_path / "plan.json", 1, len(llm), llm_tp=2, zero=zero)
    schedule = make_schedule(llm, 2, encoder=divided(llm, 2, parts_of_toy))
    check(plan, schedule, model_dir, oracles(is_frozen), tmp_path, is_frozen)


@pytest.mark.some(1, 7)
@pytest.mark.parametrize("zero", [0, 3])
@pytest.mark.parametrize("family", ON_RANKS)
def test_families_on_ranks_with_whole_encoders(family, zero, tmp_path):
    """Tiles and packed patches: a group with text alone beside media, then with nothing."""
    case = Case(family, tmp_path)
    last = len(case.samples) - 1
    llm = [[[last], [0]], [list(range(1, last)), []]]
    size = {"global_batch_size": len(case.samples)}
    plan = write_colocated(tmp_path / "plan.json", 2, len(llm), llm_tp=2, zero=zero, **size)

    def num_parts(index):
        return case.samples[index].num_parts if case.samples[index].media else 0

    case.check(plan, llm, divided(llm, 2, num_parts), CONDITION.get(family, 1))
