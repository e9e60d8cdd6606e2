"""A head tied to the embedding, on the first and the last of several stages: one matrix, held twice, trained as one."""

from __future__ import annotations

import functools
import json

import pytest
import tiny_llava
import torch
import torch.utils.tensorboard  # noqa: F401  (imported once, for all forked ranks)
from demo_run import lines, python, request, run_training
from lists import random_lists
from ranks import results, run_ranks
from test_gradients import AWARE, check, name, one_process
from test_layouts import PLACED, Oracle, frozen_none
from test_layouts import check as check_steps
from test_resume import config as config_of_checkpoints
from test_resume import kept, run, tensors
from test_training import config_with, keep_weights, layout_of, make
from test_weights import DECAY, RATE, PlainLoop, export
from toy_run import RankParts, make_schedule, warm_model_dir, write_plan
from transformers import LlavaOnevisionForConditionalGeneration

from dflop.models import load_adapter

TOLERANCE = 1e-5
"""Of each parameter's change, in its norm; a gradient without the other end's part is off by more than a tenth."""
EPSILON = 1e-3
"""Of AdamW, in the run and in the loop. PyTorch's 1e-8 makes a step of the learning rate of a gradient that is all
rounding, and a tied model has more of those: with it three steps differ by 1.2e-5 in the queries of one layer, with
this by 1.3e-6 everywhere; of the same model without the tie by 2.9e-6 and 1.8e-6. The tied matrix is not among them."""
EMBEDDING = "model.language_model.embed_tokens.weight"


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory):
    """Of a tied model."""
    warm_model_dir(tmp_path_factory.mktemp("warm"))
    return tiny_llava.write_model_dir(tmp_path_factory.mktemp("model"), tie_word_embeddings=True)


@pytest.fixture(scope="module")
def expected(model_dir, tmp_path_factory):
    """What Hugging Face's model gives."""
    return one_process(model_dir, tmp_path_factory.mktemp("pretrained"))


PLACES = [(1, 1, 1), (1, 1, 2), (2, 2, 2), (1, 1, 4), (1, 3, 2)]


@pytest.mark.some(2)
# Lists at random where both ends are on ranks of their own, with replicas; elsewhere the order of a plan does.
@pytest.mark.parametrize(
    ("layout", "seed"),
    [(layout, None) for layout in PLACES]
    + [((2, 2, 2), 1)]
    + [pytest.param(p, 1, marks=pytest.mark.layouts) for p in PLACES if p != (2, 2, 2)],
    ids=lambda value: name(value) if isinstance(value, tuple) else f"seed{value}",
)
def test_the_gradient_is_the_sum_of_both_ends(layout, seed, model_dir, expected, tmp_path):
    """Of the plan's lists and of any others, weights apart among them."""
    encoder_dp, llm_dp, llm_pp = layout
    llm = AWARE[llm_dp]
    plan = write_plan(tmp_path / "plan.json", encoder_dp, llm_dp, llm_pp, len(llm))
    lists = () if seed is None else random_lists(plan, len(llm), seed)
    assert "lm_head.weight" not in expected[1]
    check(plan, make_schedule(llm, encoder_dp, actions=lists), model_dir, expected, tmp_path)


@pytest.mark.parametrize("layout", [(1, 1, 2), (1, 2, 2)], ids=name)
def test_the_norm_counts_it_once(layout, model_dir, expected, tmp_path):
    encoder_dp, llm_dp, llm_pp = layout
    llm = AWARE[llm_dp]
    plan = write_plan(tmp_path / "plan.json", encoder_dp, llm_dp, llm_pp, len(llm))
    norm = float(torch.stack([g.norm() for g in expected[1].values()]).norm())

    def rank(index):
        parts = RankParts(plan, model_dir, tmp_path / "store", index)
        parts.step(make_schedule(llm, encoder_dp))
        ends = parts.mesh.stages[0] in (1, llm_pp)
        assert (EMBEDDING in parts.gradients.parameters) == ends
        return float(parts.gradients.clip(None))

    assert results(run_ranks(plan.num_ranks, rank, tmp_path)) == pytest.approx(
        [norm] * plan.num_ranks, rel=1e-5
    )


@pytest.fixture(scope="module")
def oracle(model_dir, tmp_path_factory):
    """What Hugging Face's model gives, and three steps of AdamW."""
    return Oracle(model_dir, tmp_path_factory.mktemp("oracle"), frozen_none)


CUT = [
    ((1, 2, 2), {"zero": 1}),
    # Ranks of a stage side by side, more of one component than of the other.
    ((1, 3, 2), {"zero": 2, "rank_order": "tp-dp-pp"}),
    # Chunks: the embedding is in the first of a rank, the head in the last of another.
    ((2, 2, 2), {"zero": 2, "llm_interleave": 2}),
    ((2, 4, 2), {"zero": 1, "shard_ranks": 2}),
    # Both ends have half of the rows, each cut over two ranks.
    ((1, 2, 2), {"zero": 1, "llm_tp": 2}),
]


@pytest.mark.some(1)
@pytest.mark.parametrize(("layout", "options"), CUT, ids=str)
def test_states_that_are_cut_at_both_ends_train_as_one_process(layout, options, model_dir, oracle, tmp_path):
    """ZeRO cuts each end among its own replicas: gradients, their norm and the weights after three steps.

    Under lists drawn at random (of tensor groups: the plan's), as ranks of a stage meet only after their last actions.
    """
    encoder_dp, llm_dp, llm_pp = layout
    llm = PLACED["uneven", llm_dp]
    plan = write_plan(tmp_path / "plan.json", encoder_dp, llm_dp, llm_pp, len(llm), **options)
    lists = () if "llm_tp" in options else random_lists(plan, len(llm), 1)
    check_steps(plan, make_schedule(llm, encoder_dp, actions=lists), model_dir, oracle, tmp_path)


@pytest.fixture(scope="module")
def demo(tmp_path_factory):
    """A demo whose model is tied, with weights that its seed would not draw."""

    def tie(directory):
        config = directory / "model/config.json"
        held = json.loads(config.read_text())
        held["text_config"]["tie_word_embeddings"] = held["tie_word_embeddings"] = True
        config.write_text(json.dumps(held))

    demo = make(tmp_path_factory.mktemp("demo"), 20, tie)
    model = load_adapter(demo / "model").reference_model(77)
    model.save_pretrained(demo / "pretrained")
    for path in (demo / "pretrained").glob("*.safetensors*"):
        path.rename(demo / "model" / path.name)
    return demo


def planned(demo, tmp_path):
    """A plan that the planner finds: both ends of a pipeline, cut over two ranks."""
    profile = json.loads((demo / "model_profile.json").read_text())
    cut = {name: profile["modules"][name] for name in ("llm_embedding", "llm_layer", "llm_head")}
    profile["variants"] = [
        {"tensor_parallel_degree": 2, "lora_rank": 0, "has_collectives": True, "modules": cut}
    ]
    plan, path = tmp_path / "plan.json", tmp_path / "model_profile.json"
    path.write_text(json.dumps(profile))
    config = (demo / "dflop.yaml").read_text()
    assert "num_ranks: 2" in config
    (demo / "five.yaml").write_text(config.replace("num_ranks: 2", "num_ranks: 5"))
    files = ["--config", "five.yaml", "--model-profile", str(path), "--out", str(plan)]
    python(["-m", "dflop", "plan", *files, "--only", "llm.tp=2,llm.pp=2"], demo)
    return {"num_ranks": 5, "plan": str(plan), "model_profile": str(path)}


@pytest.mark.more
@pytest.mark.parametrize(
    # The first is the second without replicas.
    "layout",
    [(1, 2, 2, {"zero": 1}), pytest.param((1, 1, 2), marks=pytest.mark.layouts), (1, 2, 2), None],
    ids=str,
)
def test_an_export_of_three_steps_is_that_of_a_plain_loop(layout, demo, tmp_path, monkeypatch):
    """Both ends hold the same bits after it, and `from_pretrained` reads one matrix."""
    monkeypatch.setattr(torch.optim, "AdamW", functools.partial(torch.optim.AdamW, eps=EPSILON))
    settings = {"learning_rate": RATE, "weight_decay": DECAY, "max_grad_norm": None}
    asked = request(
        demo,
        tmp_path / "run",
        **(layout_of(demo, tmp_path, layout) if layout else planned(demo, tmp_path)),
        config=config_with(demo, init="pretrained", **settings),
    )
    assert set(results(run_training(asked, tmp_path, keep_weights(tmp_path)))) == {0}
    held = [torch.load(tmp_path / f"weights {rank}") for rank in range(asked["num_ranks"])]
    copies = [weights[EMBEDDING] for weights in held if EMBEDDING in weights]
    assert len(copies) == 2 * (layout[1] if layout else 2)
    # Replicas of a whole matrix, or both ends of each half of it.
    rows = [copies[0]] * len(copies) if layout else copies[:2] * 2
    assert all(torch.equal(row, copy) for row, copy in zip(rows, copies, strict=True))
    loop = PlainLoop(demo, "full")
    export(tmp_path, "out")
    exported = LlavaOnevisionForConditionalGeneration.from_pretrained(tmp_path / "out")
    assert exported.lm_head.weight is exported.model.language_model.embed_tokens.weight
    metrics, turns = (lines(tmp_path / f"run/{name}.jsonl") for name in ("metrics", "schedules"))
    for turn, m in zip(turns, metrics, strict=True):
        assert loop.step(turn["samples"]) == pytest.approx(m["loss"], rel=1e-5)
    for key, found in exported.named_parameters():
        before, wanted = loop.before[key], loop.model.get_parameter(key).detach()
        is_told = ~loop.noise[key]
        way = float((wanted - before)[is_told].norm())
        grain = torch.finfo(torch.float32).eps * float(wanted[is_told].norm())
        assert float((found.detach() - wanted)[is_told].norm()) <= max(TOLERANCE * way, grain), key


@pytest.mark.some(0, 1)
@pytest.mark.parametrize("layout", [(1, 3, 2, {"zero": 2}), (1, 1, 2), (2, 1)], ids=str)
def test_other_replicas_go_on_from_states_that_are_cut_at_both_ends(layout, demo, tmp_path):
    """The checkpoint has the matrix once, though the shards of both ends are of it."""

    def trained(name, layout, **changes):
        (tmp_path / name).mkdir()
        asked = layout_of(demo, tmp_path / name, layout) | {"config": config_of_checkpoints(demo)}
        run(demo, tmp_path / name / "run", tmp_path / name, **asked, **changes)
        return tmp_path / name / "run"

    first = trained("first", (1, 2, 2, {"zero": 1}))
    second = trained("second", layout, resume=str(first / "checkpoints/step-2"))
    for here, there in zip(kept(second), kept(first)[2:], strict=True):
        assert here["loss"] == pytest.approx(there["loss"], rel=1e-5)
        assert here["grad_norm"] == pytest.approx(there["grad_norm"], rel=1e-4)
    start, before, after = (
        tensors(path / "checkpoints" / step)
        for path, step in ((first, "step-2"), (first, "step-5"), (second, "step-5"))
    )
    of_model = {name for name in before if not name.startswith("random")}
    assert of_model == {name for name in after if not name.startswith("random")}
    assert f"model.{EMBEDDING}" in of_model
    assert "model.lm_head.weight" not in of_model
    for key in (f"model.{EMBEDDING}", f"optimizer.{EMBEDDING}.exp_avg"):
        way = float((before[key] - start[key]).norm())
        assert way > 0
        assert float((after[key] - before[key]).norm()) <= 1e-3 * way, key
