"""The line of transformers keeps the order and the number of samples that the trainer is asked for."""

from __future__ import annotations

import pytest
import tiny_text
from ranks import free_port, results, run_ranks
from test_trainers import NUM_RANKS, as_launched, losses_of
from trainer_settings import trainer_arguments


def test_sequential_steps_have_the_samples_in_their_order(tmp_path, quiet):
    """`train_sampling_strategy="sequential"` asks for no shuffling: the first step has the first samples."""
    from transformers import Trainer

    from dflop.integrations.transformers import balance

    samples = tiny_text.Samples()

    def first(strategy):
        arguments = trainer_arguments(tmp_path, ddp_backend=None, train_sampling_strategy=strategy)
        trainer = Trainer(tiny_text.make_model(), arguments, tiny_text.collate, samples)
        batches = balance(trainer, samples.costs).get_train_dataloader().batch_sampler
        return sorted(index for batch in list(batches)[:2] for index in batch)

    arguments = trainer_arguments(tmp_path, ddp_backend=None)
    count = 2 * arguments.per_device_train_batch_size
    assert first("sequential") == list(range(count))
    assert first("random") != list(range(count))


def test_split_batches_are_split(tmp_path, quiet):
    """`split_batches` divides `per_device_train_batch_size` among the ranks: the same losses, or a refusal by name."""
    from transformers import Trainer

    from dflop.integrations.transformers import balance

    samples, port = tiny_text.Samples(16), free_port()
    options = {"num_train_epochs": 1, "train_sampling_strategy": "sequential"}

    def run(rank):
        as_launched(rank, port)

        def make(batch_size):
            arguments = trainer_arguments(
                tmp_path / f"out{rank}",
                per_device_train_batch_size=batch_size,
                accelerator_config={"split_batches": True},
                **options,
            )
            return Trainer(tiny_text.make_model(), arguments, tiny_text.collate, samples)

        plain, with_costs, when_loaded = (make(4) for _ in range(3))
        balance(with_costs, samples.costs)
        balance(when_loaded, when_loaded=True)
        for trainer in (plain, with_costs, when_loaded):
            trainer.train()
        with pytest.raises(
            ValueError,
            match="`per_device_train_batch_size` is 3, must be a multiple of the 2 ranks that `split_batches`",
        ):
            balance(make(3), samples.costs)
        return tuple(map(losses_of, (plain, with_costs, when_loaded)))

    for plain, with_costs, when_loaded in results(run_ranks(NUM_RANKS, run, tmp_path / "ranks")):
        assert len(plain) == 2
        assert with_costs == pytest.approx(plain, rel=1e-4)
        assert when_loaded == pytest.approx(plain, rel=1e-4)
