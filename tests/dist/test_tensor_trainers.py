"""The lines where transformers itself cuts the model as it loads it: tensor parallel ranks read the same samples.

A process of its own computes the same global batches without dflop. After some steps of plain SGD its parameters are
those of the ranks.
"""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import tiny_text
import torch
from ranks import environment, free_port, results, run_ranks
from test_trainers import TOLERANCE, as_launched, losses_of
from torch import distributed
from trainer_settings import BATCH_SIZE, trainer_arguments

from dflop import BalancedBatchSampler
from dflop.integrations import balance_encoder, remove_padding, token_loss
from dflop.integrations.trainer_loss import check_loss
from dflop.integrations.transformers import balance

RATE, NUM_SAMPLES = 0.05, 24


@pytest.fixture
def tiny(monkeypatch):
    """The model and data of the examples: pictures of one tile to many, a third is text alone."""
    monkeypatch.syspath_prepend(str(Path(__file__).parents[2] / "examples"))
    import tiny

    return tiny


def one_process(tiny, samples, steps):
    """Losses of the steps, and the parameters after them."""
    model, losses = tiny.make_model(), []
    for step in steps:
        rows = [samples[i] for i in step]
        tokens = sum(label != -100 for row in rows for label in row["labels"][1:])
        losses.append(0.0)
        for row in rows:
            batch = tiny.collate([row])
            loss = token_loss(model(**{**batch, "labels": None}).logits, batch["labels"], tokens)
            loss.backward()
            losses[-1] += float(loss.detach())
        with torch.no_grad():
            for parameter in model.parameters():
                if parameter.grad is not None:
                    parameter -= RATE * parameter.grad
                    parameter.grad = None
    return losses, dict(model.named_parameters())


@pytest.mark.parametrize(
    ("tp_size", "fsdp_size", "lines"),
    [(2, 2, "all"), pytest.param(2, 1, "first", marks=pytest.mark.more), (1, 2, "first")],
    ids=["tp2-fsdp2-all", "tp2-first", "fsdp2-first"],
)
def test_a_model_that_is_cut_as_it_is_loaded(tp_size, fsdp_size, lines, tiny, tmp_path, quiet, monkeypatch):
    """`DistributedConfig`: the samples of a rank go to its whole tensor parallel group, each once an epoch."""
    from accelerate import ParallelismConfig
    from transformers import AutoModelForImageTextToText, Trainer
    from transformers.distributed import DistributedConfig

    # accelerate takes it on GPUs alone; all else runs on CPUs.
    monkeypatch.setattr(ParallelismConfig, "_validate_accelerator", lambda *_: None)
    samples, port = tiny.Samples(NUM_SAMPLES), free_port()
    tiny.make_model().save_pretrained(tmp_path / "model")
    costs = samples.llm_costs if lines == "all" else samples.costs
    num_ranks, accumulation = tp_size * fsdp_size, 2
    # Under FSDP2 alone ranks meet in each layer; where the encoder is shared out it costs nothing, and both are one.
    meets = "phase" if fsdp_size > 1 else "step"
    sampler = BalancedBatchSampler(
        costs, BATCH_SIZE, num_buckets=fsdp_size * accumulation, seed=3, meets=meets
    )
    batches = list(sampler)
    size = fsdp_size * accumulation
    steps = [sum(batches[start : start + size], []) for start in range(0, len(batches), size)]
    assert sorted(sum(steps, [])) == list(range(NUM_SAMPLES))
    losses, parameters = one_process(tiny, samples, steps)

    def run(rank):
        as_launched(rank, port, num_ranks)
        os.environ.update(environment(rank, num_ranks, port))
        distributed.init_process_group("gloo")
        config = DistributedConfig(tp_size=tp_size, fsdp_size=fsdp_size)
        model = AutoModelForImageTextToText.from_pretrained(
            tmp_path / "model", distributed_config=config, dtype=torch.float32
        ).train()
        seen = []

        def collate(rows):
            seen.append(
                [
                    samples.sizes.index((len(r["pixel_values"]), sum(x != -100 for x in r["labels"])))
                    for r in rows
                ]
            )
            return tiny.collate(rows)

        arguments = trainer_arguments(tmp_path / f"out{rank}", learning_rate=RATE, num_train_epochs=1)
        trainer = Trainer(model, arguments, collate, samples)
        if lines == "all":
            balance_encoder(model)
            remove_padding(model)
        balance(trainer, costs)
        trainer.train()
        whole = {
            name: value.full_tensor() if hasattr(value, "full_tensor") else value
            for name, value in model.named_parameters()
        }
        return losses_of(trainer), tiny_text.difference(whole, parameters), seen

    ranks = results(run_ranks(num_ranks, run, tmp_path / "ranks"))
    for mine, gap, _ in ranks:
        assert mine == pytest.approx(losses, rel=1e-4)
        assert gap <= TOLERANCE
    read = [seen for _, _, seen in ranks]
    # Tensor parallel is the inner axis: those ranks read the same.
    assert all(read[rank] == read[rank - rank % tp_size] for rank in range(num_ranks))
    assert sorted(i for rank in range(0, num_ranks, tp_size) for batch in read[rank] for i in batch) == list(
        range(NUM_SAMPLES)
    )


@pytest.mark.parametrize(
    ("name", "accepts", "message"),
    [
        ("sp", True, "`sp_size` of its `parallelism_config` is 2, must be 1: with it the loss is a mean"),
        ("cp", False, "`cp_size` of its `parallelism_config` is 2, must be 1 for this model"),
        ("cp", True, None),
    ],
)
def test_ranks_that_hold_parts_of_rows(name, accepts, message, tmp_path):
    """A loss that would weigh microbatches wrongly is refused; both need GPUs, so the trainer is told their number."""
    from transformers import Trainer

    samples, port = tiny_text.Samples(8), free_port()

    def run(rank):
        as_launched(rank, port, 1)
        arguments = trainer_arguments(tmp_path / "out")
        trainer = Trainer(tiny_text.make_model(), arguments, tiny_text.collate, samples)
        trainer.model_accepts_loss_kwargs = accepts
        setattr(trainer, f"get_{name}_size", lambda: 2)
        if message is None:
            check_loss(trainer)
            return True
        with pytest.raises(ValueError, match=message):
            balance(trainer, samples.costs)
        return True

    assert results(run_ranks(1, run, tmp_path / "ranks")) == [True]
