"""Experts dealt out over ranks: gradients and their norm are those of Hugging Face's model in one process.

What is compared, and the samples, are those of `test_conformance_ranks.py`. Each rank has its own samples or none, while
its experts run on the rows of all ranks of its group.
"""

from __future__ import annotations

import copy

import pytest
import torch
import torch._dynamo  # noqa: F401  (FSDP2 asks for it in its first hook: once, for all forked ranks)
import torch.distributed as dist
from conformance import CPU, FLOAT, SETTINGS, write_model
from ranks import results, run_ranks
from shards import arrays_of
from test_compiled_ranks import compiled
from test_conformance_ranks import Case, FamilyParts
from tiny_families import CONDITION
from toy_run import SEED, write_colocated

from dflop import ProfileError
from dflop.models import load_adapter
from dflop.models.expert_ranks import ExpertRank, add_exchange, dealt_experts, no_rows
from dflop.models.recompute import most_of
from dflop.models.sums import Sums
from dflop.models.tensor import slices_of

NAME = "qwen3_vl_moe"
WITH_EXPERTS = ("internvl-qwen3_moe", "qwen3_omni_moe", "qwen3_5_moe", "glm4v_moe", "gemma4-experts")
"""The other families with experts: in place of the MLP, beside one for all, behind a layer without, beside the MLP."""


def placed(samples, dp):
    """Samples of [microbatch][replica]: text alone beside media, then one rank with all others and the rest with none."""
    last = len(samples) - 1
    nothing = [[] for _ in range(dp - 2)]
    return [[[last], [0], *nothing], [[]] * dp, [[], list(range(1, last)), *nothing]]


def check(case, dp, ep, zero, recompute="none", **others):
    """A step of `dp` ranks whose groups of `ep` deal out the experts."""
    plan, llm, encoder = layout_of(case, dp, ep, zero, recompute)
    case.check(plan, llm, encoder, CONDITION.get(case.name, 1), **others)


def layout_of(case, dp, ep, zero, recompute):
    """The plan, and the samples of LLM and encoder."""
    llm = placed(case.samples, dp)
    fields = {"zero": zero, "recompute": recompute, "expert_parallel_degree": ep}
    path, num_samples = case.directory / "plan.json", len(case.samples)
    plan = write_colocated(path, dp, len(llm), global_batch_size=num_samples, **fields)
    return plan, llm, [[[s for s in held if case.samples[s].media] for held in replicas] for replicas in llm]


# Of one rank's experts: two replicas or one; microbatches as they are, or layers that recompute and exchange again.
LAYOUTS = [
    (4, 2, 3, "none"),
    (2, 2, 0, "selective"),
    (4, 2, 2, "full"),
    (3, 3, 3, "full:1"),
    (2, 2, 1, "none"),
    (4, 2, 0, "full"),
    (3, 3, 0, "selective:1"),
    (3, 3, 2, "selective"),
    (6, 3, 3, "selective"),
    (6, 2, 3, "full"),
]


@pytest.mark.some(1, 2)
@pytest.mark.parametrize(("dp", "ep", "zero", "recompute"), LAYOUTS)
def test_gradients_of_dealt_experts(dp, ep, zero, recompute, tmp_path):
    check(Case(NAME, tmp_path), dp, ep, zero, recompute)


@pytest.mark.more
def test_a_group_of_four(tmp_path, monkeypatch):
    """All ranks in one group: nobody else has a rank's experts."""
    files = copy.deepcopy(SETTINGS[NAME])
    files[0]["text_config"]["num_experts"] = 8
    monkeypatch.setitem(SETTINGS, NAME, files)
    check(Case(NAME, tmp_path), 4, 4, 3)


@pytest.mark.some(0, 1)
@pytest.mark.parametrize("zero", [3, 0])
def test_ranks_recompute_the_same_where_the_schedule_says_otherwise(zero, tmp_path):
    """Easing: each rank as much as its own memory asks. Ranks would meet a different number of times."""
    modes = [["none", "full"], ["full:1", "none"], ["selective", "selective:1"]]
    eased = [[{"encoder": "none", "llm": mode} for mode in of_ranks] for of_ranks in modes]
    check(Case(NAME, tmp_path), 2, 2, zero, "full", fields={"recompute": eased})


@pytest.mark.layouts
@pytest.mark.parametrize(("zero", "recompute"), [(3, "full"), (0, "none"), (2, "selective")])
def test_compiled_layers_with_dealt_experts(zero, recompute, tmp_path):
    check(Case(NAME, tmp_path), 2, 2, zero, recompute, prepare=compiled)


@pytest.mark.some(0, 1)
@pytest.mark.parametrize("zero", [0, 3])
def test_rows_travel_in_bfloat16(zero, tmp_path):
    """Gradients are summed in float32, and are those of all experts on each rank up to the rounding of bfloat16."""
    case = Case(NAME, tmp_path)
    plan, llm, encoder = layout_of(case, 2, 2, zero, "none")
    schedule = case.schedule(llm, encoder)

    def rank(index):
        arguments = (plan, case.model_dir, tmp_path / "store", index, case.samples)
        parts = FamilyParts(*arguments, dtype=torch.bfloat16)
        parts.step(schedule)
        gradients = {name: p.grad for name, p in parts.gradients.parameters.items()}
        assert {gradient.dtype for gradient in gradients.values()} == {torch.float32}
        return arrays_of(gradients), slices_of(parts.pieces[1])

    for gradients, slices in results(run_ranks(2, rank, tmp_path)):
        errors, norms = [], []
        for name, gradient in gradients.items():
            expected = case.expected[name] / case.label_tokens
            expected = slices[name].take(expected) if name in slices else expected
            errors.append((torch.from_numpy(gradient) - expected).norm())
            norms.append(expected.norm())
        assert float(torch.stack(errors).norm()) <= 0.05 * float(torch.stack(norms).norm())


@pytest.mark.some(0, 1)
@pytest.mark.parametrize(("zero", "recompute"), [(3, "selective"), (0, "full"), (3, "full"), (2, "none")])
@pytest.mark.parametrize("name", WITH_EXPERTS)
def test_every_family_deals_out_its_experts(name, zero, recompute, tmp_path):
    check(Case(name, tmp_path), 2, 2, zero, recompute)


def layer(adapter, dealt, way="eager"):
    """A stage of one layer, and its experts, computed in this way."""
    stage = adapter.build_llm_stage(0, 1, CPU, FLOAT, SEED, experts=dealt)
    experts = next(module for module in stage.modules() if hasattr(module, "gate_up_proj"))
    experts.config._experts_implementation = way
    return stage, experts


@pytest.mark.some(1)
@pytest.mark.parametrize(("way", "ep"), [("eager", 3), ("grouped_mm", 2), ("grouped_mm", 6), ("eager", 2)])
def test_dealt_experts_are_those_of_a_whole_layer(way, ep, tmp_path):
    """Rows of any number on each rank, none on one; and experts that nobody reads, all those of a rank where there are 3."""
    adapter = load_adapter(write_model(tmp_path, NAME))
    num, width, chosen = adapter.text.num_experts, adapter.hidden_size, adapter.text.num_experts_per_tok

    draw = torch.Generator().manual_seed(ep)
    sizes = [5, 0, 1, 7, 3, 2][:ep]
    hidden = [torch.randn(size, width, generator=draw, requires_grad=True) for size in sizes]
    scores = [torch.rand(size, num, generator=draw) for size in sizes]
    for score in scores:
        score[:, num - num // 3 :] = 0.0
    weights, index = zip(*(score.topk(chosen) for score in scores), strict=True)
    for one in weights:
        one.requires_grad_()
    _, whole = layer(adapter, ExpertRank(), way)
    made = [whole(*of_rank) for of_rank in zip(hidden, index, weights, strict=True) if of_rank[0].shape[0]]
    sum(one.square().sum() for one in made).backward()
    expected = {kind: p.grad for kind, p in whole.named_parameters()}
    read = whole.gate_up_proj.grad.abs().sum((1, 2)) > 0
    assert read[: num - num // 3].any()
    assert not read[num - num // 3 :].any()

    def rank(place):
        dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=place, world_size=ep)
        stage, experts = layer(adapter, ExpertRank(ep, place), way)
        assert dealt_experts(stage) is experts
        add_exchange(stage, Sums(dist.group.WORLD))
        own = [values[place].detach().requires_grad_() for values in (hidden, weights)]
        if sizes[place]:
            found = experts(own[0], index[place], own[1])
            found.square().sum().backward()
        else:
            found = no_rows(experts, torch.zeros((), requires_grad=True))
            found.backward()
        gradients = {kind: p.grad.numpy() for kind, p in experts.named_parameters()}
        slices = {name.rpartition(".")[2]: part for name, part in slices_of(stage).items()}
        return found.detach().numpy(), [one.grad for one in own], gradients, slices

    num_held = 0
    for place, (found, own, gradients, slices) in enumerate(results(run_ranks(ep, rank, tmp_path))):
        if sizes[place]:
            torch.testing.assert_close(torch.from_numpy(found), made.pop(0).detach())
            torch.testing.assert_close(own, [hidden[place].grad, weights[place].grad])
        for kind, gradient in gradients.items():
            num_held += gradient.shape[0]
            torch.testing.assert_close(torch.from_numpy(gradient), slices[kind].take(expected[kind]))
    assert num_held == num * len(expected)


def test_what_cannot_be_dealt_out_is_refused(tmp_path):
    """The number of experts, and a backbone without any."""
    adapter = load_adapter(write_model(tmp_path / "experts", NAME))
    with pytest.raises(
        ProfileError,
        match="`text_config.num_experts` is 6, must be a multiple of the expert parallel degree 4",
    ):
        adapter.build_llm_stage(0, 1, CPU, FLOAT, SEED, experts=ExpertRank(4, 0))
    adapter = load_adapter(write_model(tmp_path / "none", "qwen3_vl"))
    with pytest.raises(
        ProfileError, match="a backbone of `qwen3_vl_text` has no experts to deal out over 2 ranks"
    ):
        adapter.build_llm_stage(0, 1, CPU, FLOAT, SEED, experts=ExpertRank(2, 0))


def test_all_ranks_recompute_what_the_one_does_that_recomputes_most():
    ascending = ["none", "selective:1", "selective:12", "selective", "full:3", "full:12", "full"]
    for place, mode in enumerate(ascending):
        assert most_of(reversed(ascending[: place + 1])) == mode


def test_one_rank_alone_runs_all_rows_through_its_own_experts(tmp_path):
    """As it is measured, without the others: as many rows as come where experts are read evenly."""
    adapter = load_adapter(write_model(tmp_path, NAME))
    stage, experts = layer(adapter, ExpertRank(2, 1))
    hidden = torch.randn(5, adapter.hidden_size)
    weights, index = torch.rand(5, adapter.text.num_experts).topk(2)
    expected = experts(hidden, index % experts.num_experts, weights)
    add_exchange(stage, Sums(None, 2))
    torch.testing.assert_close(experts(hidden, index, weights), expected)
