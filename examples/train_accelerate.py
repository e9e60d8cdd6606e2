"""Balanced batches with accelerate: `accelerate launch --cpu --num_processes 2 examples/train_accelerate.py`."""

from __future__ import annotations

import torch
from accelerate import Accelerator
from accelerate.utils import GradientAccumulationPlugin
from tiny import Samples, collate, make_model, model_inputs

from dflop.integrations import balance_encoder, num_label_tokens, token_loss
from dflop.integrations.accelerate import balanced


def main() -> None:
    # The microbatches of a step are taken before the first is computed, as its label tokens are needed.
    plugin = GradientAccumulationPlugin(num_steps=2, sync_with_dataloader=False)
    accelerator = Accelerator(cpu=True, gradient_accumulation_plugin=plugin)
    data, model = Samples(), make_model()
    optimizer = torch.optim.AdamW(model.parameters(), 1e-3)
    loader = balanced(accelerator, data, data.llm_costs, batch_size=4, collate_fn=collate)
    balance_encoder(
        model
    )  # the second line; without it DDP must look for parameters that text alone leaves out
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    batches = iter(loader)
    for step in range(len(loader) // 2):
        microbatches = [next(batches), next(batches)]
        tokens = num_label_tokens(
            [batch["labels"] for batch in microbatches]
        )  # of all microbatches of the step
        for batch in microbatches:
            with accelerator.accumulate(model):
                logits = model(**model_inputs(batch)).logits
                loss = token_loss(logits, batch["labels"], tokens, accelerator.num_processes)
                # `backward` divides by the microbatches, and the loss is of the whole step already.
                accelerator.backward(loss * accelerator.gradient_accumulation_steps)
                optimizer.step()
                optimizer.zero_grad()
        accelerator.print(f"step {step}: {int(tokens)} label tokens")


if __name__ == "__main__":
    main()
