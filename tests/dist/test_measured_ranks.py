"""Every rank gets the costs that rank 0 measured; where rank 0 fails, every rank gets an error."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from ranks import results, run_ranks
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.nn.parallel import DistributedDataParallel

from dflop.integrations import measure_cost

SHAPES = [(0, 3), (8, 20), (2, 5), (4, 9)]


class Backbone(nn.Module):
    """One layer."""

    def __init__(self):
        super().__init__()
        self.config = SimpleNamespace()
        self.layers = nn.ModuleList([nn.Linear(4, 4)])

    def forward(self, inputs_embeds):
        return self.layers[0](inputs_embeds)


class Whole(nn.Module):
    """An encoder before it."""

    def __init__(self):
        super().__init__()
        self.encoder, self.embedding, self.backbone = (
            nn.Linear(4, 4),
            nn.Parameter(torch.ones(1, 1, 4)),
            Backbone(),
        )

    def get_decoder(self):
        return self.backbone

    def forward(self, encoder_tokens, input_ids):
        x = self.embedding.expand(1, input_ids.shape[1], 4)
        hidden = self.backbone(inputs_embeds=self.encoder(x) if encoder_tokens else x)
        return SimpleNamespace(loss=hidden.sum())


def batch_of(position):
    encoder, llm = SHAPES[position]
    return {"encoder_tokens": encoder, "input_ids": torch.zeros(1, llm, dtype=torch.long)}


def test_all_ranks_have_the_costs_of_the_first(tmp_path):
    def rank(index):
        store = dist.FileStore(str(tmp_path / "store"), 2)
        dist.init_process_group("gloo", store=store, rank=index, world_size=2)
        runs = []

        def of_rank(position):
            runs.append(position)
            return batch_of(position)

        cost = measure_cost(Whole(), of_rank, SHAPES, repeats=1)
        refused = []
        for wrap in (
            DistributedDataParallel,
            lambda model: FullyShardedDataParallel(model, device_id=torch.device("cpu")),
            fully_shard,
        ):
            with pytest.raises(ValueError, match=r"the model is wrapped \(DDP, FSDP or ZeRO-3\)"):
                measure_cost(wrap(Whole()), of_rank, SHAPES)
            refused.append(wrap)
        failed = ""
        try:
            measure_cost(Whole(), of_rank, [])
        except ValueError as error:
            failed = str(error)
        dist.destroy_process_group()
        return cost, len(runs), len(refused), failed

    (first, ran, refused, failed), (second, idle, also_refused, also_failed) = results(
        run_ranks(2, rank, tmp_path)
    )
    assert first == second
    assert (ran, idle) == (len(SHAPES), 0)
    assert refused == also_refused == 3
    assert failed == "there are no samples to measure"
    assert also_failed == "rank 0 could not measure the costs, its error says why"
