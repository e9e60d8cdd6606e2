"""Tensor parallelism: gradients and three steps of AdamW are those of one process, on either side of the boundary.

The oracle and the comparison are those of `test_layouts.py`; `test_matrix.py` has every layout.
"""

from __future__ import annotations

import pytest
import tiny_llava
import torch
import torch._dynamo  # noqa: F401  (FSDP2 asks for it in its first hook: once, for all forked ranks)
from conformance import write_model
from lists import random_lists
from ranks import results, run_ranks
from shards import arrays_of, whole_of
from test_layouts import (
    PLACED,
    Oracle,
    assert_close,
    check,
    frozen_none,
    frozen_tower,
    model_dir,
    name,
    oracles,
    schedule_of,
)
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.tensor import DTensor
from toy_run import SEED, RankParts, make_schedule, write_colocated, write_plan

from dflop.models.adapters import add_adapters
from dflop.models.recipes import freeze
from dflop.models.tensor import slices_of
from dflop.parallel.shard import local
from dflop.runtime.checkpoint import Saver
from dflop.runtime.optim import Optimizer
from dflop.runtime.rates import COMPONENTS, Rates

RATES = Rates(dict.fromkeys(COMPONENTS, 1e-3), "constant", 1, 0, 1)

__all__ = ["model_dir", "oracles"]

# Replicas of encoder and LLM, stages of the LLM, tensor degrees of both, what is cut among replicas.
COVERING = [
    ((1, 1, 1), (4, 2), {}),
    ((1, 2, 1), (2, 2), {}),
    ((1, 2, 1), (1, 2), {"zero": 1}),
]


def run(layout, tensor, sharding, seed, model_dir, oracle, tmp_path, **more):
    """One layout, with lists drawn at random: all ranks of a tensor group run the same."""
    (encoder_dp, llm_dp, llm_pp), (encoder_tp, llm_tp) = layout, tensor
    llm = PLACED["uneven", llm_dp]
    degrees = {"encoder_tp": encoder_tp, "llm_tp": llm_tp}
    plan = write_plan(
        tmp_path / "plan.json", encoder_dp, llm_dp, llm_pp, len(llm), **degrees, **sharding, **more
    )
    by_group = write_plan(tmp_path / "groups.json", encoder_dp, llm_dp, llm_pp, len(llm))
    schedule = make_schedule(llm, encoder_dp, actions=random_lists(by_group, len(llm), seed))
    check(plan, schedule, model_dir, oracle, tmp_path)


@pytest.mark.some(1)
@pytest.mark.parametrize(("layout", "tensor", "sharding"), COVERING, ids=name)
def test_tensor_parallelism_trains_as_one_process(layout, tensor, sharding, model_dir, oracles, tmp_path):
    """Ranks that share layers: heads, MLP, vocabulary; microbatches of text alone, of nothing; B, I and W."""
    run(layout, tensor, sharding, 3, model_dir, oracles(frozen_none), tmp_path)


@pytest.mark.more
# 2 heads of keys and values of the LLM on 4 ranks: each on two of them. A vocabulary of 300 divides.
@pytest.mark.parametrize(("placed", "dp", "tp"), [("text", 2, 2), ("uneven", 1, 4)])
def test_ranks_that_hold_both_components_share_their_layers(placed, dp, tp, model_dir, oracles, tmp_path):
    """Colocated: two tensor groups of two, states cut among their first and among their second ranks; one of four."""
    llm = PLACED[placed, dp]
    sharding = {"zero": 1} if dp > 1 else {}
    plan = write_colocated(tmp_path / "plan.json", dp, len(llm), encoder_tp=tp, llm_tp=tp, **sharding)
    check(plan, schedule_of(llm), model_dir, oracles(frozen_none), tmp_path)


# `uneven` too has ranks without media beside ranks with media.
@pytest.mark.more
@pytest.mark.parametrize("placed", [pytest.param("text", marks=pytest.mark.layouts), "uneven"])
def test_layers_gathered_one_by_one_are_cut_as_well(placed, model_dir, oracles, tmp_path):
    """ZeRO-3: replicas x tensor group; a rank without samples meets its replicas, and nobody of its group sums."""
    llm = PLACED[placed, 2]
    degrees = {"encoder_tp": 2, "llm_tp": 2}
    plan = write_colocated(tmp_path / "plan.json", 2, len(llm), zero=3, **degrees)
    check(plan, schedule_of(llm), model_dir, oracles(frozen_none), tmp_path)


@pytest.mark.more
@pytest.mark.parametrize("recompute", ["selective", "full"])
def test_layers_that_recompute_sum_again(recompute, model_dir, oracles, tmp_path):
    """What a layer computes again in its backward is the whole result too."""
    run((1, 1, 1), (2, 2), {}, 4, model_dir, oracles(frozen_none), tmp_path, recompute=recompute)


@pytest.mark.more
def test_a_frozen_tower_that_is_cut(model_dir, oracles, tmp_path):
    """No rank waits for a gradient that nobody has."""
    llm = PLACED["text", 2]
    plan = write_plan(tmp_path / "plan.json", 1, 2, 1, len(llm), encoder_tp=2, llm_tp=2)
    schedule = make_schedule(llm, 1)
    check(plan, schedule, model_dir, oracles(frozen_tower), tmp_path, frozen_tower)


def test_a_vocabulary_that_does_not_divide(oracles, tmp_path):
    """Three ranks, 301 ids of 4 heads would not do; two ranks, 301 ids: one has a row less."""
    model_dir = tiny_llava.write_model_dir(tmp_path / "model", vocab_size=301)
    llm = PLACED["uneven", 1]
    plan = write_plan(tmp_path / "plan.json", 1, 1, 1, len(llm), llm_tp=2)

    oracle = Oracle(model_dir, tmp_path / "pretrained", frozen_none)
    check(plan, make_schedule(llm, 1), model_dir, oracle, tmp_path)


@pytest.mark.some(1)
@pytest.mark.parametrize(("vocab_size", "llm_pp"), [(300, 1), (301, 2)])
def test_a_head_tied_to_the_embedding(vocab_size, llm_pp, tmp_path):
    """One matrix, cut once: its gradient is that of both of its uses, of each rank's rows, on whichever stages."""
    model_dir = tiny_llava.write_model_dir(
        tmp_path / "model", vocab_size=vocab_size, tie_word_embeddings=True
    )
    llm = PLACED["uneven", 1]
    plan = write_plan(tmp_path / "plan.json", 1, 1, llm_pp, len(llm), llm_tp=2)
    oracle = Oracle(model_dir, tmp_path / "pretrained", frozen_none)
    assert "lm_head.weight" not in oracle.gradients
    check(plan, make_schedule(llm, 1), model_dir, oracle, tmp_path)


@pytest.mark.some(1)
@pytest.mark.parametrize(("layout", "sharding"), [((1, 1, 1), {}), ((1, 2, 1), {"zero": 1})], ids=name)
def test_adapters_of_cut_layers(layout, sharding, model_dir, tmp_path):
    """LoRA: what is whole beside a cut layer has a summand on each rank; two hold each head of keys and values."""
    encoder_dp, llm_dp, llm_pp = layout
    llm = PLACED["uneven", llm_dp]
    rank_of_adapters, alpha = 3, 5.0

    def adapt(pieces):
        for piece in pieces.values():
            add_adapters(piece, rank_of_adapters, alpha, SEED)
            with torch.no_grad():
                fill_b(piece)
            freeze(piece, "lora")

    def gradients(plan, folder):
        def rank(index):
            parts = RankParts(plan, model_dir, tmp_path / folder / "store", index, prepare_pieces=adapt)
            loss = parts.step(make_schedule(llm, encoder_dp))
            found = arrays_of({n: p.grad for n, p in parts.gradients.parameters.items()})
            slices = {n: s for piece in parts.pieces.values() for n, s in slices_of(piece).items()}
            return loss, float(parts.gradients.clip(1e-3)), found, slices

        return results(run_ranks(plan.num_ranks, rank, tmp_path / folder))

    one = gradients(write_plan(tmp_path / "one.json", 1, llm_dp, 1, len(llm)), "one")
    plan = write_plan(tmp_path / "plan.json", *layout, len(llm), llm_tp=4, **sharding)
    expected = {n: torch.from_numpy(g) for _, _, found, _ in one for n, g in found.items()}
    cut = gradients(plan, "cut")
    assert sum(loss for loss, *_ in cut) == pytest.approx(sum(loss for loss, *_ in one), rel=1e-6)
    largest = max(float(g.norm()) for g in expected.values())
    seen = set()
    for _, norm, found, slices in cut:
        assert norm == pytest.approx(one[0][1], rel=1e-5)
        for n, gradient in found.items():
            wanted = slices[n].take(expected[n]) if n in slices else expected[n]
            assert_close(gradient, wanted, 1e-4 * largest, n)
            seen.add(n)
    assert seen == set(expected)
    assert sum(".lora_" in n for n in seen) >= 14


def fill_b(piece):
    """Gives B values, by its name alone: zeros would leave A without a gradient."""
    slices = slices_of(piece)
    for n, parameter in piece.named_parameters():
        if ".lora_B." in n:
            shape = slices[n].shape if n in slices else parameter.shape
            values = 0.1 * torch.randn(shape, generator=torch.Generator().manual_seed(len(n)))
            parameter.copy_(slices[n].take(values) if n in slices else values)


@pytest.mark.parametrize(
    ("degrees", "message"),
    [
        (
            {"llm_tp": 3},
            "`text_config.num_attention_heads` is 4, must be a multiple of the tensor parallel degree 3",
        ),
        (
            {"encoder_tp": 3},
            "`vision_config.num_attention_heads` is 4, must be a multiple of the tensor parallel degree 3",
        ),
    ],
    ids=name,
)
def test_what_does_not_divide_is_named(degrees, message, model_dir, tmp_path):
    """One error, with the field and the numbers."""
    plan = write_plan(tmp_path / "plan.json", 1, 1, 1, 4, **degrees)

    def rank(index):
        try:
            RankParts(plan, model_dir, tmp_path / "store", index)
        except Exception as error:
            return str(error)
        return ""

    said = results(run_ranks(plan.num_ranks, rank, tmp_path))
    assert message in said[-1] + said[0]


def test_each_rank_keeps_its_part(model_dir, tmp_path):
    """Of two ranks each has half of what is cut, and reads no more of the files than that."""
    plan = write_plan(tmp_path / "plan.json", 1, 1, 1, 4, llm_tp=2)

    def rank(index):
        parts = RankParts(plan, model_dir, tmp_path / "store", index)
        return {n: p.numel() for piece in parts.pieces.values() for n, p in piece.named_parameters()}

    _, first, second = results(run_ranks(3, rank, tmp_path))
    assert first == second
    text = "model.language_model."
    assert first[f"{text}layers.0.self_attn.q_proj.weight"] == 48 * 48 // 2
    assert first[f"{text}layers.0.mlp.down_proj.weight"] == 48 * 96 // 2
    assert first[f"{text}embed_tokens.weight"] == first["lm_head.weight"] == 48 * tiny_llava.VOCABULARY // 2
    assert first[f"{text}layers.0.input_layernorm.weight"] == 48


@pytest.mark.some(1)
@pytest.mark.parametrize(
    ("saved", "read"),
    [
        (((1, 1, 1), (2, 2), {}), ((1, 1, 1), (1, 1), {})),
        (((1, 1, 1), (1, 1), {}), ((1, 2, 1), (1, 2), {"zero": 1})),
        # Written as the one before is read, and read as the next one.
        pytest.param(((1, 2, 1), (2, 2), {"zero": 1}), ((1, 1, 1), (4, 4), {}), marks=pytest.mark.layouts),
        (((2, 2, 1), (2, 2), {"zero": 3, "placement": "colocated"}), ((1, 1, 1), (1, 4), {})),
        (((1, 1, 1), (1, 4), {}), ((2, 2, 1), (2, 2), {"zero": 3, "placement": "colocated"})),
    ],
    ids=["2-1", "1-2", "2-4", "2 gathered-4", "4-2 gathered"],
)
def test_a_checkpoint_of_one_degree_is_read_by_another(saved, read, model_dir, tmp_path):
    """Weights and both moments, whole by their names in the files: slices, shards of slices, repeated heads."""
    write_and_read(saved, read, model_dir, tmp_path)


@pytest.mark.more
@pytest.mark.parametrize(
    ("saved", "read"),
    [
        (((1, 1, 2), (1, 2), {}), ((1, 1, 1), (1, 4), {})),
        (((2, 2, 1), (2, 2), {"zero": 3, "placement": "colocated"}), ((1, 1, 1), (1, 1), {})),
    ],
    ids=["2-4", "2 gathered-1"],
)
@pytest.mark.parametrize("family", ["qwen3_5_moe", "qwen3_5", "glm4v_moe", "gemma4-experts"])
def test_experts_and_linear_attention_are_read_by_another_degree(family, saved, read, tmp_path):
    """Parts of one parameter in several runs: both halves of experts; queries, keys and values of linear attention."""
    write_and_read(saved, read, write_model(tmp_path, family), tmp_path)


def write_and_read(saved, read, model_dir, tmp_path):
    """Writes a checkpoint in one layout, and reads it in another."""
    out = tmp_path / "run"

    def ranks_of(case, folder, do):
        (encoder_dp, llm_dp, llm_pp), (encoder_tp, llm_tp), sharding = case
        degrees = {"encoder_tp": encoder_tp, "llm_tp": llm_tp}
        path = tmp_path / folder / "plan.json"
        plan = write_plan(path, encoder_dp, llm_dp, llm_pp, 4, **degrees, **sharding)

        def rank(index):
            parts = RankParts(plan, model_dir, tmp_path / folder / "store", index)
            parameters = parts.gradients.parameters
            optimizer = Optimizer(parameters, RATES, 0.1, set())
            slices = {n: s for piece in parts.pieces.values() for n, s in slices_of(piece).items()}
            tensors = {n: p.detach() for n, p in parameters.items()}
            states = optimizer.states()
            tensors |= {n: v for n, v in states.items() if not n.endswith(".step")}
            saver = Saver(parts.mesh, out, 1, parts.gradients.held, optimizer, slices)
            return do(saver, tensors, slices)

        return results(run_ranks(plan.num_ranks, rank, tmp_path / folder))

    def value(n, tensor, slices):
        """What a tensor shall hold: numbers that tell its whole name and the place in the whole."""
        of = slices.get(n.removesuffix(".exp_avg").removesuffix(".exp_avg_sq"))
        shape = tensor.shape if of is None else of.shape
        numbers = torch.arange(torch.Size(shape).numel(), dtype=torch.float32) + len(n)
        return numbers.view(shape) if of is None else of.take(numbers.view(shape)).contiguous()

    def save(saver, tensors, slices):
        for n, tensor in tensors.items():
            fill(tensor, value(n, tensor, slices))
        saver.save(3, {})
        saver.finish()

    def load(saver, tensors, slices):
        for tensor in tensors.values():
            local(tensor).zero_()
        saver.load(out / "checkpoints" / "step-3", 3)
        for n, tensor in whole_of(tensors).items():
            assert torch.equal(tensor, value(n, tensors[n], slices)), n
        return sorted(tensors)

    ranks_of(saved, "saved", save)
    seen = {n for names in ranks_of(read, "read", load) for n in names}
    assert "lm_head.weight.exp_avg_sq" in seen

    held = FileSystemReader(out / "checkpoints" / "step-3").read_metadata().state_dict_metadata
    assert held["model.lm_head.weight"].size == (tiny_llava.VOCABULARY, 48)
    assert not any("@" in n for n in held)


def fill(tensor, values):
    """Sets a tensor, or the shard of it that this rank has."""
    if isinstance(tensor, DTensor):
        chunk = tensor.__create_chunk_list__()[0]
        values = values[chunk.offsets[0] : chunk.offsets[0] + chunk.sizes[0]]
    local(tensor).copy_(values)
