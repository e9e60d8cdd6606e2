"""What every family must do on real ranks: the gradient of one process by Hugging Face's own model, in parts.

Encoder replicas share media out, the LLM is cut into stages, and a microbatch is empty.
"""

from __future__ import annotations

import json

import pytest
import torch
from conformance import (
    CPU,
    SETTINGS,
    check_gradients,
    conversations,
    expected_gradients,
    pretrained,
    write_model,
)
from ranks import results, run_ranks
from toy_run import RankParts, write_plan

from dflop._native import Schedule
from dflop.models import load_adapter

SEED = 5


class FamilyParts(RankParts):
    """One rank of a run on the samples of a family."""

    def __init__(self, plan, model_dir, store, rank, samples):
        super().__init__(plan, model_dir, store, rank)
        self.samples = samples

    def sample(self, index):
        """In the form of the runtime."""
        return self.samples[index].sample

    def tiles(self, index, parts):
        """What the encoder reads of a share."""
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


@pytest.mark.parametrize("name", SETTINGS)
def test_gradients_on_ranks_are_those_of_hugging_face(name, tmp_path):
    torch.set_num_threads(1)
    model_dir = write_model(tmp_path, name)
    adapter = load_adapter(model_dir)
    samples = list(conversations(tmp_path / "media", adapter, name).values())
    total, expected = expected_gradients(pretrained(adapter, tmp_path / "saved", SEED), samples)
    for sample in samples:
        # Decoded once, before the ranks are forked.
        sample.tiles()
    last = len(samples) - 1
    # Text alone beside media, and a microbatch without any sample.
    llm = [[[last, 0]], [[]], [list(range(1, last))]]
    plan = write_plan(tmp_path / "plan.json", 2, 1, 2, len(llm), global_batch_size=len(samples))
    label_tokens = sum(sample.num_targets for sample in samples)
    schedule = Schedule.from_json(
        json.dumps(
            {
                "step": 0,
                "llm": llm,
                "encoder": shared_out(samples, llm),
                "actions": [],
                "label_tokens": label_tokens,
                "predicted_makespan_ns": 0,
                "max_load_ns": 0,
                "lower_bound_ns": 0,
            }
        )
    )

    def rank(index):
        parts = FamilyParts(plan, model_dir, tmp_path / "store", index, samples)
        assert parts.mesh.device == CPU
        loss = parts.step(schedule)
        return loss, {name: p.grad.numpy() for name, p in parts.gradients.parameters.items()}

    found = results(run_ranks(plan.num_ranks, rank, tmp_path))
    assert sum(loss for loss, _ in found) == pytest.approx(total / label_tokens, rel=1e-6)
    gradients = {}
    for _, of_rank in found:
        for key, gradient in of_rank.items():
            gradient = torch.from_numpy(gradient)
            # Replicas hold the sum.
            assert key not in gradients or torch.equal(gradients[key], gradient), key
            gradients[key] = gradient
    check_gradients(gradients, {key: gradient / label_tokens for key, gradient in expected.items()})
