"""The look at a model's own loss on two ranks: all refuse it, or none; and all look equally often."""

from __future__ import annotations

import pytest
import tiny_text
import torch
from ranks import free_port, results, run_ranks
from test_trainers import NUM_RANKS, as_launched, check, losses_of
from torch.nn import functional as F
from trainer_settings import BATCH_SIZE, trainer_arguments

from dflop import BalancedBatchSampler


class Own(torch.nn.Module):
    """It takes no `num_items_in_batch`."""

    def __init__(self, smoothing):
        super().__init__()
        self.inner, self.smoothing = tiny_text.make_model(), smoothing
        self.num_labels = []

    def forward(self, input_ids, attention_mask, labels=None):
        self.num_labels.append(0 if labels is None else int(labels[:, 1:].ne(-100).sum()))
        logits = self.inner(input_ids=input_ids, attention_mask=attention_mask).logits
        if labels is None:
            return {"logits": logits}
        flat = logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten()
        return {"loss": F.cross_entropy(*flat, label_smoothing=self.smoothing), "logits": logits}


def without_labels(samples):
    """The first microbatch of the second rank has none; the first rank's has."""
    sampler = BalancedBatchSampler(samples.costs, BATCH_SIZE, NUM_RANKS, 1, num_buckets=NUM_RANKS * 2, seed=3)
    for index in next(iter(sampler)):
        row = samples.rows[index]
        row["labels"] = [-100] * len(row["labels"])
    return samples


@pytest.mark.parametrize("smoothing", [0.0, 0.3])
def test_ranks_look_together(smoothing, tmp_path, quiet):
    from transformers import Trainer

    from dflop.integrations.transformers import balance

    samples, port = without_labels(tiny_text.Samples()), free_port()
    steps = tiny_text.global_batches(samples, BATCH_SIZE, NUM_RANKS * 2, 1, seed=3)
    losses, parameters = tiny_text.reference(samples, steps)

    def run(rank):
        as_launched(rank, port)
        model = Own(smoothing)
        given = trainer_arguments(tmp_path / f"out{rank}", num_train_epochs=1)
        trainer = Trainer(model, given, tiny_text.collate, samples)
        balance(trainer, samples.costs)
        try:
            trainer.train()
        except ValueError as error:
            return model.num_labels, str(error)
        found = {name.removeprefix("inner."): value for name, value in model.named_parameters()}
        return model.num_labels, losses_of(trainer), tiny_text.difference(found, parameters)

    found = results(run_ranks(NUM_RANKS, run, tmp_path / "ranks"))
    assert found[0][0][0] > found[1][0][0] == 0, "no token of the second rank says anything"
    if smoothing:
        assert found[0][1] == found[1][1]
        assert "cross entropy of its next tokens" in found[0][1]
        return
    assert len(found[0][0]) == len(found[1][0]) == 2 * len(steps) + 1
    check([one[1:] for one in found], (losses, parameters))


def test_a_rank_whose_labels_the_model_never_sees_does_not_wait(tmp_path, quiet):
    """A guard against NaN takes them out where none is learnt."""
    from transformers import Trainer

    from dflop.integrations.transformers import balance

    class Guarded(Trainer):
        def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
            labels = inputs["labels"][:, 1:]
            if (labels == -100).all():
                inputs.pop("labels")
                return model(**inputs)["logits"].sum() * 0
            logits = model(**inputs)["logits"][:, :-1].flatten(0, 1)
            loss = F.cross_entropy(logits, labels.flatten(), reduction="sum") / num_items_in_batch
            return loss * self.accelerator.num_processes

    samples, port = without_labels(tiny_text.Samples()), free_port()
    steps = tiny_text.global_batches(samples, BATCH_SIZE, NUM_RANKS * 2, 1, seed=3)

    def run(rank):
        as_launched(rank, port)
        model = Own(0.0)
        given = trainer_arguments(tmp_path / f"out{rank}", num_train_epochs=1)
        trainer = Guarded(model, given, tiny_text.collate, samples)
        balance(trainer, samples.costs)
        trainer.train()
        found = {name.removeprefix("inner."): value for name, value in model.named_parameters()}
        return losses_of(trainer), tiny_text.difference(found, parameters)

    losses, parameters = tiny_text.reference(samples, steps)
    check(results(run_ranks(NUM_RANKS, run, tmp_path / "ranks")), (losses, parameters))
