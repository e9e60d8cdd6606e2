"""Both lines in a plain PyTorch loop under DDP: `torchrun --nproc-per-node 2 examples/train_ddp.py`."""

from __future__ import annotations

import torch
from tiny import Samples, collate, make_model, model_inputs
from torch import distributed
from torch.nn.parallel import DistributedDataParallel

from dflop.integrations import balance_encoder, balanced_loader, num_label_tokens, token_loss


def main() -> None:
    distributed.init_process_group("gloo")  # "nccl" with GPUs
    num_ranks, rank = distributed.get_world_size(), distributed.get_rank()
    data, model = Samples(), make_model()

    balance_encoder(model)  # the second line: the encoder's work is shared out
    ddp = DistributedDataParallel(model)
    loader = balanced_loader(data, data.llm_costs, batch_size=4, collate_fn=collate)  # the first line

    optimizer = torch.optim.AdamW(ddp.parameters(), 1e-3)
    for epoch in range(2):
        loader.batch_sampler.set_epoch(epoch)
        for batch in loader:
            tokens = num_label_tokens(batch["labels"])  # of the global batch: buckets are uneven
            logits = ddp(**model_inputs(batch)).logits
            loss = token_loss(logits, batch["labels"], tokens, num_ranks)  # DDP averages, so times the ranks
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        total = loss.detach() / num_ranks
        distributed.all_reduce(total)
        if rank == 0:
            print(f"epoch {epoch}: loss {float(total):.3f}, {len(loader)} batches a rank")
    distributed.destroy_process_group()


if __name__ == "__main__":
    main()
