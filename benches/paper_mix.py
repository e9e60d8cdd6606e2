"""A data set as mixed as the paper's, of media that are headers alone: nothing of it is decoded to plan.

    draw(kind) --sizes and lengths of real data--> PNG, AVI and WAV headers + conversations --> mixture.yaml

The paper (arXiv 2603.25120) trains on LLaVA-Wild 28k, AI2D 18k and InfographicVQA 19k (one image),
M4-Instruct 60k (several images) and LLaVA-Video 60k. Those sets are not at hand, so each is stood in for:

| the paper's | sizes here | texts here |
|---|---|---|
| LLaVA-Wild | COCO val2017 | LLaVA-1.5 mix |
| AI2D | TextVQA | LLaVA-1.5 mix |
| InfographicVQA | assumed: pages 800 to 1,700 wide, 1.3 to 4 times as tall | LLaVA-1.5 mix |
| M4-Instruct | COCO val2017, 2 to 5 of them as in GAOKAO-MM | LLaVA-1.5 mix |
| LLaVA-Video | ActivityNet Captions: a frame a second, 32 at most | its captions |
| audio (not named there) | LibriSpeech dev-clean | its transcripts |

All but the assumed pages are quantiles of real data (`crates/data/demo/tables.json`, and LIBRISPEECH below).
"""

from __future__ import annotations

import json
import random
import struct
import zlib
from pathlib import Path

TABLES = Path(__file__).parents[1] / "crates" / "data" / "demo" / "tables.json"
SHARES = {"coco": 28, "textvqa": 18, "pages": 19, "several": 60, "video": 60}
"""Thousands of samples of the paper's five sets."""
FRAMES_MAX = 32
RATE_HZ = 16_000
LIBRISPEECH = [
    (2150, 4), (2550, 5), (2850, 3), (3200, 10), (3550, 9), (3945, 11), (4355, 13), (4740, 11), (5155, 15),
    (5640, 12), (6210, 17), (6770, 17), (7400, 23), (8070, 23), (8790, 25), (9645, 31), (10610, 30),
    (12060, 29), (14680, 33), (19380, 55),
]  # fmt: skip
"""Milliseconds and words of LibriSpeech dev-clean (2,703 sounds, CC BY 4.0) at 20 quantiles of duration."""
FILES_A_KIND = 256
"""Media that samples of a kind share: a size says all there is to know of a file."""


def png(path: Path, width: int, height: int) -> None:
    """An image of that size without its pixels."""

    def chunk(name: bytes, body: bytes) -> bytes:
        return struct.pack(">I", len(body)) + name + body + struct.pack(">I", zlib.crc32(name + body))

    header = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    path.write_bytes(
        b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", b"") + chunk(b"IEND", b"")
    )


def avi(path: Path, frames: int) -> None:
    """A video of 640 x 360 and so many frames, one a second, without them."""

    def chunk(name: bytes, body: bytes) -> bytes:
        return name + struct.pack("<I", len(body)) + body

    stream = b"vidsMJPG" + struct.pack("<12I", 0, 0, 0, 1, 1, 0, frames, 0, 0, 0, 0, 0)
    picture = struct.pack("<IiiHH6I", 40, 640, 360, 1, 24, 0, 0, 0, 0, 0, 0)
    streams = chunk(b"LIST", b"strl" + chunk(b"strh", stream) + chunk(b"strf", picture))
    body = b"AVI " + chunk(b"LIST", b"hdrl" + chunk(b"avih", bytes(56)) + streams)
    path.write_bytes(chunk(b"RIFF", body))


def wav(path: Path, duration_ms: int) -> None:
    """A sound of that length whose samples are a hole in the file."""
    count = duration_ms * RATE_HZ // 1000
    form = struct.pack("<HHIIHH", 6, 1, RATE_HZ, RATE_HZ, 1, 8)
    header = b"RIFF" + struct.pack("<I", 36 + count) + b"WAVEfmt " + struct.pack("<I", 16) + form
    with path.open("wb") as out:
        out.write(header + b"data" + struct.pack("<I", count))
        out.truncate(out.tell() + count)


class Mix:
    """A writer of data sets with these shares."""

    def __init__(self, directory: Path, num_samples: int, seed: int) -> None:
        """For a directory that is made here."""
        self.directory, self.num_samples = directory, num_samples
        self.random = random.Random(seed)
        self.tables = json.loads(TABLES.read_text())
        (directory / "media").mkdir(parents=True)

    def write(self, *, audio: bool) -> Path:
        """Sounds, or the paper's mix of images and videos; returns the mixture to name in `dflop.yaml`."""
        files = self.sounds() if audio else self.pictures()
        shares = {"sound": 1} if audio else SHARES
        kinds = self.random.choices(list(shares), list(shares.values()), k=self.num_samples)
        with (self.directory / "samples.jsonl").open("w") as out:
            out.writelines(json.dumps(self.sample(kind, files)) + "\n" for kind in kinds)
        mixture = self.directory / "mixture.yaml"
        mixture.write_text(
            "datasets:\n  - {json_path: samples.jsonl, sampling_strategy: all, media_root: media}\n"
        )
        return mixture

    def pictures(self) -> dict[str, list[str]]:
        """Names of images and videos by kind."""
        files: dict[str, list[str]] = {kind: [] for kind in ("coco", "textvqa", "pages", "video")}
        for at in range(FILES_A_KIND):
            for kind in ("coco", "textvqa", "pages"):
                if kind == "pages":
                    width = self.random.randint(800, 1_700)
                    height = int(width * self.random.uniform(1.3, 4.0))
                else:
                    width, height = self.row(f"{kind}_width_height")
                files[kind].append(f"{kind}_{at}.png")
                png(self.directory / "media" / files[kind][-1], width, height)
            (duration_ms,) = self.row("activitynet_duration_ms")
            files["video"].append(f"video_{at}.avi")
            avi(self.directory / "media" / files["video"][-1], min(max(duration_ms // 1000, 1), FRAMES_MAX))
        return files

    def sounds(self) -> dict[str, list[str]]:
        """Names of sounds."""
        for at, (duration_ms, _) in enumerate(LIBRISPEECH):
            wav(self.directory / "media" / f"sound_{at}.wav", duration_ms)
        return {"sound": [f"sound_{at}.wav" for at in range(len(LIBRISPEECH))]}

    def sample(self, kind: str, files: dict[str, list[str]]) -> dict[str, object]:
        """A record in LLaVA's form."""
        if kind == "sound":
            at = self.random.randrange(len(LIBRISPEECH))
            return record("audio", [files[kind][at]], 1, 8, LIBRISPEECH[at][1])
        if kind == "video":
            (words,) = self.row("activitynet_caption_words")
            return record("video", [self.random.choice(files[kind])], 1, 8, words)
        turns, user, assistant = self.row("llava_mix_turns_user_words_assistant_words")
        (count,) = self.row("gaokao_mm_images") if kind == "several" else (1,)
        names = [self.random.choice(files["coco" if kind == "several" else kind]) for _ in range(count)]
        return record("image", names, turns, user, assistant)

    def row(self, table: str) -> tuple[int, ...]:
        """A draw from a table of quantiles, linear between neighbours."""
        rows = [row if isinstance(row, list) else [row] for row in self.tables[table]]
        at = self.random.random() * (len(rows) - 1)
        low, part = rows[int(at)], at - int(at)
        high = rows[min(int(at) + 1, len(rows) - 1)]
        return tuple(round(a + part * (b - a)) for a, b in zip(low, high, strict=True))


def record(medium: str, names: list[str], turns: int, user: int, assistant: int) -> dict[str, object]:
    """A conversation whose words are shared out over its turns; a token stands for each word."""
    said: list[dict[str, str]] = []
    for turn in range(turns):
        lead = f"<{medium}>\n" * len(names) if turn == 0 else ""
        for speaker, words, before in (("human", user, lead), ("gpt", assistant, "")):
            share = max(1, words // turns + (turn < words % turns))
            said.append({"from": speaker, "value": before + " ".join(["word"] * share)})
    return {medium: names if len(names) > 1 else names[0], "conversations": said}
