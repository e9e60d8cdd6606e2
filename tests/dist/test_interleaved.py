"""LLM ranks that hold several chunks: the gradient is that of one process, and runs go on in other layouts."""

from __future__ import annotations

import json

import pytest
import test_conformance_ranks
import tiny_llava
import torch
from conformance import SETTINGS
from demo_run import lines, request, run_training, write_demo
from lists import lists_of_rounds, random_lists
from ranks import results, run_ranks
from test_conformance_ranks import Case, shared_out
from test_gradients import AWARE, BLIND
from test_layouts import Oracle, check, frozen_none
from test_resume import BATCH, MICROBATCHES, NUM_SAMPLES, STEPS, kept, run, tensors, trained
from tiny_families import CONDITION
from toy_run import RankParts, make_schedule, warm_model_dir, write_plan

from dflop._native import Plan
from dflop.models.adapters import add_adapters
from dflop.models.recipes import freeze
from dflop.runtime import messages

NUM_LAYERS = 7
"""Of the LLM: they do not divide evenly over six stages."""


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory):
    warm_model_dir(tmp_path_factory.mktemp("warm"))
    return tiny_llava.write_model_dir(tmp_path_factory.mktemp("model"), num_hidden_layers=NUM_LAYERS)


@pytest.fixture(scope="module")
def expected(model_dir, tmp_path_factory):
    return Oracle(model_dir, tmp_path_factory.mktemp("pretrained"), frozen_none)


def name(value):
    if isinstance(value, dict):
        return "-".join(f"{key}{number}" for key, number in value.items()) or "plain"
    return "e{}-l{}-pp{}x{}".format(*value) if isinstance(value, tuple) else str(value)


def plan_of(path, layout, llm, **options):
    """Replicas of the encoder and of the LLM, pipeline ranks of the LLM, chunks of each."""
    encoder_dp, llm_dp, llm_pp, chunks = layout
    path.mkdir(parents=True, exist_ok=True)
    return write_plan(
        path / "plan.json", encoder_dp, llm_dp, llm_pp, len(llm), llm_interleave=chunks, **options
    )


# Each row covers what can go wrong: two and three ranks, chunks of uneven cuts, replicas, encoder stages, layers cut among
# ranks, states cut among replicas, the order in which all forwards come first.
COVERING = [
    ("blind", (1, 1, 2, 2), {}),
    ("aware", (2, 1, 2, 3), {"llm_cut": [2, 1, 1, 1, 1, 1]}),
    ("aware", (1, 1, 3, 2), {"llm_cut": [1, 1, 1, 1, 2, 1]}),
    ("aware", (2, 2, 2, 2), {"zero": 1}),
    ("aware", (1, 2, 2, 2), {"zero": 2, "recompute": "full"}),
    ("aware", (1, 1, 2, 2), {"encoder_pp": 2, "order": "gpipe"}),
    ("blind", (1, 1, 2, 2), {"llm_tp": 2}),
]


@pytest.mark.some(1)
@pytest.mark.parametrize(("arm", "layout", "options"), COVERING, ids=name)
def test_gradients_equal_those_of_one_process(arm, layout, options, model_dir, expected, tmp_path):
    """And so do the weights after three steps."""
    llm = {"blind": BLIND, "aware": AWARE}[arm][layout[1]]
    plan = plan_of(tmp_path, layout, llm, **options)
    assert {len(plan.stages(rank)) for rank in range(plan.num_ranks)} == {1, layout[3]}
    check(plan, make_schedule(llm, layout[0]), model_dir, expected, tmp_path)


@pytest.mark.parametrize("layout", [(1, 1, 2, 2), (2, 1, 3, 2)], ids=name)
def test_any_action_list_gives_them(layout, model_dir, expected, tmp_path, monkeypatch):
    """Each rank in an order of its own, backwards in one and in two.

    Messages need no tags: on NCCL those of either kind have groups of their own, in each direction.
    """
    monkeypatch.setattr(messages.Messages, "_tag", lambda *place: int(place[-1]))
    llm = AWARE[layout[1]]
    plan = plan_of(tmp_path, layout, llm)
    schedule = make_schedule(llm, layout[0], actions=random_lists(plan, len(llm), 3))
    check(plan, schedule, model_dir, expected, tmp_path)


def test_a_pipeline_that_runs_empty_around_a_giant_gives_them(model_dir, expected, tmp_path):
    """The largest microbatch has a round of its own, between a round of two and one of one."""
    llm = AWARE[1]
    plan = plan_of(tmp_path, (2, 1, 2, 2), llm)
    lists = lists_of_rounds(plan, [[0, 2], [3], [1]])
    check(plan, make_schedule(llm, 2, actions=lists), model_dir, expected, tmp_path)


def test_a_tied_head_is_trained_as_one(tmp_path):
    """The embedding is in the first chunk of the first rank, the head in the last chunk of the last."""
    warm_model_dir(tmp_path / "warm")
    model_dir = tiny_llava.write_model_dir(tmp_path / "model", tie_word_embeddings=True)
    expected = Oracle(model_dir, tmp_path / "pretrained", frozen_none)
    llm = AWARE[2]
    plan = plan_of(tmp_path, (1, 2, 2, 2), llm)
    check(plan, make_schedule(llm, 1), model_dir, expected, tmp_path)


def test_adapters_have_the_gradients_of_one_stage_a_rank(model_dir, tmp_path):
    """Adapters on the layers of every chunk: as where each rank has one run of layers."""
    llm = AWARE[1]

    def prepare(pieces):
        for piece in pieces.values():
            add_adapters(piece, 4, 8.0, 1)
            freeze(piece, "lora")

    def gradients(layout):
        directory = tmp_path / name(layout)
        plan = plan_of(directory, layout, llm)

        def rank(index):
            parts = RankParts(plan, model_dir, directory / "store", index, prepare_pieces=prepare)
            # Else the first matrix of each adapter has no gradient: the second begins with zeros.
            for key, p in parts.gradients.parameters.items():
                with torch.no_grad():
                    p.add_(0.01 * torch.randn(p.shape, generator=torch.Generator().manual_seed(len(key))))
            loss = parts.step(make_schedule(llm, 1))
            return loss, {key: p.grad.numpy() for key, p in parts.gradients.parameters.items()}

        found = results(run_ranks(plan.num_ranks, rank, directory))
        return sum(loss for loss, _ in found), {key: g for _, of_rank in found for key, g in of_rank.items()}

    (loss, plain), (other, chunked) = gradients((1, 1, 2, 1)), gradients((1, 1, 2, 3))
    assert loss == pytest.approx(other, rel=1e-6)
    assert set(plain) == set(chunked)
    assert len({key.split(".layers.")[1].split(".")[0] for key in plain if ".layers." in key}) == NUM_LAYERS
    for key, gradient in plain.items():
        error = float(torch.from_numpy(gradient - chunked[key]).norm())
        assert error <= 1e-5 * max(float(torch.from_numpy(gradient).norm()), 1e-6), key


SUITE = ("llava_onevision", "qwen2_5_vl")


@pytest.mark.some(1)
@pytest.mark.parametrize(
    "family", [f if f in SUITE else pytest.param(f, marks=pytest.mark.layouts) for f in SETTINGS]
)
def test_every_family_has_them(family, tmp_path, monkeypatch):
    """Two encoder replicas, two LLM ranks of two chunks; a microbatch of text alone, an empty one."""
    write_model = test_conformance_ranks.write_model

    def deepened(directory, family):
        model_dir = write_model(directory, family)
        path = model_dir / "config.json"
        config = json.loads(path.read_text())
        of_model = config.get("thinker_config", config)
        text = of_model.get("text_config", of_model)
        # Gradients of key biases are nothing but rounding: with weights as large as in fewer layers there is more of it.
        text |= {"num_hidden_layers": 4, "initializer_range": 0.05}
        text.pop("layer_types", None)
        path.write_text(json.dumps(config))
        return model_dir

    monkeypatch.setattr(test_conformance_ranks, "write_model", deepened)
    case = Case(family, tmp_path)
    last = len(case.samples) - 1
    llm = [[[last, 0]], [[]], [list(range(1, last))]]
    plan = plan_of(tmp_path, (2, 1, 2, 2), llm, global_batch_size=len(case.samples))
    case.check(plan, llm, shared_out(case.samples, llm), CONDITION.get(family, 1))


@pytest.mark.more
def test_a_run_goes_on_with_chunks_and_back(tmp_path):
    """Trained without chunks, with two a rank, and without again: the samples that come next, and what they teach."""
    demo = write_demo(tmp_path / "demo", NUM_SAMPLES, BATCH, MICROBATCHES, llm_layers=4)
    whole, there, back = (tmp_path / kind for kind in ("whole", "there", "back"))
    run(demo, whole, tmp_path / "1")
    # Optimizer states cut over two replicas: a rank's shard runs across its chunks.
    plan = plan_of(tmp_path / "chunked", (1, 2, 2, 2), [None] * MICROBATCHES, global_batch_size=BATCH, zero=1)
    asked = {"plan": str(tmp_path / "chunked/plan.json"), "num_ranks": plan.num_ranks}
    asked |= {"made_from": {"plan": "of other ranks", "data_profile": "another"}}
    run(demo, there, tmp_path / "2", resume=str(whole / "checkpoints/step-2"), **asked)
    run(demo, back, tmp_path / "3", resume=str(there / "checkpoints/step-4"))
    for out, first in ((there, 2), (back, 4)):
        assert [turn["samples"] for turn in lines(out / "schedules.jsonl")] == trained(whole)[first:]
        for here, expected in zip(kept(out), kept(whole)[first:], strict=True):
            assert here["loss"] == pytest.approx(expected["loss"], rel=1e-5)
            assert here["grad_norm"] == pytest.approx(expected["grad_norm"], rel=1e-4)
        moved, before, after = (
            tensors(path / "checkpoints" / step)
            for path, step in ((whole, "step-2"), (whole, f"step-{STEPS}"), (out, f"step-{STEPS}"))
        )
        for key in (key for key in before if key.startswith("model.")):
            way = float((before[key] - moved[key]).norm())
            if not key.endswith("k_proj.bias"):
                assert float((before[key] - after[key]).norm()) <= 1e-3 * way, key
    # What ran is what was simulated: every action of every chunk, each once.
    for trace in lines(there / "trace.jsonl"):
        ran = sorted((rank, name) for rank, name, _, _ in trace["spans"])
        listed = [(rank, str(action)) for rank in range(plan.num_ranks) for action in plan.actions(rank)]
        assert ran == sorted(listed)
        held = sum(len(plan.stages(rank)) for rank in range(plan.num_ranks))
        assert len(ran) == 2 * MICROBATCHES * held

    # Rehearsed, too: no action takes less than predicted.
    rehearsal = {"speed": 20.0, "slow_ranks": [], "slow_shapes": None, "network_latency_ns": 0, "kill": None}
    asked |= {"steps": 2, "rehearsal": rehearsal}
    rehearsed = run_training(request(demo, tmp_path / "rehearsed", **asked), tmp_path / "4")
    assert results(rehearsed) == [0] * plan.num_ranks
    for trace in lines(tmp_path / "rehearsed/trace.jsonl"):
        assert sorted((rank, name) for rank, name, _, _ in trace["spans"]) == sorted(listed)
    assert all(m["step_ns"] >= m["predicted_ns"] > 0 for m in lines(tmp_path / "rehearsed/metrics.jsonl"))


def test_a_plan_that_cannot_be_interleaved_is_refused(tmp_path):
    with pytest.raises(
        Exception, match="llm_interleave: 2, must be 1 where llm.pipeline_parallel_degree is 1"
    ):
        plan_of(tmp_path, (1, 2, 1, 2), [None])
    plan = plan_of(tmp_path, (1, 1, 2, 4), [None])
    assert isinstance(plan, Plan)
    with pytest.raises(Exception, match="llm pp 2 x interleave 4 exceeds the 7 layers of the llm"):
        plan.llm_layers(1, NUM_LAYERS)
