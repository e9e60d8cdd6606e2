"""The line of transformers keeps the order of samples that the trainer is asked for."""

from __future__ import annotations

import tiny_text
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
