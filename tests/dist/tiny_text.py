"""A text model small enough to train on one core, samples of very uneven lengths, and what training must give."""

from __future__ import annotations

import random

import torch
from torch.nn import functional as F

VOCABULARY, LEARNING_RATE = 60, 0.5


def make_model():
    """A Qwen2 of one layer, always with the same parameters."""
    from transformers import Qwen2Config, Qwen2ForCausalLM

    torch.manual_seed(0)
    config = Qwen2Config(
        vocab_size=VOCABULARY,
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=1,
        max_position_embeddings=256,
        initializer_range=0.2,
        use_cache=False,
    )
    return Qwen2ForCausalLM(config).train()


class Samples(torch.utils.data.Dataset):
    """Token ids with labels for a part of them: both lengths vary much, and not together."""

    def __init__(self, count=38, seed=0):
        draw = random.Random(seed)
        self.rows = []
        for _ in range(count):
            length = 4 + int(draw.lognormvariate(2, 0.8))
            prompt = draw.randrange(1, length - 1)
            ids = [draw.randrange(3, VOCABULARY) for _ in range(length)]
            self.rows.append({"input_ids": ids, "labels": [-100] * prompt + ids[prompt:]})

    def __len__(self):
        return len(self.rows)

    def __getitem__(self, index):
        return self.rows[index]

    @property
    def costs(self):
        """(encoder, LLM) of each sample."""
        return [(0, len(row["input_ids"])) for row in self.rows]


def collate(rows):
    """Padded on the right."""
    most = max(len(row["input_ids"]) for row in rows)

    def pad(name, value):
        return torch.tensor([row[name] + [value] * (most - len(row[name])) for row in rows])

    ids = pad("input_ids", 0)
    lengths = torch.tensor([len(row["input_ids"]) for row in rows])
    mask = (torch.arange(most)[None] < lengths[:, None]).long()
    return {"input_ids": ids, "attention_mask": mask, "labels": pad("labels", -100)}


def reference(samples, global_batches, learning_rate=LEARNING_RATE):
    """(loss of each step, parameters after all) by one process: each sample alone, over all label tokens."""
    model = make_model()
    losses = []
    for indices in global_batches:
        rows = [samples[i] for i in indices]
        tokens = sum(label != -100 for row in rows for label in row["labels"][1:])
        total = 0.0
        for row in rows:
            logits = model(input_ids=torch.tensor([row["input_ids"]])).logits[0, :-1]
            targets = torch.tensor(row["labels"][1:])
            loss = F.cross_entropy(logits.float(), targets, reduction="sum") / tokens
            loss.backward()
            total += float(loss.detach())
        losses.append(total)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter -= learning_rate * parameter.grad
                parameter.grad = None
    return losses, dict(model.named_parameters())


def global_batches(samples, batch_size, num_buckets, num_epochs=1, **options):
    """The samples of each step, as the sampler has them for one process."""
    from dflop import BalancedBatchSampler

    sampler = BalancedBatchSampler(samples.costs, batch_size, num_buckets=num_buckets, **options)
    steps = []
    for epoch in range(num_epochs):
        sampler.set_epoch(epoch)
        batches = list(sampler)
        for start in range(0, len(batches), num_buckets):
            steps.append([i for batch in batches[start : start + num_buckets] for i in batch])
    return steps


def difference(parameters, expected):
    """The largest relative error of a parameter."""
    worst = 0.0
    for name, value in parameters.items():
        value = value.full_tensor() if hasattr(value, "full_tensor") else value
        reference_value = expected[name.removeprefix("module.")]
        gap = float((value.detach() - reference_value).norm() / reference_value.norm().clamp(min=1e-6))
        worst = max(worst, gap)
    return worst
