"""An encoder cut into stages: the gradient is that of one process, for every family with a tower."""

from __future__ import annotations

import json

import pytest
import torch
from conformance import SETTINGS
from lists import random_lists
from ranks import results, run_ranks
from test_conformance_ranks import Case, shared_out
from test_gradients import AWARE, BLIND, SPLIT, check, in_matrix, one_process, zero_of
from tiny_families import OMNI
from toy_run import SEED, RankParts, make_schedule, warm_model_dir, write_plan

from dflop.models import load_adapter
from dflop.models.parameters import component_of
from dflop.runtime.boundary import going

NUM_LAYERS = 4


def deepen(model_dir, **changes):
    """Gives the tiny model an encoder of as many layers; `changes` go into the configuration."""
    path = model_dir / "config.json"
    config = json.loads(path.read_text())
    config["vision_config"]["num_hidden_layers"] = NUM_LAYERS
    path.write_text(json.dumps({**config, **changes}))
    return model_dir


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory):
    return deepen(warm_model_dir(tmp_path_factory.mktemp("model")))


@pytest.fixture(scope="module")
def expected(model_dir, tmp_path_factory):
    return one_process(model_dir, tmp_path_factory.mktemp("pretrained"))


def name(value):
    return "e{}xpp{}-l{}xpp{}".format(*value) if isinstance(value, tuple) else str(value)


# Replicas and stages of the encoder, replicas and stages of the LLM.
LAYOUTS = [(1, 2, 1, 1), (1, 3, 1, 1), (2, 2, 1, 1), (2, 3, 1, 1), (1, 2, 2, 1), (2, 2, 2, 2), (1, 4, 1, 2)]


def plan_of(path, layout, llm, **options):
    encoder_dp, encoder_pp, llm_dp, llm_pp = layout
    return write_plan(
        path / "plan.json", encoder_dp, llm_dp, llm_pp, len(llm), encoder_pp=encoder_pp, **options
    )


@pytest.mark.some(2, 3)
# Arrival order, which has no empty and no uneven microbatches, in the layout with most stages and replicas.
@pytest.mark.parametrize(
    ("arm", "layout"),
    [("aware", layout) for layout in LAYOUTS]
    + [("blind", (2, 2, 2, 2))]
    + [in_matrix("blind", layout) for layout in LAYOUTS if layout != (2, 2, 2, 2)],
    ids=lambda value: value if isinstance(value, str) else name(value),
)
def test_gradients_equal_those_of_one_process(arm, layout, model_dir, expected, tmp_path):
    """Microbatches of uneven counts, of text alone, and an empty one, under 1F1B."""
    llm = {"blind": BLIND, "aware": AWARE}[arm][layout[2]]
    plan = plan_of(tmp_path, layout, llm)
    check(plan, make_schedule(llm, layout[0]), model_dir, expected, tmp_path)


@pytest.mark.parametrize("layout", [(1, 3, 1, 1), (2, 2, 1, 1)], ids=name)
def test_any_action_list_gives_them(layout, model_dir, expected, tmp_path):
    """Each rank in an order of its own, backwards in one and in two."""
    llm = AWARE[layout[2]]
    plan = plan_of(tmp_path, layout, llm)
    schedule = make_schedule(llm, layout[0], actions=random_lists(plan, len(llm), 3))
    check(plan, schedule, model_dir, expected, tmp_path)


def test_samples_in_parts_give_them(model_dir, expected, tmp_path):
    """A video and several images on two replicas of two stages each."""
    llm = AWARE[1]
    plan = plan_of(tmp_path, (2, 2, 1, 1), llm)
    schedule = make_schedule(llm, 2, encoder=SPLIT[2, 1])
    check(plan, schedule, model_dir, expected, tmp_path)


@pytest.mark.parametrize("zero", [1, 2])
def test_states_cut_among_replicas_give_them(zero, model_dir, expected, tmp_path):
    llm = AWARE[1]
    plan = plan_of(tmp_path, (2, 2, 1, 1), llm, zero=zero)
    check(plan, make_schedule(llm, 2), model_dir, expected, tmp_path)


def test_replicas_side_by_side_give_them(model_dir, expected, tmp_path):
    """The two stages of two replicas on ranks (0 2) (1 3) and (4 6) (5 7): who sends to whom, who sums gradients."""
    llm = AWARE[2]
    plan = plan_of(tmp_path, (2, 2, 2, 2), llm, zero=1, rank_order="tp-dp-pp")
    assert [[plan.rank(replica, stage) for stage in range(4)] for replica in (0, 1)] == [
        [0, 2, 4, 6],
        [1, 3, 5, 7],
    ]
    schedule = make_schedule(llm, 2, actions=random_lists(plan, len(llm), 3))
    check(plan, schedule, model_dir, expected, tmp_path)


def test_uneven_cuts_give_them(model_dir, expected, tmp_path):
    """Three encoder layers before one, one LLM layer before three, as the layout says."""
    llm = AWARE[1]
    plan = plan_of(tmp_path, (1, 2, 1, 2), llm, encoder_cut=[3, 1], llm_cut=[1, 3])
    assert [plan.encoder_layers(stage, 4) for stage in (0, 1)] == [(0, 3), (3, 1)]
    assert [plan.llm_layers(stage, 4) for stage in (2, 3)] == [(0, 1), (1, 3)]
    check(plan, make_schedule(llm, 1), model_dir, expected, tmp_path)


@pytest.mark.some(1)
@pytest.mark.parametrize("layers", [[-2, -1], [1, -2]], ids=str)
def test_older_hidden_states_reach_the_projector(layers, tmp_path):
    """The projector reads two hidden states: the older one passes with the other from stage to stage."""
    model_dir = deepen(warm_model_dir(tmp_path / "model"), vision_feature_layer=layers)
    expected = one_process(model_dir, tmp_path / "pretrained")
    llm = AWARE[1]
    plan = plan_of(tmp_path, (1, 3, 1, 1), llm)
    check(plan, make_schedule(llm, 1), model_dir, expected, tmp_path)


@pytest.mark.parametrize("recipe", ["frozen-encoder", "frozen-llm", "projector"])
def test_what_is_frozen_gets_no_gradient(recipe, model_dir, expected, tmp_path):
    """What trains has the gradient of one process, under lists in which a rank without weights to train has no W."""
    llm = AWARE[1]
    plan = plan_of(tmp_path, (1, 2, 1, 2), llm)
    _, gradients = expected
    frozen = {"encoder", "llm"} if recipe == "projector" else {recipe.removeprefix("frozen-")}
    # The projector always trains, on the last rank of the encoder.
    whole = ({0} if "encoder" in frozen else set()) | ({2, 3} if "llm" in frozen else set())
    lists = random_lists(plan, len(llm), 3, whole_ranks=whole)

    def rank(index):
        parts = RankParts(plan, model_dir, tmp_path / "store", index, recipe=recipe)
        schedule = make_schedule(llm, 1, actions=lists)
        loss = parts.step(schedule)
        found = {key: p.grad.numpy() for key, p in parts.gradients.parameters.items()}
        held = {key for piece in parts.pieces.values() for key, _ in piece.named_parameters()}
        # Rows that are sent back between the two stages of the encoder.
        below = [microbatch.below for microbatch in parts.work(schedule).stages.get(0, ())]
        back = [t.num_rows for transfers in below for t in going(transfers, is_gradient=True)]
        return loss, found, held, back

    found = results(run_ranks(plan.num_ranks, rank, tmp_path))
    assert sum(loss for loss, *_ in found) == pytest.approx(expected[0], rel=1e-6)
    assert {index for index, (_, of_rank, *_) in enumerate(found) if not of_rank} == whole
    trained = {key: torch.from_numpy(g) for _, of_rank, *_ in found for key, g in of_rank.items()}
    assert {component_of(key) for key in trained} == {"encoder", "projector", "llm"} - frozen
    floor = zero_of(gradients)
    for key, gradient in trained.items():
        error = float((gradient - gradients[key]).norm())
        assert error <= 1e-5 * max(float(gradients[key].norm()), floor), key
    # Nothing but a sign goes back where nothing trains.
    back = found[0][3]
    assert len(back) > 1
    assert (set(back) == {1}) == ("encoder" in frozen)
    # Together the ranks hold the whole model, each parameter once.
    held = [key for _, _, of_rank, _ in found for key in of_rank]
    assert sorted(held) == sorted(gradients)


SUITE = ("llava_onevision", "qwen2_5_vl", "qwen2_audio", "qwen2_5_omni")


@pytest.mark.some(1)
@pytest.mark.parametrize(
    "family",
    [f if f in SUITE else pytest.param(f, marks=pytest.mark.layouts) for f in SETTINGS],
)
def test_every_family_has_them(family, tmp_path):
    """Two encoder replicas of as many stages as the tiny tower has layers; a microbatch of text alone, an empty one."""
    case = Case(family, tmp_path)
    encoder_pp = load_adapter(case.model_dir).num_run_layers
    assert encoder_pp > 1
    last = len(case.samples) - 1
    llm = [[[last, 0]], [[]], [list(range(1, last))]]
    plan = write_plan(
        tmp_path / "plan.json", 2, 1, 1, len(llm), encoder_pp=encoder_pp, global_batch_size=len(case.samples)
    )
    case.check(plan, llm, shared_out(case.samples, llm))


@pytest.mark.layouts
@pytest.mark.parametrize("family", OMNI)
def test_stages_of_two_encoders_whose_ranks_share_layers(family, tmp_path):
    """Two stages of two ranks each; of seven layers the first stage has two of pictures and one of sounds."""
    case = Case(family, tmp_path)
    last = len(case.samples) - 1
    llm = [[[last, 0]], [[]], [list(range(1, last))]]
    sizes = {"encoder_pp": 2, "encoder_tp": 2, "global_batch_size": len(case.samples)}
    plan = write_plan(tmp_path / "plan.json", 1, 1, 1, len(llm), **sizes)
    encoder = [[[s for s in held if case.samples[s].media] for held in replicas] for replicas in llm]
    case.check(plan, llm, encoder)


def test_a_run_of_layers_that_is_none_is_refused(model_dir):
    adapter = load_adapter(model_dir)
    with pytest.raises(ValueError, match="layers 3 to 6 of an encoder of 4"):
        adapter.build_encoder(torch.device("cpu"), torch.float32, SEED, range(3, 6))
