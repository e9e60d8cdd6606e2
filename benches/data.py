"""Speed of the data profiler against Pillow and Hugging Face, in one run on one machine.

Usage: python benches/data.py TARGET_DIR OUT.json [SECONDS]

Makes JPEG, PNG and MP4 files of real sizes in a temporary folder, reads them from the page cache on one
thread, and writes files a second and ratios. Ratios are what to compare between machines.

What an image costs is found in three ways: by dflop, header and shape rule (`dflop_shape_per_s`); by Pillow's
header and Hugging Face's own count of patches from the size, as others do it who decode nothing
(`pillow_header_and_count_per_s`); and by Hugging Face's whole image processor, which decodes
(`processor_per_s`).
The first is compared with the second: `ratio_to_pillow_header_and_count`.

SECONDS are those that each way gets, 3 unless given.
"""

from __future__ import annotations

import json
import os
import platform
import random
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from collect import origin
from PIL import Image

if TYPE_CHECKING:
    from collections.abc import Callable

NUM_IMAGES = 240
NUM_CLIPS = 60
SECONDS = 3.0
SETTINGS = Path(__file__).parents[1] / "fixtures" / "shapes" / "real.json"
"""Settings of LLaVA-OneVision as published."""


def photo(rng: np.random.Generator, width: int, height: int) -> Image.Image:
    """A picture whose JPEG is about as large as a photograph's: smooth fields and some noise."""
    small = rng.integers(0, 255, (height // 16 + 1, width // 16 + 1, 3), dtype=np.uint8)
    smooth = np.asarray(
        Image.fromarray(small).resize((width, height), Image.Resampling.BICUBIC), dtype=np.int16
    )
    noisy = smooth + rng.integers(-12, 12, (height, width, 1), dtype=np.int16)
    return Image.fromarray(noisy.clip(0, 255).astype(np.uint8))


def make_images(folder: Path, ending: str) -> list[Path]:
    """Images of COCO-like and of document-like sizes."""
    rng = np.random.default_rng(0)
    sizes = [(640, 480), (480, 640), (640, 427), (1024, 768), (1280, 960), (1700, 2200)]
    paths = []
    for index in range(NUM_IMAGES):
        width, height = sizes[index % len(sizes)]
        path = folder / f"{index:04}.{ending}"
        photo(rng, width, height).save(path)
        paths.append(path)
    return paths


def make_clips(folder: Path) -> list[Path]:
    """MP4 clips of 2 to 20 seconds, `moov` at the end as most muxers write it."""
    import av

    paths = []
    draw = random.Random(0)
    for index in range(NUM_CLIPS):
        path = folder / f"{index:04}.mp4"
        with av.open(str(path), "w") as container:
            stream = container.add_stream("mpeg4", rate=24)
            stream.width, stream.height, stream.pix_fmt = 160, 120, "yuv420p"
            picture = np.full((120, 160, 3), index, dtype=np.uint8)
            for _ in range(24 * draw.randint(2, 20)):
                container.mux(stream.encode(av.VideoFrame.from_ndarray(picture)))
            container.mux(stream.encode())
        paths.append(path)
    return paths


def ours(target: Path, paths: list[Path], seconds: float, *, verb: str = "probe") -> float:
    """Files a second by our header readers, with the shape rule for the verb `shapes`, one thread."""
    listing = paths[0].parent / "list.txt"
    listing.write_text("\n".join(map(str, paths)))
    settings = [SETTINGS] if verb == "shapes" else []
    done = subprocess.run(
        [target / "release/examples/speed", verb, str(seconds), listing, *settings],
        check=True,
        capture_output=True,
        text=True,
    )
    return json.loads(done.stdout)["files_per_s"]


def rate(paths: list[Path], seconds: float, act: Callable[[Path], object]) -> float:
    """Files a second by `act`, at least one round and `seconds`."""

    def of_all(paths: list[Path]) -> None:
        for path in paths:
            act(path)

    return batch_rate(paths, seconds, of_all)


def batch_rate(paths: list[Path], seconds: float, act: Callable[[list[Path]], object]) -> float:
    """Files a second by `act`, which takes all of them at once; at least one round and `seconds`."""
    begin, count = time.perf_counter(), 0
    while time.perf_counter() - begin < seconds:
        act(paths)
        count += len(paths)
    return count / (time.perf_counter() - begin)


def header(path: Path) -> tuple[int, int]:
    """Size by Pillow, without pixels."""
    with Image.open(path) as image:
        return image.size


def decode(path: Path) -> None:
    """Pixels by Pillow."""
    with Image.open(path) as image:
        image.load()


def processor() -> Callable[[Path], object]:
    """LLaVA-OneVision's image processor with its published settings."""
    from transformers import LlavaOnevisionImageProcessorPil

    process = LlavaOnevisionImageProcessorPil()

    def act(path: Path) -> object:
        with Image.open(path) as image:
            return process(image.convert("RGB"), return_tensors="np")

    return act


def counter() -> Callable[[list[Path]], list[int]]:
    """Feature tokens of images by Pillow's header and Hugging Face's own count; nothing is decoded."""
    from tokenizers import Tokenizer, models
    from transformers import (
        LlavaOnevisionImageProcessorPil,
        LlavaOnevisionProcessor,
        LlavaOnevisionVideoProcessor,
        PreTrainedTokenizerFast,
    )

    words = Tokenizer(models.WordLevel({"<unk>": 0, "<image>": 1, "<video>": 2}, unk_token="<unk>"))
    processor = LlavaOnevisionProcessor(
        LlavaOnevisionImageProcessorPil(),
        PreTrainedTokenizerFast(tokenizer_object=words, unk_token="<unk>"),
        LlavaOnevisionVideoProcessor(),
        num_image_tokens=729,
        vision_feature_select_strategy="full",
    )

    def act(paths: list[Path]) -> list[int]:
        # (height, width); the orientation that EXIF may give is left out, which is to its favour.
        sizes = [header(path)[::-1] for path in paths]
        return processor._get_num_multimodal_tokens(image_sizes=sizes)["num_image_tokens"]

    return act


def check_counts(paths: list[Path], count: Callable[[list[Path]], list[int]]) -> None:
    """Ends the run where our shape rule and Hugging Face's count differ for one of these files."""
    from dflop._native import testing

    settings = json.loads(SETTINGS.read_text())
    files = json.dumps(settings["config"]), json.dumps(settings["preprocessor"]), "{}"
    for path, theirs in zip(paths, count(paths), strict=True):
        width, height = header(path)
        shape = testing.media_shape(*files, "image", height=height, width=width)
        if shape.feature_tokens != theirs:
            sys.exit(
                f"error: {path.name}: {shape.feature_tokens} feature tokens, Hugging Face counts {theirs}"
            )


def container(path: Path) -> int:
    """Frames by PyAV's headers."""
    import av

    with av.open(str(path)) as clip:
        return clip.streams.video[0].frames


def text_lines() -> list[str]:
    """Prose and code of Python's own library, the same on every machine with the same Python."""
    import sysconfig

    library = Path(sysconfig.get_paths()["stdlib"])
    files = sorted(p for p in library.glob("*.py") if p.stat().st_size > 2_000)
    return [line.strip() for p in files for line in p.read_text(errors="ignore").splitlines() if line.strip()]


def make_conversations(folder: Path) -> Path:
    """A model directory with a tokenizer of real size, and 4,000 conversations of some 800 characters."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    subprocess.run([Path(sys.executable).parent / "dflop", "demo-data", folder, "--samples", "8"], check=True)
    lines = text_lines()
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    special = ["<image>", "<video>", "<|im_start|>", "<|im_end|>"]
    trainer = trainers.BpeTrainer(
        vocab_size=32_000,
        special_tokens=special,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(lines, trainer)
    tokenizer.save(str(folder / "model" / "tokenizer.json"))
    path = folder / "model" / "config.json"
    config = json.loads(path.read_text())
    config["text_config"]["vocab_size"] = tokenizer.get_vocab_size()
    config["image_token_index"], config["video_token_index"] = 0, 1
    path.write_text(json.dumps(config))
    draw = random.Random(0)
    records = folder / "text.jsonl"
    with records.open("w") as out:
        for index in range(4_000):
            turns = [
                {"from": ("human", "gpt")[turn % 2], "value": " ".join(draw.choices(lines, k=3))}
                for turn in range(2 * draw.randint(1, 4))
            ]
            out.write(json.dumps({"id": index, "conversations": turns}) + "\n")
    return records


def tokens(target: Path, folder: Path) -> dict[str, float]:
    """Seconds of the tokenizer alone, with templates and labels, and of the whole profile."""
    records = make_conversations(folder)
    speed = target / "release/examples/speed"
    done = subprocess.run(
        [speed, "tokens", folder / "model", records], check=True, capture_output=True, text=True
    )
    row = json.loads(done.stdout)
    row["overhead_of_template"] = row["with_template_s"] / row["tokenizer_s"] - 1
    row["overhead_of_profile"] = row["profile_s"] / row["tokenizer_s"] - 1
    return row


def main(target: Path, out: Path, seconds: float = SECONDS) -> None:
    """Measures and writes."""
    os.environ["OMP_NUM_THREADS"] = "1"
    import torch

    torch.set_num_threads(1)
    result: dict[str, object] = {
        "bench": "data",
        **origin(),
        "python": platform.python_version(),
        "threads": 1,
    }
    count = counter()
    with tempfile.TemporaryDirectory() as name:
        for ending in ("jpg", "png"):
            folder = Path(name) / ending
            folder.mkdir()
            paths = make_images(folder, ending)
            row = {
                "num_files": len(paths),
                "mean_bytes": round(sum(p.stat().st_size for p in paths) / len(paths)),
                "dflop_per_s": ours(target, paths, seconds),
                "dflop_shape_per_s": ours(target, paths, seconds, verb="shapes"),
                "pillow_header_per_s": rate(paths, seconds, header),
                "pillow_header_and_count_per_s": batch_rate(paths, seconds, count),
                "pillow_decode_per_s": rate(paths, seconds, decode),
                "processor_per_s": rate(paths[:6], seconds, processor()),
            }
            check_counts(paths[:6], count)
            # Each against what does as much: a header against a header, a cost against a cost.
            row["ratio_to_pillow_header"] = row["dflop_per_s"] / row["pillow_header_per_s"]
            for other in ("pillow_header_and_count", "pillow_decode", "processor"):
                row[f"ratio_to_{other}"] = row["dflop_shape_per_s"] / row[f"{other}_per_s"]
            result[ending] = row
        folder = Path(name) / "mp4"
        folder.mkdir()
        paths = make_clips(folder)
        row = {
            "num_files": len(paths),
            "dflop_per_s": ours(target, paths, seconds),
            "pyav_per_s": rate(paths, seconds, container),
        }
        row["ratio_to_pyav"] = row["dflop_per_s"] / row["pyav_per_s"]
        result["mp4"] = row
        result["tokens"] = tokens(target, Path(name) / "text")
    out.parent.mkdir(parents=True, exist_ok=True)
    out.write_text(json.dumps(result, indent=1) + "\n")
    print(json.dumps(result, indent=1))


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]), *map(float, sys.argv[3:4]))
