"""The balanced data loader in torchtitan's interface, as its trainer builds and saves it.

In a `config_registry` function: `dataloader=BalancedDataLoader.Config(source=source, accumulation=2)`.
"""

from __future__ import annotations

import random

import torch

from dflop.integrations.torchtitan import BalancedDataLoader

SEQUENCE = 64


def source(tokenizer, seq_len):
    """Dataset, costs and collation. Documents are of uneven lengths; a batch is padded to its longest."""
    draw = random.Random(0)
    rows = [
        [draw.randrange(3, 60) for _ in range(4 + int(draw.lognormvariate(2, 1)))][:seq_len]
        for _ in range(48)
    ]

    def collate(batch):
        most = max(map(len, batch))
        ids = torch.tensor([row + [0] * (most - len(row)) for row in batch])
        labels = torch.tensor([row[1:] + [-100] * (most - len(row) + 1) for row in batch])
        return {"input": ids}, labels

    return rows, [(0, len(row)) for row in rows], collate


def build(num_ranks, rank):
    """What torchtitan's trainer does with the configuration."""
    config = BalancedDataLoader.Config(source=source, accumulation=2, num_epochs=1)
    return config.build(
        dp_world_size=num_ranks, dp_rank=rank, tokenizer=None, seq_len=SEQUENCE, local_batch_size=4
    )


def main() -> None:
    ranks = [build(2, rank) for rank in range(2)]
    for step, batches in enumerate(zip(*ranks, strict=True)):
        tokens = [int((inputs["input"] != 0).sum()) for inputs, _ in batches]
        print(f"microbatch {step}: tokens by rank {tokens}")
    iterator = iter(ranks[0])
    assert next(iterator, None) is None, "the epoch is over"
    print(
        "state:", {name: ranks[0].state_dict()[name] for name in ("epoch", "global_batch", "buckets_taken")}
    )


if __name__ == "__main__":
    main()
