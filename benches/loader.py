"""Decoding ahead of need: our workers against torch's DataLoader, with the same processor and workers.

Usage: python benches/loader.py OUT.json [--rounds 3] [--workers 1] [--samples 48]

Photographs (JPEG, 640 x 480, tiles of 384 pixels), frames of videos (H.264, 640 x 360, eight of a clip) and
sounds (WAV, ten seconds at 44.1 kHz) are made here and decoded by the adapters that training has. Ways take
turns.

    rate    images, frames, or seconds of sound, a second of CPU time of the process that reads and its
            workers (a busy machine does not change it), and a second of the wall clock
    wait    what a loop of steps waits for its samples: each step sleeps as long as its samples take to
            decode with all workers, times 1.2
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import time
import wave
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from collect import origin
from PIL import Image
from torch.utils.data import DataLoader, Dataset

from dflop.data.arena import Arena
from dflop.data.loader import SampleLoader
from dflop.data.workers import Workers
from dflop.models import load_adapter
from dflop.models.families.qwen2_audio import num_features

STEP = 8
"""Samples of a step."""
SECONDS = 10
"""Of a sound."""
FRAMES = 8
"""Taken of a clip."""


def pictures(folder: Path, count: int) -> list[Path]:
    """Photographs: smooth noise, which a JPEG holds in as many bytes as a picture."""
    random = np.random.default_rng(1)
    paths = [folder / f"{k}.jpg" for k in range(count)]
    for path in paths:
        small = random.integers(0, 256, (60, 80, 3), dtype=np.uint8)
        Image.fromarray(small).resize((640, 480), Image.Resampling.BICUBIC).save(path, quality=90)
    return paths


def clips(folder: Path, count: int) -> list[Path]:
    """Videos of 32 frames in which a picture moves."""
    import av

    random = np.random.default_rng(2)
    paths = [folder / f"{k}.mp4" for k in range(count)]
    for path in paths:
        small = Image.fromarray(random.integers(0, 256, (50, 80, 3), dtype=np.uint8))
        large = np.asarray(small.resize((704, 360), Image.Resampling.BICUBIC))
        with av.open(str(path), "w") as container:
            stream: Any = container.add_stream("libx264", rate=8)
            stream.width, stream.height, stream.pix_fmt = 640, 360, "yuv420p"
            for k in range(32):
                picture = np.ascontiguousarray(large[:, 2 * k : 2 * k + 640])
                container.mux(stream.encode(av.VideoFrame.from_ndarray(picture, format="rgb24")))
            container.mux(stream.encode())
    return paths


def sounds(folder: Path, count: int) -> list[Path]:
    """Noise of ten seconds."""
    random = np.random.default_rng(3)
    paths = [folder / f"{k}.wav" for k in range(count)]
    for path in paths:
        with wave.open(str(path), "wb") as file:
            file.setnchannels(1)
            file.setsampwidth(2)
            file.setframerate(44_100)
            file.writeframes(random.integers(-8000, 8000, 44_100 * SECONDS, dtype=np.int16).tobytes())
    return paths


def vision_dir(folder: Path) -> Path:
    """The demo's model with a processor for tiles of 384 pixels, as LLaVA-OneVision's."""
    command = [sys.executable, "-m", "dflop", "demo-data", str(folder / "demo"), "--samples", "4"]
    subprocess.run(command, check=True, stdout=sys.stderr)
    directory = folder / "demo/model"
    grid = [[384 * rows, 384 * columns] for rows in (1, 2, 3) for columns in (1, 2, 3)]
    for name, change in {
        "config.json": {"image_grid_pinpoints": grid},
        "preprocessor_config.json": {"size": {"height": 384, "width": 384}, "image_grid_pinpoints": grid},
        "video_preprocessor_config.json": {"size": {"height": 384, "width": 384}},
    }.items():
        path = directory / name
        if path.exists():
            fields = json.loads(path.read_text()) | change
            if "vision_config" in fields:
                fields["vision_config"] |= {"image_size": 384, "patch_size": 14}
            path.write_text(json.dumps(fields))
    return directory


def sound_dir(folder: Path) -> Path:
    """Qwen2-Audio's configuration and feature extractor."""
    from transformers import Qwen2AudioConfig, WhisperFeatureExtractor

    directory = folder / "sound"
    Qwen2AudioConfig().save_pretrained(directory)
    WhisperFeatureExtractor(feature_size=128).save_pretrained(directory)
    return directory


def encoded(index: int, path: Path, kind: str, adapter: Any) -> SimpleNamespace:
    """A sample of one medium, as the native module gives it."""
    frames = list(range(0, 32, 32 // FRAMES)) if kind == "video" else []
    num_tiles = int(adapter.pixels(path, kind, frames).shape[0])
    features = num_features(100 * SECONDS) if kind == "audio" else num_tiles
    medium = SimpleNamespace(
        path=str(path), is_local=True, held_bytes=0, kind=kind, frame_indices=frames, num_tiles=num_tiles,
        height=0, width=0, num_features=features, parts=[(1, num_tiles, features)], patches=None,
        first_patches=None, last_patches=None, sampled_fps=None,
    )  # fmt: skip
    mask = [True] * features
    return SimpleNamespace(
        id=str(index), input_ids=[5] * (features + 1), feature_mask=[*mask, False],
        labels=[-100] * features + [7], media=[medium], notice=None,
    )  # fmt: skip


class Samples(Dataset):
    """As `DataLoader` and as our loader want them."""

    def __init__(self, samples: list[SimpleNamespace], adapter: Any) -> None:
        """Of one kind.

        Args:
            samples: As of `encoded`.
            adapter: Decodes.
        """
        self.samples, self.adapter = samples, adapter

    def encode(self, index: int) -> SimpleNamespace:
        """For ours."""
        return self.samples[index]

    def __len__(self) -> int:
        """How many."""
        return len(self.samples)

    def __getitem__(self, index: int) -> torch.Tensor:
        """For `DataLoader`."""
        medium = self.samples[index].media[0]
        return self.adapter.pixels(Path(medium.path), medium.kind, medium.frame_indices)


def ours(samples: Samples, num_workers: int, step_s: float) -> float:
    """Steps with our loader; seconds that they waited."""
    arena = Arena(1 << 30)
    workers = Workers(num_workers, samples.adapter, [arena])
    dataset: Any = samples
    loader = SampleLoader(
        dataset, samples.adapter, cache_bytes=0, num_threads=num_workers, arena=arena, workers=workers
    )
    steps = [
        [(k, None) for k in range(first, min(first + STEP, len(samples)))]
        for first in range(0, len(samples), STEP)
    ]
    waited = 0.0
    loader.prefetch(steps[0], True)
    for step, following in zip(steps, [*steps[1:], []], strict=True):
        loader.prefetch(following, True)
        began = time.monotonic()
        for index, parts in step:
            loader.tiles(index, parts).sum()
        waited += time.monotonic() - began
        time.sleep(step_s)
    loader.close()
    workers.close()
    return waited


def torchs(samples: Samples, num_workers: int, step_s: float) -> float:
    """Steps with torch's; as much ahead, two steps."""
    loader = DataLoader(
        samples,
        batch_size=None,
        num_workers=num_workers,
        prefetch_factor=2 * STEP // num_workers,
        multiprocessing_context="fork",
    )
    waited, arrivals = 0.0, iter(loader)
    for first in range(0, len(samples), STEP):
        began = time.monotonic()
        for _ in range(first, min(first + STEP, len(samples))):
            next(arrivals).sum()
        waited += time.monotonic() - began
        time.sleep(step_s)
    del arrivals, loader
    return waited


def measured(way: Any, samples: Samples, num_workers: int, step_s: float) -> dict[str, float]:
    """A run in a process of its own, whose CPU time is that of it and its workers."""
    read, write = os.pipe()
    process = os.fork()
    if process == 0:
        began = time.monotonic()
        waited = way(samples, num_workers, step_s)
        wall = time.monotonic() - began
        usage = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
        cpu = sum(each.ru_utime + each.ru_stime for each in usage)
        os.write(write, json.dumps({"wait_s": waited, "wall_s": wall, "cpu_s": cpu}).encode())
        os._exit(0)
    _, status = os.waitpid(process, 0)
    if status != 0:
        message = f"{way.__name__} ended with status {status}"
        raise RuntimeError(message)
    return json.loads(os.read(read, 10_000))


def main() -> None:
    """Writes the file and a table."""
    parser = argparse.ArgumentParser()
    parser.add_argument("out", type=Path)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--workers", type=int, default=1)
    parser.add_argument("--samples", type=int, default=48)
    asked = parser.parse_args()
    torch.set_num_threads(1)
    answer: dict[str, Any] = {**origin(), "workers": asked.workers, "samples": asked.samples, "kinds": {}}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        vision, sound = load_adapter(vision_dir(folder)), load_adapter(sound_dir(folder))
        kinds = {
            "image": (pictures, vision, "images", 1),
            "video": (clips, vision, "frames", FRAMES),
            "audio": (sounds, sound, "seconds of sound", SECONDS),
        }
        for kind, (make, adapter, unit, units) in kinds.items():
            (folder / kind).mkdir()
            paths = make(folder / kind, asked.samples)
            samples = Samples([encoded(k, path, kind, adapter) for k, path in enumerate(paths)], adapter)
            began = time.process_time()
            for index in range(STEP):
                _ = samples[index]
            step_s = 1.2 * (time.process_time() - began) / asked.workers
            ways = {"ours": ours, "torch": torchs}
            found: dict[str, list[dict[str, float]]] = {way: [] for way in ways}
            for turn in range(asked.rounds):
                for way in list(ways)[:: 1 if turn % 2 == 0 else -1]:
                    rate = measured(ways[way], samples, asked.workers, 0.0)
                    wait = measured(ways[way], samples, asked.workers, step_s)
                    count = units * len(samples)
                    found[way].append(
                        {
                            "per_cpu_s": count / rate["cpu_s"],
                            "per_s": count / rate["wall_s"],
                            "wait_ratio": wait["wait_s"] / wait["wall_s"],
                        }
                    )
            medians = {
                way: {field: statistics.median(one[field] for one in runs) for field in runs[0]}
                for way, runs in found.items()
            }
            answer["kinds"][kind] = {"unit": unit, "step_s": step_s, "median": medians, "rounds": found}
            for way, median in medians.items():
                print(
                    f"{kind:6} {way:6} {median['per_cpu_s']:8.1f} {unit} a second and core, "
                    f"{median['per_s']:8.1f} a second; waits {100 * median['wait_ratio']:.1f} % of the time"
                )
    asked.out.parent.mkdir(parents=True, exist_ok=True)
    asked.out.write_text(json.dumps(answer, indent=1) + "\n")


if __name__ == "__main__":
    main()
