"""Clips that were cut without encoding: `dflop probe` against the frames that PyAV decodes, as training does."""

import io
import itertools
import json
import struct
import subprocess
import sys

import numpy as np
import pytest

av = pytest.importorskip("av")

NUM_FRAMES = 48


def encoded(codec: str, options: dict[str, str]) -> bytes:
    """A clip of 25 frames a second with a keyframe every 12 frames."""
    file = io.BytesIO()
    with av.open(file, "w", format="mp4") as container:
        stream = container.add_stream(codec, rate=25)
        stream.width, stream.height, stream.pix_fmt = 32, 32, "yuv420p"
        stream.options = {"g": "12", **options}
        for index in range(NUM_FRAMES):
            pixels_HWC = np.full((32, 32, 3), 5 * index, dtype=np.uint8)
            container.mux(stream.encode(av.VideoFrame.from_ndarray(pixels_HWC, format="rgb24")))
        container.mux(stream.encode(None))
    return file.getvalue()


def cut(clip: bytes, form: str, start_frame: float, num_packets: int) -> bytes:
    """The packets from the keyframe before `start_frame` on, as `ffmpeg -ss -c copy` writes them."""
    file = io.BytesIO()
    with av.open(io.BytesIO(clip)) as source, av.open(file, "w", format=form) as container:
        stream = source.streams.video[0]
        copy = container.add_stream_from_template(stream)
        start = int(start_frame * 512)
        source.seek(start, stream=stream)
        packets = [packet for packet in source.demux(stream) if packet.dts is not None][:num_packets]
        for packet in packets:
            packet.pts, packet.dts, packet.stream = packet.pts - start, packet.dts - start, copy
            container.mux(packet)
    return file.getvalue()


def shortened(clip: bytes, by: int) -> bytes:
    """The clip with an edit list that ends `by` ticks of the movie earlier, as an editor trims it."""
    at = clip.index(b"elst") + 4
    version, count = clip[at], struct.unpack_from(">I", clip, at + 4)[0]
    last = at + 8 + (count - 1) * (20 if version else 12)
    form = ">Q" if version else ">I"
    (ticks,) = struct.unpack_from(form, clip, last)
    whole = bytearray(clip)
    struct.pack_into(form, whole, last, max(ticks - by, 0))
    return bytes(whole)


def decoded(clip: bytes) -> int:
    with av.open(io.BytesIO(clip)) as container:
        return sum(1 for _ in container.decode(video=0))


def test_frames_are_those_that_are_decoded(tmp_path):
    """Cut at the front, at the end, at both; with and without frames that are shown in another order."""
    sources = {
        "plain": encoded("libx264", {"bf": "0"}),
        "reordered": encoded("libx264", {"bf": "3", "b_strategy": "0"}),
        "mpeg4": encoded("mpeg4", {}),
    }
    clips = dict(sources)
    for (name, clip), form, start in itertools.product(
        sources.items(), ("mp4", "mov"), (0, 1, 5, 11, 12, 13.5, 30)
    ):
        whole = cut(clip, form, start, NUM_FRAMES)
        clips[f"{name}-{start}-{form}"] = whole
        clips[f"{name}-{start}-{form}-few"] = cut(clip, form, start, 9)
        if b"elst" in whole:
            clips |= {f"{name}-{start}-{form}-less-{by}": shortened(whole, by) for by in (1, 40, 90, 333)}
    for name, clip in clips.items():
        (tmp_path / f"{name}.mp4").write_bytes(clip)
    command = [sys.executable, "-m", "dflop", "probe", "--json", *(f"{name}.mp4" for name in clips)]
    done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path)
    found = {row["path"][:-4]: row["frames"] for row in map(json.loads, done.stdout.splitlines())}
    expected = {name: decoded(clip) for name, clip in clips.items()}
    assert len(set(expected.values())) > 10
    assert found == {name: count or None for name, count in expected.items()}
