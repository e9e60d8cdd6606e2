"""What the edit list of an MP4 shows: `dflop probe` against what PyAV decodes, as training does."""

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


def with_edits(clip: bytes, edits: list[tuple[int, int]]) -> bytes:
    """The clip with an edit list of these entries: ticks of the movie, and where in the media they begin."""
    at = clip.index(b"elst") - 4
    rows = b"".join(struct.pack(">IiI", ticks, start, 1 << 16) for ticks, start in edits)
    whole_box = struct.pack(">I4sII", 16 + len(rows), b"elst", 0, len(edits)) + rows
    (old_bytes,) = struct.unpack_from(">I", clip, at)
    grown = len(whole_box) - old_bytes
    whole = bytearray(clip[:at] + whole_box + clip[at + old_bytes :])
    for name in (b"moov", b"trak", b"edts"):
        box = whole.rindex(name, 0, at) - 4
        struct.pack_into(">I", whole, box, struct.unpack_from(">I", whole, box)[0] + grown)
    assert whole.index(b"mdat") < whole.index(b"moov"), "places of samples would move"
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


def spoken(rate: int, num_samples: int) -> bytes:
    """So many samples of sound in AAC, whose packets have 1,024."""
    file = io.BytesIO()
    with av.open(file, "w", format="ipod") as container:
        stream = container.add_stream("aac", rate=rate)
        stream.layout = "mono"
        for start in range(0, num_samples, 1024):
            silence = np.zeros((1, min(1024, num_samples - start)), dtype=np.float32)
            frame = av.AudioFrame.from_ndarray(silence, format="fltp", layout="mono")
            frame.rate, frame.pts = rate, start
            container.mux(stream.encode(frame))
        container.mux(stream.encode(None))
    return file.getvalue()


def test_sounds_are_as_long_as_decoded(tmp_path):
    """A decoder gives AAC in whole packets, behind the end that the edit list names, too."""
    clips = {
        f"{rate}-{num_samples}": spoken(rate, num_samples)
        for rate in (16000, 44100)
        for num_samples in (1024, 5000, 2 * rate, 2 * rate + 17, 30720)
    }
    # Lists with edits of no length, at the start of a packet and within one, with and without media.
    whole = spoken(16000, 16_000)
    lists = [
        [(0, 1024)],
        [(0, 0)],
        [(0, 3000)],
        [(0, -1)],
        [(100, -1)],
        [(0, -1), (0, 1024)],
        [(0, 3000), (0, 5000)],
    ]
    lists += [
        [(0, 1024), (500, 1024)],
        [(500, 1024), (0, 3000)],
        [(0, 3000), (500, 1024)],
        [(0, -1), (500, 1024)],
    ]
    lists += [[(100, -1), (500, 1024)], [(0, 17_408)], [(0, 20_000)], [(0, 5000), (0, 3000)]]
    clips |= {f"16000-edits-{place}": with_edits(whole, edits) for place, edits in enumerate(lists)}
    clips |= {
        f"{name}-less-{by}": shortened(clip, by)
        for name, clip in clips.items()
        for by in (1, 30, 70)
        if "edits" not in name and 1000 * int(name.split("-")[1]) > (by + 1) * int(name.split("-")[0])
    }
    for name, clip in clips.items():
        (tmp_path / f"{name}.m4a").write_bytes(clip)
    command = [sys.executable, "-m", "dflop", "probe", "--json", *(f"{name}.m4a" for name in clips)]
    done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path)
    rows = {row["path"][:-4]: row for row in map(json.loads, done.stdout.splitlines())}
    expected = {}
    for name, clip in clips.items():
        with av.open(io.BytesIO(clip)) as container:
            expected[name] = sum(frame.samples for frame in container.decode(audio=0))
    found = {name: round((row["duration_s"] or 0) * row["sample_rate"]) for name, row in rows.items()}
    assert found == expected
    assert {0, 72, 120, 8192, 8264} < set(expected.values())


def test_an_edit_of_no_length_shows_nothing(tmp_path):
    """Alone, before and behind others, with media and without."""
    clip = cut(encoded("libx264", {"bf": "0"}), "mp4", 5, 40)
    shows, void, gap = (400, 2560), (0, 5120), (100, -1)
    lists = [[void], [void, shows], [shows, void], [shows, void, (200, 12_800)], [gap, void], [gap, shows]]
    for index, edits in enumerate(lists):
        (tmp_path / f"{index}.mp4").write_bytes(with_edits(clip, edits))
    command = [sys.executable, "-m", "dflop", "probe", "--json", *(f"{k}.mp4" for k in range(len(lists)))]
    done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path)
    frames = [row["frames"] or 0 for row in map(json.loads, done.stdout.splitlines())]
    assert frames == [decoded((tmp_path / f"{k}.mp4").read_bytes()) for k in range(len(lists))]
    assert frames == [0, 10, 10, 15, 0, 10]
