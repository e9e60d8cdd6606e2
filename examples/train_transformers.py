"""All three lines in `transformers.Trainer`: `torchrun --nproc-per-node 2 examples/train_transformers.py`."""

from __future__ import annotations

import tempfile

from tiny import Samples, collate, make_model
from transformers import Trainer, TrainingArguments

from dflop.integrations import balance_encoder, remove_padding
from dflop.integrations.transformers import balance


def main() -> None:
    data, model = Samples(), make_model()
    with tempfile.TemporaryDirectory() as folder:
        arguments = TrainingArguments(
            folder, per_device_train_batch_size=4, num_train_epochs=1, logging_steps=4, report_to=[], save_strategy="no",
            use_cpu=True, remove_unused_columns=False, dataloader_pin_memory=False, disable_tqdm=True,
            ddp_find_unused_parameters=False,  # the second line gives each parameter a gradient
        )  # fmt: skip
        trainer = Trainer(model, arguments, collate, data)
        balance(trainer, data.llm_costs)  # the first line
        balance_encoder(model)  # the second line
        remove_padding(model)  # the third line: this collation pads
        trainer.train()


if __name__ == "__main__":
    main()
