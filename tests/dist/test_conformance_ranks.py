"""What every family must do on real ranks: the gradient of one process by Hugging Face's own model, in parts.

Encoder replicas share media out, the LLM is cut into stages, and a microbatch is empty.
"""

from __future__ import annotations

import json

import pytest
import torch
from conformance import (
    CPU,
    ON_RANKS,
    SETTINGS,
    check_gradients,
    conversations,
    expected_gradients,
    pretrained,
    write_model,
)
from ranks import results, run_ranks
from shards import arrays_of
from tiny_families import OMNI, ROUNDED
from toy_run import RankParts, write_colocated, write_plan

from dflop._native import Schedule
from dflop.models import load_adapter
from dflop.models.tensor import slices_of

SEED = 5


class FamilyParts(RankParts):
    """One rank of a run on the samples of a family."""

    def __init__(self, plan, model_dir, store, rank, samples, **options):
        super().__init__(plan, model_dir, store, rank, **options)
        self.samples = samples

    def sample(self, index):
        """In the form of the runtime."""
        return self.samples[index].sample

    def tiles(self, index, parts):
        """What the encoder reads of a share."""
        assert self.mesh.tensor_of(0) == 0
        return self.samples[index].tiles(parts)


def shared_out(samples, llm):
    """Encoder side for two replicas: samples of several parts by halves, the others in turn."""
    encoder = []
    for replicas in llm:
        shares = [[], []]
        for turn, index in enumerate(s for held in replicas for s in held if samples[s].media):
            parts = samples[index].num_parts
            if parts > 1:
                shares[0].append([index, 0, parts // 2])
                shares[1].insert(0, [index, parts // 2, parts - parts // 2])
            else:
                shares[turn % 2].append(index)
        encoder.append(shares)
    return encoder


class Case:
    """A family's tiny model, its samples, and their gradients by Hugging Face in one process."""

    def __init__(self, name, directory):
        torch.set_num_threads(1)
        self.directory, self.name = directory, name
        self.model_dir = write_model(directory, name)
        adapter = load_adapter(self.model_dir)
        self.samples = list(conversations(directory / "media", adapter, name).values())
        model = pretrained(adapter, directory / "saved", SEED)
        self.total, self.expected = expected_gradients(model, self.samples)
        for sample in self.samples:
            # Decoded once, before the ranks are forked.
            sample.tiles()

    @property
    def label_tokens(self):
        """Of all samples."""
        return sum(sample.num_targets for sample in self.samples)

    def schedule(self, llm, encoder, **fields):
        """A step of all samples; other fields as in the file."""
        about = dict.fromkeys(("step", "predicted_makespan_ns", "max_load_ns", "lower_bound_ns"), 0)
        about |= {"llm": llm, "encoder": encoder, "actions": [], "label_tokens": self.label_tokens}
        return Schedule.from_json(json.dumps(about | fields))

    def check(self, plan, llm, encoder, condition=None, prepare=None, fields=None):
        """A step on all ranks: loss, each parameter's summed gradient and their norm are those of one process."""
        schedule, label_tokens = self.schedule(llm, encoder, **(fields or {})), self.label_tokens

        def rank(index):
            store = self.directory / "store"
            parts = FamilyParts(plan, self.model_dir, store, index, self.samples, prepare_pieces=prepare)
            assert parts.mesh.device == CPU
            loss = parts.step(schedule)
            found = arrays_of({name: p.grad for name, p in parts.gradients.parameters.items()})
            slices = {name: s for piece in parts.pieces.values() for name, s in slices_of(piece).items()}
            return loss, float(parts.gradients.clip(None)), found, slices

        found = results(run_ranks(plan.num_ranks, rank, self.directory))
        assert sum(loss for loss, *_ in found) == pytest.approx(self.total / label_tokens, rel=1e-6)
        parts = {}
        for _, _, of_rank, slices in found:
            for key, gradient in of_rank.items():
                gradient, part = torch.from_numpy(gradient), slices.get(key)
                same = parts.setdefault(key, {}).setdefault(part, gradient)
                # Replicas hold the sum; ranks that share layers, of what is not cut, the same up to rounding.
                if part is not None or plan.num_ranks == plan.num_groups:
                    assert torch.equal(same, gradient), key
                torch.testing.assert_close(same, gradient, rtol=1e-4, atol=1e-7, msg=key)
        gradients = {key: joined(held) for key, held in parts.items()}
        expected = {key: g / label_tokens for key, g in self.expected.items()}
        condition = condition or ROUNDED.get(self.name, 1)
        check_gradients(gradients, expected, condition)
        norm = float(torch.stack([g.double().norm() for g in expected.values()]).norm())
        assert [norm_of for _, norm_of, *_ in found] == pytest.approx(
            [norm] * len(found), rel=1e-5 * condition
        )


def joined(held):
    """A parameter's gradient from its parts, by the slices that they are; None for a whole one."""
    if None in held:
        return held[None]
    total = torch.full(next(iter(held)).shape, torch.nan)
    for part, gradient in held.items():
        position = 0
        for first, count in part.runs:
            total.narrow(part.dim, first, count).copy_(gradient.narrow(part.dim, position, count))
            position += count
    return total


@pytest.mark.some(3, 6)
@pytest.mark.parametrize("name", ON_RANKS)
def test_gradients_on_ranks_are_those_of_hugging_face(name, tmp_path):
    case = Case(name, tmp_path)
    last = len(case.samples) - 1
    # Text alone beside media, and a microbatch without any sample.
    llm = [[[last, 0]], [[]], [list(range(1, last))]]
    plan = write_plan(tmp_path / "plan.json", 2, 1, 2, len(llm), global_batch_size=len(case.samples))
    case.check(plan, llm, shared_out(case.samples, llm))


IN_SUITE = "qwen2_5_vl"
"""A family whose layers need more than hidden states (bounds of windows, rotary embeddings)."""


@pytest.mark.parametrize(
    "name", [name if name == IN_SUITE else pytest.param(name, marks=pytest.mark.layouts) for name in SETTINGS]
)
def test_gradients_of_a_family_whose_layers_are_gathered_one_by_one(name, tmp_path):
    """ZeRO-3, both components on each rank: text alone on one, then nothing on the other."""
    case = Case(name, tmp_path)
    last = len(case.samples) - 1
    llm = [[[last], [0]], [list(range(1, last)), []]]
    plan = write_colocated(tmp_path / "plan.json", 2, len(llm), zero=3, global_batch_size=len(case.samples))
    encoder = [[[s for s in held if case.samples[s].media] for held in replicas] for replicas in llm]
    case.check(plan, llm, encoder)


@pytest.mark.some(1)
@pytest.mark.parametrize("name", OMNI)
def test_ranks_that_meet_in_layers_run_both_encoders(name, tmp_path):
    """ZeRO-3: a picture alone on one rank, a sound alone on the other, then all kinds beside text."""
    case = Case(name, tmp_path)
    kinds = ["+".join(sorted({grid.kind for grid in one.sample.media})) for one in case.samples]
    picture, sound, text = kinds.index("image"), kinds.index("audio"), kinds.index("")
    others = [index for index in range(len(kinds)) if index not in (picture, sound, text)]
    llm = [[[picture], [sound]], [others, [text]]]
    plan = write_colocated(tmp_path / "plan.json", 2, len(llm), zero=3, global_batch_size=len(case.samples))
    case.check(plan, llm, [[[picture], [sound]], [others, []]])
