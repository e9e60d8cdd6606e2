"""The first line under FSDP2: a rank with a microbatch of text alone hangs nobody, in each trainer.

The data are those of the examples: a third of the samples is text alone. After an epoch of plain SGD the parameters
equal those of one process that computes every sample alone.
"""

from __future__ import annotations

import sys
import warnings
from pathlib import Path

import pytest
import torch
from ranks import free_port, results, run_ranks
from shards import whole_of
from test_trainers import as_launched
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from trainer_settings import trainer_arguments

from dflop.data.sampler import BalancedBatchSampler
from dflop.integrations.loss import num_label_tokens, token_loss
from dflop.integrations.text_alone import counts_of, meet_in_encoder

sys.path.append(str(Path(__file__).parents[2] / "examples"))
import tiny

NUM_RANKS, BATCH_SIZE, SEED, RATE = 2, 1, 3, 0.05
TOLERANCE = 1e-5
"""Relative error of a parameter, in float32."""


@pytest.fixture(scope="module")
def samples():
    return tiny.Samples(24)


@pytest.fixture(scope="module")
def expected(samples):
    """Parameters after an epoch, and the steps of which one has a microbatch of text alone beside one with images."""
    sampler = BalancedBatchSampler(samples.costs, BATCH_SIZE, NUM_RANKS, 0, meets="phase", seed=SEED)
    steps = [sampler.buckets(step) for step in range(len(sampler))]
    tiles = [[sum(samples.sizes[i][0] for i in bucket) for bucket in step] for step in steps]
    mixed = [step for step in tiles if min(step) == 0 < max(step)]
    assert mixed, "nothing is tested without such a step"
    model = tiny.make_model()
    optimizer = torch.optim.SGD(model.parameters(), RATE)
    for step in steps:
        batches = [tiny.collate([samples[index]]) for bucket in step for index in bucket]
        tokens = sum(int(batch["labels"][..., 1:].ne(-100).sum()) for batch in batches)
        for batch in batches:
            token_loss(model(**tiny.model_inputs(batch)).logits, batch["labels"], tokens).backward()
        optimizer.step()
        optimizer.zero_grad()
    return {name: parameter.detach() for name, parameter in model.named_parameters()}


def sharded():
    """As a user of FSDP2 shards it: each layer of both components."""
    model = tiny.make_model()
    mesh = init_device_mesh("cpu", (NUM_RANKS,))
    shard(model, mesh)
    return model


def shard(model, mesh):
    for layer in [*model.model.vision_tower.encoder.layer, *model.model.language_model.layers]:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)


def gap(model, expected):
    """The largest relative error of a parameter."""
    found = whole_of(dict(model.named_parameters()))
    return max(
        float((found[name] - value).norm() / value.norm().clamp(min=1e-4)) for name, value in expected.items()
    )


@pytest.mark.parametrize(
    ("make", "is_fsdp2", "reason"),
    [
        (lambda: torch.nn.Linear(1, 1), True, "`Linear` holds no model with an encoder of audioflamingo3"),
        (tiny.make_model, False, "the model is not under FSDP2: take it, or a ZeRO stage below 3"),
        (lambda: None, True, "the model is not known here: prepare it before you make the loader"),
    ],
)
def test_a_warning_counts_the_samples_where_ranks_will_wait(make, is_fsdp2, reason, samples):
    """On rank 0, and only where some samples have media and others have none."""
    alone = sum(tiles == 0 for tiles, _ in samples.sizes)

    def told(costs, rank=0):
        with warnings.catch_warnings(record=True) as found:
            warnings.simplefilter("always")
            meet_in_encoder(make(), counts_of(BalancedBatchSampler(costs, 1)), rank, is_fsdp2=is_fsdp2)
        return [str(one.message) for one in found]

    (text,) = told(samples.costs)
    assert text.startswith(f"{alone} of 24 samples have nothing for the encoder.")
    assert reason in text
    assert told(samples.costs, rank=1) == told(samples.llm_costs) == []


def test_transformers_trainer(samples, expected, tmp_path, quiet):
    """`balance(trainer, costs)` alone."""
    from transformers import Trainer

    from dflop.integrations.transformers import balance

    port = free_port()

    def run(rank):
        as_launched(rank, port)
        arguments = trainer_arguments(
            tmp_path / f"out{rank}", per_device_train_batch_size=BATCH_SIZE, gradient_accumulation_steps=1,
            num_train_epochs=1, learning_rate=RATE, seed=SEED,
        )  # fmt: skip
        arguments.device  # noqa: B018 - starts the process group.
        model = sharded()
        trainer = Trainer(model, arguments, tiny.collate, samples)
        # accelerate shards nothing on a CPU: the model comes sharded, and is not to be wrapped again.
        trainer.accelerator.prepare_model = lambda module, **_: module
        balance(trainer, samples.costs)
        trainer.train()
        return gap(model, expected)

    assert max(results(run_ranks(NUM_RANKS, run, tmp_path / "ranks"))) <= TOLERANCE


def test_evaluation_of_text_alone_beside_images(samples, tmp_path, quiet):
    """`trainer.evaluate` before and after a step: batches of which one rank's is text alone hang nobody."""
    from transformers import Trainer

    from dflop.integrations.transformers import balance

    # Batches are dealt out in turn: rank 0 gets the even ones.
    alone = [index for index, (tiles, _) in enumerate(samples.sizes) if tiles == 0][:4]
    seen = [index for index, (tiles, _) in enumerate(samples.sizes) if tiles][:4]
    order = [index for pair in zip(alone, seen, strict=True) for index in pair]
    held_out = torch.utils.data.Subset(samples, order)
    port = free_port()

    def run(rank):
        as_launched(rank, port)
        arguments = trainer_arguments(
            tmp_path / f"out{rank}", per_device_train_batch_size=BATCH_SIZE, gradient_accumulation_steps=1,
            per_device_eval_batch_size=1, max_steps=1, learning_rate=0.0, seed=SEED,
        )  # fmt: skip
        arguments.device  # noqa: B018 - starts the process group.

        def make(model):
            trainer = Trainer(model, arguments, tiny.collate, samples, held_out)
            trainer.accelerator.prepare_model = lambda module, **_: module
            return trainer

        # The oracle: a model that is not sharded, whose ranks wait for nobody.
        whole = make(tiny.make_model()).evaluate()["eval_loss"]
        trainer = balance(make(sharded()), samples.costs)
        before = trainer.evaluate()["eval_loss"]
        trainer.train()
        return whole, before, trainer.evaluate()["eval_loss"]

    for whole, *found in results(run_ranks(NUM_RANKS, run, tmp_path / "ranks")):
        assert found == pytest.approx([whole, whole], rel=TOLERANCE)


def test_accelerate(samples, expected, tmp_path, quiet):
    """`balanced(accelerator, ...)` after the model is prepared."""
    from accelerate import Accelerator

    from dflop.integrations.accelerate import balanced

    port = free_port()

    def run(rank):
        as_launched(rank, port)
        accelerator = Accelerator(cpu=True)
        model = sharded()
        accelerator._models.append(model)
        optimizer = torch.optim.SGD(model.parameters(), RATE)
        for batch in balanced(
            accelerator, samples, samples.costs, BATCH_SIZE, seed=SEED, collate_fn=tiny.collate
        ):
            tokens = num_label_tokens(batch["labels"])
            logits = model(**tiny.model_inputs(batch)).logits
            accelerator.backward(token_loss(logits, batch["labels"], tokens, NUM_RANKS))
            optimizer.step()
            optimizer.zero_grad()
        return gap(model, expected)

    assert max(results(run_ranks(NUM_RANKS, run, tmp_path / "ranks"))) <= TOLERANCE


def test_lightning(samples, expected, tmp_path, quiet):
    """`BalancedData` under `ModelParallelStrategy`."""
    # `make test-oldest` has no Lightning.
    pl = pytest.importorskip("lightning.pytorch")
    from lightning.pytorch.strategies import ModelParallelStrategy

    from dflop.integrations.lightning import BalancedData

    port = free_port()

    def run(rank):
        as_launched(rank, port)

        class Module(pl.LightningModule):
            def __init__(self):
                super().__init__()
                self.model = tiny.make_model()

            def configure_model(self):
                shard(self.model, self.device_mesh["data_parallel"])

            def training_step(self, batch, batch_idx):
                logits = self.model(**tiny.model_inputs(batch)).logits
                return self.trainer.datamodule.token_loss(logits, batch["labels"], batch_idx)

            def configure_optimizers(self):
                return torch.optim.SGD(self.parameters(), RATE)

        module = Module()
        trainer = pl.Trainer(
            accelerator="cpu", devices=NUM_RANKS, max_epochs=1, use_distributed_sampler=False, logger=False,
            strategy=ModelParallelStrategy(data_parallel_size=NUM_RANKS, tensor_parallel_size=1,
                                           process_group_backend="gloo"),
            enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
            default_root_dir=tmp_path,
        )  # fmt: skip
        data = BalancedData(samples, samples.costs, BATCH_SIZE, seed=SEED, collate_fn=tiny.collate)
        trainer.fit(module, data)
        return gap(module.model, expected)

    assert max(results(run_ranks(NUM_RANKS, run, tmp_path / "ranks", timeout_s=280))) <= TOLERANCE
