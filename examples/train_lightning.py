"""Both lines with Lightning, on two processes of this machine's CPU: `python examples/train_lightning.py`."""

from __future__ import annotations

import os

import lightning.pytorch as pl
import torch
from lightning.pytorch.strategies import DDPStrategy
from tiny import Samples, collate, make_model, model_inputs

from dflop.integrations import balance_encoder
from dflop.integrations.lightning import BalancedData


class Module(pl.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.model = make_model()

    def on_fit_start(self) -> None:
        balance_encoder(self.model)

    def training_step(self, batch: dict[str, torch.Tensor], batch_idx: int) -> torch.Tensor:
        logits = self.model(**model_inputs(batch)).logits
        return self.trainer.datamodule.token_loss(logits, batch["labels"], batch_idx)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), 1e-3)


def main() -> None:
    data = Samples()
    trainer = pl.Trainer(
        accelerator="cpu", devices=int(os.environ.get("WORLD_SIZE", "2")), max_epochs=1, logger=False,
        accumulate_grad_batches=2,
        strategy=DDPStrategy(process_group_backend="gloo"),
        use_distributed_sampler=False,  # each rank's batches are its own already
        enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
    )  # fmt: skip
    trainer.fit(Module(), BalancedData(data, data.llm_costs, batch_size=4, collate_fn=collate))
    if trainer.is_global_zero:
        print(f"{trainer.global_step} steps")


if __name__ == "__main__":
    main()
