"""The first line under DeepSpeed: `transformers.Trainer` with ZeRO-0 to 3 trains the global batch as one process does.

`make test-deepspeed` installs DeepSpeed, which is built from its sources, and runs these tests.
"""

from __future__ import annotations

import pytest
import tiny_text
from ranks import free_port, results, run_ranks
from test_trainers import BATCH_SIZE, NUM_RANKS, as_launched, check, losses_of, trainer_arguments

pytest.importorskip("deepspeed", reason="DeepSpeed is not installed: `make test-deepspeed`")


@pytest.fixture(scope="module")
def samples():
    return tiny_text.Samples()


@pytest.mark.parametrize("takes_items", [True, False])
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_transformers_trainer(stage, takes_items, samples, tmp_path, quiet, monkeypatch):
    """Parameters and losses; and the sampler knows what ranks wait for."""
    from transformers import Trainer

    from dflop.integrations.transformers import balance

    monkeypatch.setenv("DS_ACCELERATOR", "cpu")
    steps = tiny_text.global_batches(samples, BATCH_SIZE, NUM_RANKS * 2, 2, seed=3)
    expected = tiny_text.reference(samples, steps)
    port = free_port()
    settings = {
        "zero_optimization": {"stage": stage},
        "train_batch_size": "auto",
        "train_micro_batch_size_per_gpu": "auto",
        "gradient_accumulation_steps": "auto",
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
    }

    def run(rank):
        import deepspeed

        as_launched(rank, port)
        model = tiny_text.make_model()
        if not takes_items:
            model.accepts_loss_kwargs = False
        arguments = trainer_arguments(tmp_path / f"out{rank}", deepspeed=settings)
        trainer = Trainer(model, arguments, tiny_text.collate, samples)
        balance(trainer, samples.costs)
        trainer.train()
        loader = trainer.get_train_dataloader()
        assert loader.batch_sampler.state_dict()["meets"] == ("phase" if stage == 3 else "step")
        whole = dict(model.named_parameters())
        with deepspeed.zero.GatheredParameters(list(whole.values()), enabled=stage == 3):
            return losses_of(trainer), tiny_text.difference(whole, expected[1])

    check(results(run_ranks(NUM_RANKS, run, tmp_path / "ranks")), expected)
