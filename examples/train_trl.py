"""Balanced batches in TRL's `SFTTrainer`: `torchrun --nproc-per-node 2 examples/train_trl.py`."""

from __future__ import annotations

import random
import tempfile

import datasets
import torch
from tokenizers import Tokenizer, models
from transformers import PreTrainedTokenizerFast, Qwen2Config, Qwen2ForCausalLM
from trl import SFTConfig, SFTTrainer

from dflop.integrations.transformers import balance


def main() -> None:
    torch.manual_seed(0)
    words = {"<pad>": 0, "<s>": 1, "</s>": 2} | {f"w{i}": i for i in range(3, 60)}
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer(models.WordLevel(words, unk_token="<s>")),
        pad_token="<pad>",
        eos_token="</s>",
    )
    model = Qwen2ForCausalLM(Qwen2Config(vocab_size=60, hidden_size=16, intermediate_size=32, num_hidden_layers=1,
                                         num_attention_heads=2, num_key_value_heads=1))  # fmt: skip
    draw = random.Random(0)
    rows = [
        {"input_ids": [draw.randrange(3, 60) for _ in range(4 + int(draw.lognormvariate(3, 1)))]}
        for _ in range(64)
    ]
    with tempfile.TemporaryDirectory() as folder:
        arguments = SFTConfig(
            folder, per_device_train_batch_size=4, num_train_epochs=1, logging_steps=4, report_to=[], save_strategy="no",
            use_cpu=True, bf16=False, gradient_checkpointing=False, dataloader_pin_memory=False,
            max_length=None, disable_tqdm=True,
        )  # fmt: skip
        trainer = SFTTrainer(
            model, args=arguments, train_dataset=datasets.Dataset.from_list(rows), processing_class=tokenizer
        )
        balance(trainer, [(0, len(row["input_ids"])) for row in rows])
        trainer.train()


if __name__ == "__main__":
    main()
