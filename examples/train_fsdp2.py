"""Both lines under FSDP2: `torchrun --nproc-per-node 2 examples/train_fsdp2.py`.

Ranks meet in every layer, so what is balanced is each component apart: the encoder is shared out by the second line,
and the sampler has the LLM's work alone to balance.
"""

from __future__ import annotations

import torch
from tiny import Samples, collate, make_model, model_inputs
from torch import distributed
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from dflop.integrations import balance_encoder, balanced_loader, num_label_tokens, token_loss


def main() -> None:
    distributed.init_process_group("gloo")
    num_ranks, rank = distributed.get_world_size(), distributed.get_rank()
    data, model = Samples(), make_model()
    mesh = init_device_mesh("cpu", (num_ranks,))
    for layer in [*model.model.vision_tower.encoder.layer, *model.model.language_model.layers]:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)

    encoder = balance_encoder(model)
    loader = balanced_loader(data, data.llm_costs, batch_size=4, meets="phase", collate_fn=collate)

    optimizer = torch.optim.AdamW(model.parameters(), 1e-3)
    for batch in loader:
        tokens = num_label_tokens(batch["labels"])
        loss = token_loss(model(**model_inputs(batch)).logits, batch["labels"], tokens, num_ranks)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    shared, alone = encoder.loads
    if rank == 0:
        print(f"tiles a rank in the last step: {alone} in its samples, {shared} encoded")
    distributed.destroy_process_group()


if __name__ == "__main__":
    main()
