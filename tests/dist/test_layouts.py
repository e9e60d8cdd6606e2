"""Colocated layouts and sharded states: gradients and three steps of AdamW are those of one process.

The oracle is Hugging Face's own model with its `labels=` loss, sample after sample, and PyTorch's AdamW. `test_matrix.py`
has every layout.
"""

from __future__ import annotations

from collections import Counter

import pytest
import tiny_llava
import torch
import torch._dynamo  # noqa: F401  (FSDP2 asks for it in its first hook: once, for all forked ranks)
from lists import random_lists
from ranks import results, run_ranks
from shards import arrays_of
from toy_run import (
    CONTENTS,
    SEED,
    RankParts,
    has_media,
    label_tokens,
    make_schedule,
    toy_sample,
    warm_model_dir,
    write_colocated,
    write_plan,
)

from dflop import ScheduleError
from dflop._native import Action
from dflop.models.tensor import slices_of
from dflop.parallel.shard import local
from dflop.runtime.actions import check_actions
from dflop.runtime.failure import RankError

TOLERANCE = 1e-5
"""Relative error in float32: the order of sums differs, nothing else."""
LEARNING_RATE, WEIGHT_DECAY, MAX_NORM = 1e-3, 0.1, 1.0

# Samples of [microbatch][replica]; 1, 4 and 7 are text alone, 3 has several images and no newline, 5 is a video. `even`:
# arrival order. `text`: text alone on one rank beside media on the others, the encoder's work on one rank only. `uneven`:
# ranks with one, two, three microbatches, one with none; a microbatch of nothing. Encoder work is where the samples are.
PLACED = {
    ("even", 1): [[[0, 1]], [[2, 3]], [[4, 5]], [[6, 7]]],
    ("even", 2): [[[0], [1]], [[2], [3]], [[4], [5]], [[6], [7]]],
    ("even", 3): [[[0], [1], [2]], [[3], [4], [5]], [[6], [7], []]],
    ("even", 4): [[[0], [1], [2], [3]], [[4], [5], [6], [7]]],
    ("text", 2): [[[0, 5, 2], [1]], [[3, 6], [4, 7]]],
    ("text", 4): [[[0, 5, 2], [1], [4], []], [[3, 6], [7], [], []]],
    ("uneven", 1): [[[5]], [[7, 1, 4]], [[]], [[3, 0, 6, 2]]],
    ("uneven", 2): [[[5, 1], [3]], [[7, 4], []], [[0], []], [[6, 2], []]],
    ("uneven", 3): [[[5], [3, 0, 6], []], [[4, 1], [], []], [[], [], []], [[2, 7], [], []]],
    ("uneven", 4): [[[5], [3], [7, 1], []], [[4], [], [], []], [[0, 6], [2], [], []]],
}


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory):
    return warm_model_dir(tmp_path_factory.mktemp("model"))


def frozen_none(name):
    """Everything trains."""
    del name
    return False


def frozen_tower(name):
    """The tower is frozen; projector, newline and LLM train."""
    return ".vision_tower." in name


def frozen_llm(name):
    """The LLM is frozen; the encoder trains through it."""
    return ".language_model." in name or name.startswith("lm_head")


def frozen_all_but_projector(name):
    """Only the projector trains."""
    return "multi_modal_projector" not in name


class Oracle:
    """One process: gradients of the first step and weights after three."""

    def __init__(self, model_dir, directory, is_frozen):
        model = tiny_llava.pretrained(model_dir, directory, SEED)
        for name, parameter in model.named_parameters():
            parameter.requires_grad_(not is_frozen(name))
            # What no sample reaches (the tower's last norm) has zeros, and AdamW decays it.
            parameter.grad = torch.zeros_like(parameter) if parameter.requires_grad else None
        trained = {name: p for name, p in model.named_parameters() if p.requires_grad}
        self.start = {name: p.detach().clone() for name, p in trained.items()}
        optimizer = adamw(trained.values())
        for step in range(3):
            loss = self._backward(model)
            norm = torch.nn.utils.clip_grad_norm_(trained.values(), MAX_NORM)
            if step == 0:
                self.loss, self.norm = loss, float(norm)
                scale = max(1.0, self.norm / MAX_NORM)
                self.gradients = {name: p.grad * scale for name, p in trained.items()}
            optimizer.step()
            for parameter in trained.values():
                parameter.grad.zero_()
        self.weights = {name: p.detach().clone() for name, p in trained.items()}
        changes = [(self.weights[name] - start).norm() for name, start in self.start.items()]
        self.change = float(torch.stack(changes).norm())

    @staticmethod
    def _backward(model):
        total = label_tokens(range(len(CONTENTS)))
        loss = 0.0
        for sample in range(len(CONTENTS)):
            part = tiny_llava.labels_loss(model, toy_sample(sample).oracle) / total
            if part.requires_grad:
                part.backward()
            loss += float(part.detach())
        return loss


def adamw(parameters):
    """The optimizer of a run. With so large an epsilon a gradient that is nothing but rounding changes no weight."""
    return torch.optim.AdamW(parameters, lr=LEARNING_RATE, weight_decay=WEIGHT_DECAY, eps=1e-3, foreach=True)


@pytest.fixture(scope="module")
def oracles(model_dir, tmp_path_factory):
    """Oracles by what is frozen, each made once."""
    made = {}

    def oracle(is_frozen):
        if is_frozen not in made:
            made[is_frozen] = Oracle(model_dir, tmp_path_factory.mktemp("pretrained"), is_frozen)
        return made[is_frozen]

    return oracle


def check(
    plan, schedule, model_dir, oracle, tmp_path, is_frozen=frozen_none, others=(), prepare=lambda pieces: None
):
    """Three steps on all ranks: loss, gradients, their norm and the weights are those of one process.

    Before them, loss and gradients of the same samples in each of `others`. `prepare` gets a rank's pieces before all.
    """

    def freeze(pieces):
        for piece in pieces.values():
            for name, parameter in piece.named_parameters():
                parameter.requires_grad_(not is_frozen(name))
        prepare(pieces)

    def rank(index):
        parts = RankParts(plan, model_dir, tmp_path / "store", index, prepare_pieces=freeze)
        trained = parts.gradients.parameters
        # What this rank has of each, on the same memory: AdamW goes number by number, and a first step over DTensors
        # takes longer than all else of a rank, as PyTorch asks for each operation and parameter how it is cut.
        shards = {name: torch.nn.Parameter(local(p.detach())) for name, p in trained.items()}
        optimizer = adamw(shards.values()) if trained else None
        slices = {name: s for piece in parts.pieces.values() for name, s in slices_of(piece).items()}
        losses, gradients = [], []
        for each in (*others, schedule):
            parts.gradients.zero()
            losses.append(parts.step(each))
            gradients.append(arrays_of({name: p.grad for name, p in trained.items()}))
        norm = float(parts.gradients.clip(MAX_NORM))
        for step in range(3):
            if step:
                parts.step(schedule)
                parts.gradients.clip(MAX_NORM)
            if optimizer is not None:
                for name, p in trained.items():
                    shards[name].grad = local(p.grad)
                optimizer.step()
            parts.gradients.zero()
        return losses, norm, gradients, arrays_of(trained), slices

    found = results(run_ranks(plan.num_ranks, rank, tmp_path))
    for losses in zip(*(losses for losses, *_ in found), strict=True):
        assert sum(losses) == pytest.approx(oracle.loss, rel=1e-6)
    seen, num_seen = set(), Counter()
    for index, (_, norm, gradients, weights, slices) in enumerate(found):
        assert norm == pytest.approx(oracle.norm, rel=1e-5)
        for name in weights:
            seen.add(name)
            part = slices[name].take if name in slices else torch.clone
            num_seen[name] += weights[name].size
            # What is nothing but rounding (those of key biases: a softmax does not see what its scores share).
            floor = 1e-5 * oracle.norm
            for of_step in gradients:
                wanted = part(oracle.gradients[name])
                assert_close(of_step[name], wanted, floor, f"gradient of {name} on rank {index}")
            change = part(oracle.weights[name]) - part(oracle.start[name])
            found_change = torch.from_numpy(weights[name]) - part(oracle.start[name])
            # A weight is rounded once a step, whatever its change.
            rounding = 3e-7 * float(oracle.start[name].norm()) / TOLERANCE
            floor = max(rounding, 1e-4 * oracle.change)
            assert_close(found_change, change, floor, f"change of {name} on rank {index}")
    assert seen == set(oracle.gradients), "every parameter is on some rank"
    for name, gradient in oracle.gradients.items():
        assert num_seen[name] >= gradient.numel(), f"all of {name} is on some rank"


def assert_close(found, expected, floor, what):
    error = float((torch.as_tensor(found) - expected).norm())
    assert error <= TOLERANCE * max(float(expected.norm()), floor), (
        f"{what}: {error / float(expected.norm())}"
    )


def schedule_of(llm, actions=()):
    """Encoder work where the samples are, in the order of the samples."""
    encoder = [[[s for s in samples if has_media(s)] for samples in replicas] for replicas in llm]
    return make_schedule(llm, len(llm[0]), actions=actions, encoder=encoder)


# A row covers one thing that can go wrong; `test_matrix.py` has them all.
COVERING = [
    ("even", 1, {}),
    ("uneven", 2, {}),
    ("uneven", 3, {"zero": 1}),
    ("uneven", 2, {"zero": 2}),
    ("text", 2, {"zero": 3}),
    ("uneven", 3, {"zero": 3}),
    ("uneven", 4, {"zero": 2, "shard_ranks": 2}),
    ("text", 4, {"zero": 3, "shard_ranks": 2}),
]


def name(value):
    if isinstance(value, dict):
        return "-".join(f"{key}{number}" for key, number in value.items()) or "zero0"
    return value.__name__ if callable(value) else str(value)


@pytest.mark.some(2, 2)
@pytest.mark.parametrize(("placed", "dp", "sharding"), COVERING, ids=name)
def test_a_colocated_layout_trains_as_one_process(placed, dp, sharding, model_dir, oracles, tmp_path):
    """Every rank holds both components; its own features never leave it."""
    llm = PLACED[placed, dp]
    plan = write_colocated(tmp_path / "plan.json", dp, len(llm), **sharding)
    check(plan, schedule_of(llm), model_dir, oracles(frozen_none), tmp_path)


@pytest.mark.some(2, 2)
@pytest.mark.parametrize(
    ("sharding", "is_frozen"),
    [
        ({}, frozen_tower),
        ({"zero": 2}, frozen_llm),
        ({"zero": 3}, frozen_tower),
        ({"zero": 3}, frozen_all_but_projector),
    ],
    ids=name,
)
def test_frozen_parts_of_a_colocated_layout(sharding, is_frozen, model_dir, oracles, tmp_path):
    """What trains gets the gradients of one process; what is frozen has none and does not move."""
    llm = PLACED["text", 2]
    plan = write_colocated(tmp_path / "plan.json", 2, len(llm), **sharding)
    check(plan, schedule_of(llm), model_dir, oracles(is_frozen), tmp_path, is_frozen)


@pytest.mark.some(1)
@pytest.mark.parametrize(
    ("zero", "recompute"),
    [
        (2, "selective"),
        (3, "full"),
        (2, {"encoder": "full", "llm": "none"}),
        (3, {"encoder": "selective", "llm": "full"}),
        (3, "full:1"),
    ],
    ids=name,
)
def test_layers_that_recompute(zero, recompute, model_dir, oracles, tmp_path):
    """What a layer computes again in its backward finds its parameters whole, by component or in both."""
    llm = PLACED["text", 2]
    plan = write_colocated(tmp_path / "plan.json", 2, len(llm), zero=zero, recompute=recompute)
    check(plan, schedule_of(llm), model_dir, oracles(frozen_none), tmp_path)


@pytest.mark.parametrize("zero", [2, 3])
def test_layers_compute_in_bfloat16_over_float32(zero, model_dir, oracles, tmp_path):
    """What is cut and summed is float32; the gradients are those of float32 up to the rounding of bfloat16."""
    llm = PLACED["text", 2]
    plan = write_colocated(tmp_path / "plan.json", 2, len(llm), zero=zero)
    # W after FSDP2's hooks of the backward, where ranks may split it.
    split = names("0F0 1F0 0F1 1F1 1I0 0I0 1W0 1B1 0I1 0W1 0W0")
    schedule = schedule_of(llm, [split, split] if zero == 2 else ())

    def rank(index):
        parts = RankParts(plan, model_dir, tmp_path / "store", index, dtype=torch.bfloat16)
        parts.step(schedule)
        trained = parts.gradients.parameters.values()
        types = {local(t).dtype for p in trained for t in (p, p.grad)}
        return types, arrays_of({name: p.grad for name, p in parts.gradients.parameters.items()})

    oracle = oracles(frozen_none)
    for types, gradients in results(run_ranks(2, rank, tmp_path)):
        assert types == {torch.float32}
        errors = [(torch.from_numpy(g) - oracle.gradients[name]).norm() for name, g in gradients.items()]
        assert float(torch.stack(errors).norm()) <= 0.05 * oracle.norm


@pytest.mark.some(2, 2)
@pytest.mark.parametrize(
    "sharding",
    [{}, {"zero": 2}, {"zero": 3}, {"zero": 3, "encoder_tp": 2, "llm_tp": 2}],
    ids=name,
)
def test_the_encoders_work_may_be_shared_out_apart(sharding, model_dir, oracles, tmp_path):
    """A video by frames and two images on two ranks; features cross where the sample is elsewhere, or stay.

    The scheduler does it under ZeRO-3 alone.
    """
    llm = PLACED["uneven", 2]
    encoder = [
        [[[3, 1, 1], [5, 0, 1]], [[5, 1, 2], [3, 0, 1]]],
        [[], []],
        [[], [0]],
        [[6], [2]],
    ]
    plan = write_colocated(tmp_path / "plan.json", 2, len(llm), **sharding)
    schedule = make_schedule(llm, 2, encoder=encoder)
    check(plan, schedule, model_dir, oracles(frozen_none), tmp_path)


def colocated_lists(dp, num_microbatches, seed):
    """Lists that a rank without messages from others may run: forwards run ahead, backwards in one and in two."""
    lists = []
    for rank in range(dp):
        draw = torch.Generator().manual_seed(100 * seed + rank)
        done, left, actions = set(), [], []
        for j in range(num_microbatches):
            for stage in (0, 1):
                is_split = bool(torch.randint(2, (1,), generator=draw))
                left += [(stage, letter, j) for letter in (("F", "I", "W") if is_split else ("F", "B"))]
        while left:
            able = [a for a in left if needs(*a) <= done]
            action = able[int(torch.randint(len(able), (1,), generator=draw))]
            left.remove(action)
            stage, letter, j = action
            done |= {(stage, letter, j), (stage, "B" if letter == "I" else letter, j)}
            actions.append(f"{stage}{letter}{j}")
        lists.append(actions)
    return lists


def names(text):
    """The actions in a line of text."""
    return text.split()


def needs(stage, letter, j):
    """What must be done before an action."""
    if letter == "F":
        return {(0, "F", j)} if stage else set()
    if letter == "W":
        return {(stage, "I", j)}
    return {(stage, "F", j)} | ({(1, "B", j)} if stage == 0 else set())


@pytest.mark.parametrize(("sharding", "seed"), [({}, 1), ({"zero": 2}, 2)], ids=name)
def test_any_list_of_actions(sharding, seed, model_dir, oracles, tmp_path):
    """Each rank's own list, drawn at random, with I and W: where ranks meet once a step, all orders are one."""
    llm = PLACED["uneven", 3]
    plan = write_colocated(tmp_path / "plan.json", 3, len(llm), **sharding)
    lists = colocated_lists(3, len(llm), seed)
    assert any("I" in action for actions in lists for action in actions)
    check(plan, schedule_of(llm, lists), model_dir, oracles(frozen_none), tmp_path)


def test_layers_gathered_one_by_one_may_run_forwards_ahead(model_dir, oracles, tmp_path):
    """ZeRO-3 with two microbatches in flight, in the same order on both ranks; one has nothing in the second."""
    llm = PLACED["uneven", 2]
    one = names("0F0 1F0 0F1 1F1 1B0 0F2 0B0 1F2 1B2 0B2 1B1 0B1 0F3 1F3 1B3 0B3")
    plan = write_colocated(tmp_path / "plan.json", 2, len(llm), zero=3)
    check(plan, schedule_of(llm, [one, one]), model_dir, oracles(frozen_none), tmp_path)


@pytest.mark.some(1)
@pytest.mark.parametrize(
    ("layout", "sharding"),
    [((1, 2, 1), {"zero": 1}), ((2, 2, 2), {"zero": 2})],
    ids=name,
)
def test_states_are_cut_inside_each_component_of_a_pipeline(layout, sharding, model_dir, oracles, tmp_path):
    """Disaggregated, lists drawn at random: a component of one replica keeps its states whole."""
    encoder_dp, llm_dp, llm_pp = layout
    llm = PLACED["uneven", llm_dp]
    plan = write_plan(tmp_path / "plan.json", encoder_dp, llm_dp, llm_pp, len(llm), **sharding)
    schedule = make_schedule(llm, encoder_dp, actions=random_lists(plan, len(llm), 3))
    check(plan, schedule, model_dir, oracles(frozen_none), tmp_path)


@pytest.mark.more
def test_each_rank_keeps_its_share(model_dir, tmp_path):
    """Of four ranks each has a quarter of all states, or half where shards are cut among two."""
    llm = PLACED["even", 4]

    def kept(sharding):
        plan = write_colocated(tmp_path / f"{name(sharding)}.json", 4, len(llm), **sharding)

        def rank(index):
            parts = RankParts(plan, model_dir, tmp_path / f"store {name(sharding)}", index)
            parts.step(schedule_of(llm))
            values = parts.gradients.parameters.values()
            return sum(local(p).numel() for p in values), sum(local(p.grad).numel() for p in values)

        return results(run_ranks(4, rank, tmp_path / name(sharding)))

    total = kept({})[0][0]
    for sharding, ranks in [({"zero": 2}, 4), ({"zero": 3, "shard_ranks": 2}, 2)]:
        found = kept(sharding)
        # The first dimension of a tensor is cut; where it does not divide the first ranks have more.
        assert sum(n for n, _ in found) == total * 4 // ranks
        assert all(n == grads for n, grads in found)
        assert max(n for n, _ in found) <= 1.1 * total / ranks


@pytest.mark.parametrize(
    ("lists", "message"),
    [
        (["0F0 1F0 1B0 0B0", "0F0 1F0 1I0 1W0 0B0"], "`1B0` on rank 0 and `1I0` on rank 1, must be equal"),
        (["0F0 1F0 1I0 1W0 0B0", "0F0 1F0 1I0 1W0 0B0"], "`1I0`, must be a whole backward"),
        (["1F0 0F0 1B0 0B0", "1F0 0F0 1B0 0B0"], "`1F0` takes what `0F0` gives, must come after it"),
    ],
)
def test_lists_that_would_hang_are_refused(lists, message, model_dir, tmp_path):
    """Before the step: ranks that meet in each action must have the same, and a rank cannot wait for itself."""
    plan = write_colocated(tmp_path / "plan.json", 2, 1, zero=3)
    schedule = schedule_of([[[0], [2]]], [names(actions) for actions in lists])

    def rank(index):
        parts = RankParts(plan, model_dir, tmp_path / "store", index)
        try:
            parts.executor.prepare(parts.work(schedule), schedule)
        except (RankError, ScheduleError) as error:
            return str(error)
        return ""

    # Rank 0 may find nothing wrong with its own list, and refuses all lists together.
    assert message in results(run_ranks(2, rank, tmp_path))[1]


def test_a_colocated_list_does_each_microbatch_once_on_both_stages():
    actions = [Action.parse(name) for name in names("0F0 1F0 1B0")]
    with pytest.raises(RankError, match="microbatch 0 is not done on stage 0, there is no backward"):
        check_actions(actions, 3, 0, [0, 1], 1)
    with pytest.raises(RankError, match="`2F0`, must be of its own stages 0 and 1"):
        check_actions([Action.parse("2F0")], 3, 0, [0, 1], 1)
