"""The first line under DeepSpeed: a loop as people write it trains the global batch as one process does.

`make test-deepspeed` installs DeepSpeed, which is built from its sources, and runs these tests. On CPUs
`transformers.Trainer` counts one rank under DeepSpeed, so the trainer itself needs GPUs.
"""

from __future__ import annotations

import pytest
import tiny_text
import torch
from ranks import free_port, results, run_ranks
from test_trainers import NUM_RANKS, as_launched, check
from torch import distributed
from trainer_settings import BATCH_SIZE, trainer_arguments

pytest.importorskip("deepspeed", reason="DeepSpeed is not installed: `make test-deepspeed`")
ACCUMULATION, NUM_EPOCHS = 2, 2


@pytest.fixture(scope="module")
def samples():
    return tiny_text.Samples()


@pytest.fixture(autouse=True)
def _on_cpus(monkeypatch):
    monkeypatch.setenv("DS_ACCELERATOR", "cpu")


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_a_loop_with_deepspeeds_engine(stage, samples, tmp_path, quiet):
    """Parameters and losses, two epochs, two microbatches a step."""
    from dflop.integrations import balanced_loader, num_label_tokens, token_loss

    steps = tiny_text.global_batches(samples, BATCH_SIZE, NUM_RANKS * ACCUMULATION, NUM_EPOCHS, seed=3)
    expected = tiny_text.reference(samples, steps)
    port = free_port()
    settings = {
        "zero_optimization": {"stage": stage},
        "train_micro_batch_size_per_gpu": BATCH_SIZE,
        "gradient_accumulation_steps": ACCUMULATION,
        "gradient_clipping": 0.0,
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
    }

    def run(rank):
        import deepspeed

        as_launched(rank, port)
        deepspeed.init_distributed("gloo", auto_mpi_discovery=False)
        model = tiny_text.make_model()
        optimizer = torch.optim.SGD(model.parameters(), tiny_text.LEARNING_RATE)
        engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=settings)
        loader = balanced_loader(
            samples,
            samples.costs,
            BATCH_SIZE,
            accumulation=ACCUMULATION,
            meets="phase" if stage == 3 else "step",
            seed=3,
            collate_fn=tiny_text.collate,
        )
        losses = []
        for epoch in range(NUM_EPOCHS):
            loader.batch_sampler.set_epoch(epoch)
            batches = list(loader)
            for start in range(0, len(batches), ACCUMULATION):
                microbatches = batches[start : start + ACCUMULATION]
                tokens = num_label_tokens([m["labels"] for m in microbatches])
                total = torch.zeros(())
                for m in microbatches:
                    logits = engine(input_ids=m["input_ids"], attention_mask=m["attention_mask"]).logits
                    loss = token_loss(logits, m["labels"], tokens, NUM_RANKS)
                    engine.backward(loss, scale_wrt_gas=False)
                    engine.step()
                    total += loss.detach() / NUM_RANKS
                distributed.all_reduce(total)
                losses.append(float(total))
        assert engine.zero_optimization_stage() == stage
        whole = dict(model.named_parameters())
        with deepspeed.zero.GatheredParameters(list(whole.values()), enabled=stage == 3):
            return losses, tiny_text.difference(whole, expected[1])

    check(results(run_ranks(NUM_RANKS, run, tmp_path / "ranks")), expected)


def test_a_trainer_that_counts_one_rank_is_refused(samples, tmp_path, quiet, monkeypatch):
    """As transformers does under DeepSpeed on CPUs: each rank would train the samples of all."""
    from transformers import Trainer

    from dflop.integrations.transformers import balance

    port = free_port()
    settings = {"zero_optimization": {"stage": 2}, "train_micro_batch_size_per_gpu": BATCH_SIZE}

    def run(rank):
        as_launched(rank, port)
        monkeypatch.delenv("ACCELERATE_USE_CPU", raising=False)
        arguments = trainer_arguments(
            tmp_path / f"out{rank}", deepspeed=settings, use_cpu=False, ddp_backend=None
        )
        trainer = Trainer(tiny_text.make_model(), arguments, tiny_text.collate, samples)
        with pytest.raises(ValueError, match="`world_size` of the trainer is 1, and 2 ranks run"):
            balance(trainer, samples.costs)
        return True

    assert results(run_ranks(NUM_RANKS, run, tmp_path / "ranks")) == [True] * NUM_RANKS


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_the_line_reads_from_accelerate_what_ranks_wait_for(stage, samples, tmp_path, quiet, monkeypatch):
    """Whether ZeRO's stage comes from a file of DeepSpeed's or from accelerate's own settings; `meets` wins."""
    from accelerate import Accelerator, DeepSpeedPlugin
    from accelerate.utils import DistributedType

    from dflop.integrations.accelerate import balanced

    port = free_port()
    settings = {"zero_optimization": {"stage": stage}, "train_micro_batch_size_per_gpu": BATCH_SIZE}

    def run(rank):
        found = []
        for plugin in (DeepSpeedPlugin(hf_ds_config=settings), DeepSpeedPlugin(zero_stage=stage)):
            as_launched(rank, port)
            # accelerate leaves DeepSpeed out where it is told to use CPUs; here it finds nothing else.
            monkeypatch.delenv("ACCELERATE_USE_CPU", raising=False)
            accelerator = Accelerator(deepspeed_plugin=plugin)
            assert accelerator.distributed_type == DistributedType.DEEPSPEED
            for options in ({}, {"meets": "step"}):
                loader = balanced(accelerator, samples, samples.costs, BATCH_SIZE, **options)
                found.append(loader.batch_sampler.state_dict()["meets"])
        return found

    own = "phase" if stage == 3 else "step"
    assert results(run_ranks(NUM_RANKS, run, tmp_path)) == [[own, "step"] * 2] * NUM_RANKS
