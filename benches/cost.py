"""Error of the cost and memory models on shapes that were not measured.

Usage: python benches/cost.py OUT.json [--profile FILE] [--model DIR --layers 8] [--device cuda --dtype D]

A model is profiled (`dflop profile model`), then whole stages of it run forward and backward on random packs
of mixed lengths and random numbers of tiles, by the code that trains (`runtime/stage.py`), in interleaved
rounds. Medians are held against what `CostModel` predicts from the profile; tensor bytes, counted over one
run, against the memory model.

Without `--model`: LLaVA-OneVision at a middle size, made from the demo's, on one thread of a CPU. A model is
judged by a profile that is there (`--profile`), within the sizes it measured; of its LLM backbone
`--layers` are built, so that all stages fit one device.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import random
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

VISION = {"hidden_size": 256, "intermediate_size": 688, "num_hidden_layers": 4, "num_attention_heads": 4}
TEXT = {
    "hidden_size": 256, "intermediate_size": 768, "num_hidden_layers": 4, "num_attention_heads": 4,
    "num_key_value_heads": 2,
}  # fmt: skip
NUM_TILES, NUM_PACKS = 6, 6
MIN_ROUNDS, MAX_ROUNDS = 5, 25


@dataclass(frozen=True)
class Shape:
    """One held-out microbatch on one stage."""

    module: str
    """`encoder`, or a stage of the LLM backbone: `first`, `middle`, `last`, `whole`."""
    tiles: int
    lengths: tuple[int, ...]
    """LLM tokens of each sample."""
    labels: int
    features: int
    layers: tuple[int, int]
    """First layer and number of layers; of the encoder none."""


def dflop(*arguments: object, folder: Path) -> None:
    """Runs the command line of this environment."""
    subprocess.run(
        [sys.executable, "-m", "dflop", *map(str, arguments)],
        cwd=folder,
        check=True,
        stdout=subprocess.DEVNULL,
    )


def make_model(folder: Path, device: str, dtype: str) -> None:
    """Demo data with its configuration; its model at a middle size."""
    dflop("demo-data", folder, "--samples", 48, folder=folder)
    config = folder / "dflop.yaml"
    text = (
        config.read_text()
        .replace("dtype: float32", f"dtype: {dtype}")
        .replace("device: cpu", f"device: {device}")
    )
    config.write_text(text)
    path = folder / "model" / "config.json"
    settings = json.loads(path.read_text())
    settings["vision_config"].update(VISION)
    settings["text_config"].update(TEXT)
    path.write_text(json.dumps(settings, indent=1))


def request_of(
    folder: Path, model: Path, layers: int, profile: Path, device: str, dtype: str
) -> dict[str, Any]:
    """A request for `measure`: the sizes that `profile` reaches, and the model with fewer layers."""
    settings = json.loads((model / "config.json").read_text())
    text = settings.get("text_config", settings)
    text["num_hidden_layers"] = min(layers, text["num_hidden_layers"])
    (folder / "model").mkdir()
    (folder / "model" / "config.json").write_text(json.dumps(settings, indent=1))
    modules = json.loads(profile.read_text())["modules"]

    def largest(name: str, part: str = "linear") -> int:
        return modules[name][part]["points"][-1]["size"]

    return {
        "model_dir": str(folder / "model"),
        "out": str(profile.resolve()),
        "device": device,
        "dtype": dtype,
        "environment": {"PYTORCH_ALLOC_CONF": "expandable_segments:True"} if device == "cuda" else {},
        "max_encoder_tokens": largest("encoder_layer"),
        "max_llm_tokens": largest("llm_layer"),
        "max_segment_tokens": largest("llm_layer", "attention"),
        "max_label_tokens": largest("llm_head"),
    }


def profile_request(folder: Path) -> dict[str, Any]:
    """What `dflop profile model` would measure here, and with which environment; nothing works beside it."""
    from dflop._native import run_cli

    config = folder / "dflop.yaml"
    status, request = run_cli(["dflop", "profile", "model", "-c", str(config), "--recompute", "none"])
    if request is None:
        sys.exit(status)
    arguments = request["arguments"]
    return {**arguments, "num_neighbours": 0}


def draw_shapes(request: dict[str, Any], tokens_per_tile: int, num_layers: int) -> list[Shape]:
    """Held-out shapes within the measured ranges: outside, the model says itself that it extrapolates."""
    draw = random.Random(1)
    most_tiles = max(request["max_encoder_tokens"] // tokens_per_tile, 1)
    shapes = [
        Shape("encoder", tiles, (), 0, 0, (0, 0))
        for tiles in draw.sample(range(1, most_tiles + 1), min(NUM_TILES, most_tiles))
    ]
    half = max(num_layers // 2, 1)
    stages = {
        "first": (0, half),
        "middle": (1, max(num_layers - 2, 1)),
        "last": (num_layers - half, half),
        "whole": (0, num_layers),
    }
    if num_layers < 3:
        del stages["middle"]
    for _ in range(NUM_PACKS):
        for module, layers in stages.items():
            lengths = draw_pack(draw, request)
            labels = sum(max(1, int(n * draw.uniform(0.05, 0.5))) for n in lengths)
            labels = min(labels, request["max_label_tokens"], sum(lengths) - len(lengths))
            features = int(sum(lengths) * draw.uniform(0.1, 0.8)) if layers[0] == 0 else 0
            shapes.append(Shape(module, 0, lengths, labels, features, layers))
    return shapes


def draw_pack(draw: random.Random, request: dict[str, Any]) -> tuple[int, ...]:
    """Lengths of samples, up to the longest of the data; the logarithm of their sum is drawn evenly."""
    most, longest = request["max_llm_tokens"], request["max_segment_tokens"]
    target = 64 * (0.9 * most / 64) ** draw.random()
    lengths: list[int] = []
    while sum(lengths) < target:
        length = int(draw.lognormvariate(0, 0.9) * longest / 6)
        lengths.append(max(2, min(length, longest, most - sum(lengths))))
        if most - sum(lengths) < 2:
            break
    return tuple(lengths)


class Bench:
    """The stages of one model, ready to run."""

    def __init__(self, request: dict[str, Any]) -> None:
        """Builds nothing yet."""
        import torch

        from dflop.models import load_adapter

        self.torch = torch
        self.request = request
        self.device = torch.device(request["device"])
        self.dtype = getattr(torch, request["dtype"])
        self.adapter: Any = load_adapter(request["model_dir"])
        self.modules: dict[tuple[int, int], Any] = {}
        self.generator = torch.Generator().manual_seed(0)

    def module(self, layers: tuple[int, int]) -> Any:
        """The encoder for no layers, else a stage; gradients are in place, as in training."""
        if layers not in self.modules:
            from dflop.models.wide_gradients import sum_gradients, used_once

            torch = self.torch
            place = (self.device, self.dtype, None)
            made = (
                self.adapter.build_llm_stage(*layers, *place)
                if layers[1]
                else self.adapter.build_encoder(*place)
            )
            once = used_once([made])
            for parameter in made.train().parameters():
                with torch.no_grad():
                    # Values of no account, made where they are used: billions of them.
                    parameter.fill_(1.0) if parameter.dim() < 2 else parameter.normal_(0.0, 0.02)
                # As in training.
                total = torch.zeros_like(parameter, dtype=torch.float32)
                sum_gradients(parameter, total, is_used_once=parameter in once)
            self.modules[layers] = made
        return self.modules[layers]

    def batch(self, shape: Shape) -> Any:
        """The microbatch, in the memory of the host, as training has it when an action starts."""
        from dflop.models.adapter import EncoderInput, LlmInput

        torch = self.torch
        if not shape.layers[1]:
            shape_N = self.adapter.input_shape
            pixels = torch.randn(shape.tiles, *shape_N, generator=self.generator).to(self.dtype)
            return self.pinned(EncoderInput(pixels, self.adapter.example_media(shape.tiles)))
        total = sum(shape.lengths)
        places = torch.randperm(total, generator=self.generator)
        features, targets = torch.zeros(total, dtype=torch.bool), torch.full((total,), -100)
        features[places[: shape.features]] = True
        ids = torch.randint(0, self.adapter.vocab_size, (total,), generator=self.generator)
        targets[places[-shape.labels :]] = ids[: shape.labels]
        ends = torch.tensor([0, *shape.lengths]).cumsum(0).to(torch.int32)
        positions = torch.cat([torch.arange(n) for n in shape.lengths])
        return self.pinned(LlmInput(ids, features, positions, ends, targets))

    def pinned(self, batch: Any) -> Any:
        """The batch in memory from which a GPU copies while the host goes on."""
        from dflop.data.pin import pinned

        return pinned(batch) if self.device.type == "cuda" else batch

    def steps(self, shape: Shape) -> list[Any]:
        """Forward and backward of the microbatch, as a rank runs them."""
        from dflop.runtime.stage import Stage

        torch, module, batch = self.torch, self.module(shape.layers), self.batch(shape)
        is_last = shape.layers[1] > 0 and sum(shape.layers) == self.adapter.num_llm_layers
        stage = Stage(module, is_last, self.device)
        width, incoming = self.adapter.hidden_size, None
        if shape.layers[1]:
            rows = shape.features if shape.layers[0] == 0 else sum(shape.lengths)
            incoming = torch.randn(rows, width, generator=self.generator).to(self.device, self.dtype)

        def forward(_: Any) -> Any:
            if incoming is not None:
                # In training each microbatch brings its own.
                incoming.grad = None
            return stage.forward(0, batch, incoming, max(shape.labels, 1))

        def backward(outgoing: Any) -> Any:
            return stage.backward(0, None if is_last else gradient_of(outgoing))

        gradients: dict[int, Any] = {}

        def gradient_of(outgoing: Any) -> Any:
            # What the next stage would send is there before the backward starts.
            if len(outgoing) not in gradients:
                gradients[len(outgoing)] = torch.randn_like(outgoing)
            return gradients[len(outgoing)]

        return [forward, backward]


def measure_times(bench: Bench, shapes: list[Shape], budget_s: float) -> list[list[Any]]:
    """Timings of each shape, in rounds over all of them."""
    from dflop.profiling.timer import timer_of

    timer, order = timer_of(bench.device), random.Random(2)
    steps = [bench.steps(shape) for shape in shapes]
    for one in steps:
        timer(one)
    timings: list[list[Any]] = [[] for _ in shapes]
    start = time.monotonic()
    for round_ in range(MAX_ROUNDS):
        if round_ >= MIN_ROUNDS and time.monotonic() - start > budget_s:
            break
        for index in order.sample(range(len(shapes)), len(shapes)):
            timings[index].append(timer(steps[index]))
    return timings


def compare_times(bench: Bench, model: Any, shapes: list[Shape], budget_s: float) -> list[dict[str, Any]]:
    """Predicted and measured forward and backward of each shape."""
    rows = []
    for shape, timings in zip(shapes, measure_times(bench, shapes, budget_s), strict=True):
        *predicted, extrapolated = predict(bench, model, shape)
        for phase, position in (("forward", 0), ("backward", 1)):
            measured = statistics.median(timing.phases_ns[position] for timing in timings)
            rows.append({
                "module": shape.module, "phase": phase, "tiles": shape.tiles, "lengths": shape.lengths,
                "labels": shape.labels, "layers": shape.layers[1], "measured_ns": round(measured),
                "predicted_ns": predicted[position], "extrapolated": extrapolated,
                "error": predicted[position] / measured - 1, "repeats": len(timings),
            })  # fmt: skip
    return rows


def predict(bench: Bench, model: Any, shape: Shape) -> tuple[int, int, bool]:
    """Forward and backward by the cost model, in nanoseconds, and whether it left its measured range."""
    if not shape.layers[1]:
        return model.encoder([(shape.tiles, bench.adapter.encoder_tokens_per_tile)])
    first, count = shape.layers
    ends = (first == 0, first + count == bench.adapter.num_llm_layers)
    return model.llm_stage(list(shape.lengths), shape.labels, count, *ends)


def compare_memory(bench: Bench, model: Any, shapes: list[Shape]) -> list[dict[str, Any]]:
    """Predicted and counted tensor bytes of a rank that runs one forward and one backward of each shape."""
    from dflop.models.byte_counter import ByteCounter

    rows = []
    for shape in shapes:
        # Parameters and their gradients are the fixed part.
        bench.module(shape.layers)
        with ByteCounter(bench.device) as counter:
            counter.phase("made")
            forward, backward = bench.steps(shape)
            counter.phase("forward")
            outgoing = forward(None)
            counter.phase("backward")
            backward(outgoing)
        if not shape.layers[1]:
            segments = [(shape.tiles, bench.adapter.encoder_tokens_per_tile)]
            features = sum(grid.num_features for grid in bench.adapter.example_media(shape.tiles))
            predicted, fixed = model.encoder_peak_bytes(segments, features)
        else:
            first, count = shape.layers
            layers = (count, first == 0, first + count == bench.adapter.num_llm_layers)
            predicted, fixed = model.stage_peak_bytes(
                list(shape.lengths), shape.labels, shape.features, layers
            )
        measured = fixed + counter.peak_bytes
        rows.append({
            "module": shape.module, "tiles": shape.tiles, "lengths": shape.lengths, "labels": shape.labels,
            "features": shape.features, "layers": shape.layers[1], "fixed_bytes": fixed,
            "measured_bytes": measured, "predicted_bytes": predicted, "error": predicted / measured - 1,
        })  # fmt: skip
        # Freed while the next shape is counted, they would be taken off its bytes.
        del forward, backward, outgoing
    return rows


def spread(errors: list[float]) -> dict[str, Any]:
    """Median and 95th percentile of the sizes of the errors, and their mean with its sign."""
    sizes = sorted(abs(error) for error in errors)
    return {
        "median": statistics.median(sizes),
        "p95": sizes[min(len(sizes) - 1, int(0.95 * len(sizes)))],
        "mean_signed": statistics.fmean(errors),
        "points": len(sizes),
    }


def summarise(times: list[dict[str, Any]], memory: list[dict[str, Any]]) -> dict[str, Any]:
    """The numbers that are published, whole and by module and phase."""
    whole = spread([row["error"] for row in times])
    keys = sorted({(row["module"], row["phase"]) for row in times})
    return {
        "time_error_median": whole["median"],
        "time_error_p95": whole["p95"],
        "time_error_mean_signed": whole["mean_signed"],
        "memory_overprediction_max": max(row["error"] for row in memory),
        "memory_underpredicted": sum(row["error"] < 0 for row in memory),
        "memory_points": len(memory),
        "points": whole["points"],
        "extrapolated": sum(row["extrapolated"] for row in times),
        "by_module": {
            f"{module} {phase}": spread(
                [r["error"] for r in times if (r["module"], r["phase"]) == (module, phase)]
            )
            for module, phase in keys
        },
    }


def hardware(profile: dict[str, Any]) -> dict[str, Any]:
    """What this was measured on."""
    return {
        "device": profile["device"]["name"],
        "dtype": profile["device"]["dtype"],
        "torch": profile["device"]["torch"],
        "cores": os.cpu_count(),
        "load": os.getloadavg()[0],
        "system": platform.platform(),
    }


def measure(folder: Path, out: Path, budget_s: float) -> None:
    """Compares in this process, whose memory and threads are set as in training; writes and prints."""
    import torch

    from dflop._native.testing import CostModel
    from dflop.profiling.memory import touch_heap

    request = json.loads((folder / "request.json").read_text())
    if request["device"] == "cpu":
        torch.set_num_threads(1)
        touch_heap(512 << 20)
    bench, model = Bench(request), CostModel.read(request["out"])
    profile = json.loads(Path(request["out"]).read_text())
    shapes = draw_shapes(request, bench.adapter.encoder_tokens_per_tile, bench.adapter.num_llm_layers)
    memory = compare_memory(bench, model, shapes)
    times = compare_times(bench, model, shapes, budget_s)
    commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True).stdout
    result = {
        "bench": "cost",
        "commit": commit.strip() or None,
        "family": profile["family"],
        "hardware": hardware(profile),
        **summarise(times, memory),
        "times": times,
        "memory": memory,
    }
    out.parent.mkdir(parents=True, exist_ok=True)
    out.write_text(json.dumps(result, indent=1) + "\n")
    for name, row in result["by_module"].items():
        numbers = f"{row['median']:>8.1%}{row['p95']:>8.1%}{row['mean_signed']:>+8.1%}{row['points']:>5}"
        print(f"{name:<20}{numbers}")
    print(
        f"time: median {result['time_error_median']:.1%}, p95 {result['time_error_p95']:.1%}; memory: "
        f"at most {result['memory_overprediction_max']:+.1%}, {result['memory_underpredicted']} under, "
        f"of {len(memory)}"
    )
    print(f"wrote {out}", file=sys.stderr)


def main() -> int:
    """Profiles, and compares in a process of its own.

    Returns:
        The exit status.
    """
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument(
        "--model", type=Path, help="folder with a config.json of a family that trains in tiles"
    )
    parser.add_argument("--layers", type=int, default=8, help="of the LLM backbone of --model, at most")
    parser.add_argument("--device", default="cpu", choices=["cpu", "cuda"])
    parser.add_argument("--dtype", default="float32", choices=["float32", "bfloat16"])
    parser.add_argument("--profile", type=Path, help="model profile to judge, instead of one made here")
    parser.add_argument("--profile-seconds", type=float, default=120.0)
    parser.add_argument("--measure-seconds", type=float, default=90.0)
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    asked = parser.parse_args()
    if asked.folder is not None:
        measure(asked.folder, asked.out, asked.measure_seconds)
        return 0
    from dflop.profiling.launch import launch

    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        if asked.model is not None:
            if asked.profile is None:
                parser.error("--model needs --profile")
            place = (asked.profile, asked.device, asked.dtype)
            request = request_of(folder, asked.model, asked.layers, *place)
        else:
            make_model(folder, asked.device, asked.dtype)
            dflop("profile", "data", folder=folder)
            request = {**profile_request(folder), "budget_s": asked.profile_seconds}
            if asked.profile is not None:
                request["out"] = str(asked.profile.resolve())
            elif status := launch(request):
                return status
        (folder / "request.json").write_text(json.dumps(request))
        if asked.model is not None and request["environment"].items() <= os.environ.items():
            # This process has the environment already: another would load everything once more.
            measure(folder, asked.out, asked.measure_seconds)
            return 0
        command = [sys.executable, __file__, str(asked.out), "--folder", name]
        command += ["--measure-seconds", str(asked.measure_seconds)]
        return subprocess.run(command, env={**request["environment"], **os.environ}).returncode


if __name__ == "__main__":
    sys.exit(main())
