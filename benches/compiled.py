"""Forward and backward of whole microbatches by compiled layers and by uncompiled ones, in turns.

Usage: python benches/compiled.py OUT.json [--rounds 10] [--device cpu] [--dtype float32]

Two layers of each side of a LLaVA-OneVision 0.5B (widths of its config; tiles and vocabulary of the demo's
model), random values. A step is one microbatch through the encoder and one through the LLM backbone, with its
embedding and head. Each round runs all shapes by both, in an order of its own; the first rounds, which
compile, are not timed. A ratio divides the time without compiling by the time with it, with its 95 % interval
over the rounds: above 1, compiling gains. On a CPU it is the CPU time of the process, which other programs
change less than the wall clock.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import random
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import cost
from collect import origin
from ratio import ratio_of

VISION = {"hidden_size": 1152, "intermediate_size": 4304, "num_hidden_layers": 2, "num_attention_heads": 16}
TEXT = {
    "hidden_size": 896, "intermediate_size": 4864, "num_hidden_layers": 2, "num_attention_heads": 14,
    "num_key_value_heads": 2,
}  # fmt: skip
NUM_WARM = 2
WHOLE = (0, TEXT["num_hidden_layers"])
ENCODERS = [cost.Shape("encoder", tiles, (), 0, 0, (0, 0)) for tiles in (3, 6)]
LLMS = [
    cost.Shape("llm", 0, (70, 33, 25), 40, 60, WHOLE),
    cost.Shape("llm", 0, (310, 200), 120, 250, WHOLE),
    cost.Shape("llm", 0, (90, 80, 70, 60, 50, 40), 100, 200, WHOLE),
]


def prepared(request: dict[str, Any], *, compiles: bool) -> dict[cost.Shape, list[Any]]:
    """Forward and backward of each shape."""
    from dflop.models.compiled import compile_layers
    from dflop.parallel.shard import layers_of

    bench = cost.Bench(request)
    for layers in ((0, 0), WHOLE):
        piece = bench.module(layers)
        if compiles:
            compile_layers(piece, layers_of(piece))
    return {shape: bench.steps(shape) for shape in (*ENCODERS, *LLMS)}


def spent_ms(steps: list[Any], device: str) -> float:
    """Time of one run: CPU time on a CPU, else wall clock until the device has ended."""
    import torch

    now = time.process_time if device == "cpu" else time.perf_counter
    start, result = now(), None
    for step in steps:
        result = step(result)
    if device == "cuda":
        torch.cuda.synchronize()
    return 1e3 * (now() - start)


def measure(request: dict[str, Any], rounds: int) -> dict[str, Any]:
    """Times of all rounds, and what they say."""
    from torch._dynamo.utils import counters

    device = request["device"]
    ways = {name: prepared(request, compiles=name == "layers") for name in ("none", "layers")}
    found: dict[Any, list[float]] = {(name, shape): [] for name, own in ways.items() for shape in own}
    draw = random.Random(0)
    begun, first_s, num_graphs = time.perf_counter(), 0.0, 0
    for turn in range(NUM_WARM + rounds):
        if turn == NUM_WARM:
            first_s, num_graphs = time.perf_counter() - begun, counters["stats"]["unique_graphs"]
        for name, shape in draw.sample(list(found), len(found)):
            spent = spent_ms(ways[name][shape], device)
            if turn >= NUM_WARM:
                found[name, shape].append(spent)

    def of(shapes: list[cost.Shape]) -> dict[str, Any]:
        sums = {n: [math.fsum(r) for r in zip(*(found[n, s] for s in shapes), strict=True)] for n in ways}
        middle, low, high = ratio_of(sums["none"], sums["layers"])
        times = {f"{name}_ms": round(statistics.median(each), 1) for name, each in sums.items()}
        return {**times, "ratio": round(middle, 3), "interval": [round(low, 3), round(high, 3)]}

    return {
        "all": of([*ENCODERS, *LLMS]),
        "encoder": of(ENCODERS),
        "llm": of(LLMS),
        "rounds": rounds,
        "warm_up_s": round(first_s, 1),
        "graphs": num_graphs,
        "graphs_later": counters["stats"]["unique_graphs"] - num_graphs,
    }


def main() -> int:
    """Runs the benchmark."""
    parser = argparse.ArgumentParser()
    parser.add_argument("out", type=Path)
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--dtype", default="float32")
    asked = parser.parse_args()
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    import torch

    torch.set_num_threads(1)
    cost.VISION, cost.TEXT = VISION, TEXT
    with tempfile.TemporaryDirectory() as folder:
        cost.make_model(Path(folder), asked.device, asked.dtype)
        request = {"model_dir": Path(folder) / "model", "device": asked.device, "dtype": asked.dtype}
        found = {"origin": origin(), "dtype": asked.dtype, **measure(request, asked.rounds)}
    asked.out.parent.mkdir(parents=True, exist_ok=True)
    asked.out.write_text(json.dumps(found, indent=1) + "\n")
    print(json.dumps(found["all"]))
    return 0


if __name__ == "__main__":
    sys.exit(main())
