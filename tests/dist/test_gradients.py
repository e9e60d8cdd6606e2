"""The central promise: the gradient of a global batch depends neither on the layout nor on the schedule."""

from __future__ import annotations

import pytest
import tiny_llava
import torch
from lists import late_weights, random_lists
from ranks import results, run_ranks
from shards import arrays_of
from toy_run import (
    CONTENTS,
    SEED,
    RankParts,
    label_tokens,
    make_schedule,
    toy_sample,
    warm_model_dir,
    write_plan,
)

from dflop.runtime import messages
from dflop.runtime.failure import RankError
from dflop.runtime.gradients import Gradients

TOLERANCE = 1e-5
"""Relative error of a parameter's gradient norm in float32: the order of sums differs, nothing else."""


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory):
    return warm_model_dir(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def expected(model_dir, tmp_path_factory):
    return one_process(model_dir, tmp_path_factory.mktemp("pretrained"))


def one_process(model_dir, directory):
    """(loss, gradients by name) of Hugging Face's own model: one process, sample after sample, unpacked.

    It is loaded with `from_pretrained`, and its loss is the one that it gives for `labels=`.
    """
    reference = tiny_llava.pretrained(model_dir, directory, SEED)
    total = 0.0
    samples = range(len(CONTENTS))
    for sample in samples:
        loss = tiny_llava.labels_loss(reference, toy_sample(sample).oracle)
        (loss / label_tokens(samples)).backward()
        total += float(loss.detach()) / label_tokens(samples)
    # What no sample reaches (the tower's last norm) has no gradient there and one of zeros here.
    zeros = {name: torch.zeros_like(p) for name, p in reference.named_parameters()}
    return total, zeros | {name: p.grad for name, p in reference.named_parameters() if p.grad is not None}


def name(layout):
    return "e{}-l{}-pp{}".format(*layout)


# Samples of [microbatch][LLM replica]. Arrival order in equal counts, and what a scheduler might make:
# microbatches of uneven counts, of text alone (1, 4, 7), and an empty one.
BLIND = {
    1: [[[0, 1]], [[2, 3]], [[4, 5]], [[6, 7]]],
    2: [[[0], [1]], [[2], [3]], [[4], [5]], [[6], [7]]],
    3: [[[0], [1], [2]], [[3], [4], [5]], [[6], [7], []]],
}
AWARE = {
    1: [[[5]], [[7, 1, 4]], [[]], [[3, 0, 6, 2]]],
    2: [[[5, 1], [3]], [[7, 4], []], [[], []], [[6, 0], [2]]],
    3: [[[5], [3], [7, 1]], [[4], [], []], [[], [], []], [[], [6, 0], [2]]],
}
# Replicas of the encoder, replicas of the LLM, stages of the LLM.
LAYOUTS = [(1, 1, 1), (1, 2, 1), (2, 1, 1), (2, 2, 1), (1, 1, 2), (2, 2, 2)]
# Stages that are neither first nor last, of one layer and of two; three replicas.
LAYOUTS += [(1, 1, 3), (1, 1, 4), (1, 3, 1), (2, 3, 2)]


def in_matrix(*values):
    """A case whose values are covered by others here: `make test-layouts` runs it too."""
    return pytest.param(*values, marks=pytest.mark.layouts)


# Arrival order has neither empty nor uneven microbatches: of layouts it needs one of each kind.
BLIND_LAYOUTS = ((1, 1, 1), (2, 2, 2), (1, 1, 3), (1, 3, 1))
CASES = [("aware", layout, "1f1b") for layout in LAYOUTS]
CASES += [(arm, (2, 2, 2), "gpipe") for arm in ("blind", "aware")]
CASES += [("blind", layout, "1f1b") for layout in BLIND_LAYOUTS]
CASES += [in_matrix("blind", layout, "1f1b") for layout in LAYOUTS if layout not in BLIND_LAYOUTS]


@pytest.mark.some(5, 7)
@pytest.mark.parametrize(
    ("arm", "layout", "order"), CASES, ids=lambda value: value if isinstance(value, str) else name(value)
)
def test_gradients_equal_those_of_one_process(arm, order, layout, model_dir, expected, tmp_path):
    """Each parameter's summed gradient, and the loss, equal those of the unpacked, unsplit model."""
    encoder_dp, llm_dp, llm_pp = layout
    llm = {"blind": BLIND, "aware": AWARE}[arm][llm_dp]
    plan = write_plan(tmp_path / "plan.json", encoder_dp, llm_dp, llm_pp, len(llm), order)
    schedule = make_schedule(llm, encoder_dp)

    check(plan, schedule, model_dir, expected, tmp_path)


DRAWN = [(1, 1, 1), (1, 2, 1), (2, 1, 1), (1, 1, 2), (2, 2, 2), (1, 1, 4), (2, 3, 1)]


@pytest.mark.some(4)
# A second list where most ranks wait for each other.
@pytest.mark.parametrize(
    ("layout", "seed"),
    [(layout, 1) for layout in DRAWN] + [((2, 2, 2), 2)] + [in_matrix(d, 2) for d in DRAWN if d != (2, 2, 2)],
    ids=lambda value: f"seed{value}" if isinstance(value, int) else name(value),
)
def test_gradients_under_any_action_list_equal_those_of_one_process(
    layout, seed, model_dir, expected, tmp_path
):
    """Lists of any order, each rank's its own, with backwards in one and in two; an empty microbatch among them."""
    encoder_dp, llm_dp, llm_pp = layout
    llm = AWARE[llm_dp]
    plan = write_plan(tmp_path / "plan.json", encoder_dp, llm_dp, llm_pp, len(llm))
    lists = random_lists(plan, len(llm), seed)
    assert any("I" in action for actions in lists for action in actions)
    check(plan, make_schedule(llm, encoder_dp, actions=lists), model_dir, expected, tmp_path)


def test_gradients_of_weights_may_wait_to_the_end(model_dir, expected, tmp_path):
    """All I before all W, forwards from the last microbatch to the first."""
    llm = AWARE[2]
    plan = write_plan(tmp_path / "plan.json", 2, 2, 1, len(llm))
    schedule = make_schedule(llm, 2, actions=late_weights(plan, len(llm)))
    check(plan, schedule, model_dir, expected, tmp_path)


@pytest.mark.parametrize("seed", [1, in_matrix(2), in_matrix(3)])
def test_messages_need_no_tags(seed, model_dir, expected, tmp_path, monkeypatch):
    """As on NCCL: what is received is what was sent first. Ranks run their microbatches in other orders."""
    monkeypatch.setattr(messages.Messages, "_tag", lambda *_: 0)
    llm = [[[5], [1]], [[7, 4], [2]], [[3], [0]], [[6], []]]
    plan = write_plan(tmp_path / "plan.json", 2, 2, 2, len(llm))
    schedule = make_schedule(llm, 2, actions=random_lists(plan, len(llm), seed))
    check(plan, schedule, model_dir, expected, tmp_path)


def zero_of(gradients):
    """The norm below which a gradient is nothing but rounding, as those of key biases are.

    A softmax does not see what all its scores share.
    """
    return 1e-5 * float(torch.stack([g.norm() for g in gradients.values()]).norm())


def check(plan, schedule, model_dir, expected, tmp_path, prepare_pieces=None):
    """Runs a step on all ranks; loss and gradients must be those of one process."""

    def rank(index):
        parts = RankParts(plan, model_dir, tmp_path / "store", index, prepare_pieces=prepare_pieces)
        loss = parts.step(schedule)
        return loss, arrays_of({name: p.grad for name, p in parts.gradients.parameters.items()})

    found = results(run_ranks(plan.num_ranks, rank, tmp_path))
    loss, gradients = expected
    assert sum(f[0] for f in found) == pytest.approx(loss, rel=1e-6)
    seen = set()
    floor = zero_of(gradients)
    for index, (_, rank_gradients) in enumerate(found):
        for name, gradient in rank_gradients.items():
            seen.add(name)
            error = float((torch.from_numpy(gradient) - gradients[name]).norm())
            assert error <= TOLERANCE * max(float(gradients[name].norm()), floor), f"{name} on rank {index}"
    assert seen == set(gradients), "every parameter is on some rank"


# Shares of [microbatch][encoder replica] for the LLM side `AWARE`: the video (5) by frames, the two images (3) apart, each
# in an order that is not that of the LLM's samples; a replica without work (6 and 0 whole on the other), text alone.
SPLIT = {
    (2, 1): [
        [[[5, 2, 1]], [[5, 0, 2]]],
        [[], []],
        [[], []],
        [[2, [3, 1, 1], 0], [6, [3, 0, 1]]],
    ],
    (2, 2): [
        [[[3, 1, 1], [5, 0, 1]], [[5, 1, 2], [3, 0, 1]]],
        [[], []],
        [[], []],
        [[], [2, 6, 0]],
    ],
    (3, 2): [
        [[[5, 1, 1]], [3, [5, 2, 1]], [[5, 0, 1]]],
        [[], [], []],
        [[], [], []],
        [[6], [], [0, 2]],
    ],
}


@pytest.mark.some(2)
@pytest.mark.parametrize("layout", [(2, 1, 1), (2, 1, 2), (2, 2, 1), (3, 2, 1)], ids=name)
def test_a_sample_in_parts_has_the_gradients_of_one_process(layout, model_dir, expected, tmp_path):
    """A video and several images on more than one encoder replica; the newline is where the video ends."""
    encoder_dp, llm_dp, llm_pp = layout
    llm = AWARE[llm_dp]
    plan = write_plan(tmp_path / "plan.json", encoder_dp, llm_dp, llm_pp, len(llm))
    schedule = make_schedule(llm, encoder_dp, encoder=SPLIT[encoder_dp, llm_dp])
    check(plan, schedule, model_dir, expected, tmp_path)
    _, gradients = expected
    assert float(gradients["model.image_newline"].norm()) > zero_of(gradients)


@pytest.mark.some(1)
@pytest.mark.parametrize("layout", [(1, 2, 1), (2, 1, 1), (1, 1, 3)], ids=name)
def test_the_norm_that_clips_is_that_of_one_process(layout, model_dir, expected, tmp_path):
    """Over all components and stages, replicas counted once; clipping scales every gradient alike."""
    encoder_dp, llm_dp, llm_pp = layout
    llm = AWARE[llm_dp]
    plan = write_plan(tmp_path / "plan.json", encoder_dp, llm_dp, llm_pp, len(llm))
    schedule = make_schedule(llm, encoder_dp)
    _, gradients = expected
    norm = float(torch.stack([g.norm() for g in gradients.values()]).norm())

    def rank(index):
        parts = RankParts(plan, model_dir, tmp_path / "store", index)
        parts.step(schedule)
        measured = [float(parts.gradients.clip(None)), float(parts.gradients.clip(2 * norm))]
        unclipped = {name: p.grad.clone() for name, p in parts.gradients.parameters.items()}
        measured += [float(parts.gradients.clip(norm / 4)), float(parts.gradients.clip(None))]
        is_scaled = all(
            torch.allclose(p.grad, unclipped[name] / 4) for name, p in parts.gradients.parameters.items()
        )
        return measured, is_scaled

    for measured, is_scaled in results(run_ranks(plan.num_ranks, rank, tmp_path)):
        assert measured == pytest.approx([norm, norm, norm, norm / 4], rel=1e-5)
        assert is_scaled


def test_parameters_of_another_seed_are_refused(model_dir, tmp_path):
    """Replicas that do not start equal would drift apart in silence: the parameter is named on every rank."""
    plan = write_plan(tmp_path / "plan.json", 1, 2, 1, 4)

    def rank(index):
        parts = RankParts(plan, model_dir, tmp_path / "store", index)
        if index == 2:
            with torch.no_grad():
                parts.pieces[1].lm_head.weight[0, 0] += 1
        with pytest.raises(RankError, match="`lm_head.weight` is .* rank 2 .* rank 1"):
            Gradients(parts.pieces, parts.mesh)

    results(run_ranks(plan.num_ranks, rank, tmp_path))
