"""Costs that the tests of the sampler draw, and its batches on all replicas."""

from __future__ import annotations

import random

from dflop import BalancedBatchSampler


def costs(count, seed):
    """Heavy-tailed costs: a third has no encoder work at all."""
    draw = random.Random(seed)
    return [
        (0 if draw.random() < 0.33 else int(draw.lognormvariate(10, 1)), int(draw.lognormvariate(11, 0.8)))
        for _ in range(count)
    ]


def epoch(shapes, num_replicas, **options):
    """Batches of all replicas: [replica][batch]."""
    return [
        list(BalancedBatchSampler(shapes, num_replicas=num_replicas, rank=rank, **options))
        for rank in range(num_replicas)
    ]


def with_giants(count, seed, every=12):
    """Costs and the giants among them: one sample in `every`, longer than ten others."""
    shapes = costs(count, seed)
    giants = set(random.Random(seed).sample(range(count), count // every))
    return [(e, 10**6 + t if i in giants else min(t, 10**6)) for i, (e, t) in enumerate(shapes)], giants
