"""Headers as `dflop probe` reads them against Pillow, soundfile and, where it is installed, ffprobe.

DFLOP_MEDIA_DIR names one more folder of files to compare.
"""

import json
import os
import re
import shutil
import subprocess
import sys
import warnings
from pathlib import Path

import pytest
from PIL import Image, ImageOps, UnidentifiedImageError

FIXTURES = Path(__file__).parents[2] / "fixtures" / "media"
FOLDERS = [FIXTURES, *(Path(p) for p in [os.environ.get("DFLOP_MEDIA_DIR", "")] if p)]
TEXTS = {".csv", ".md", ".py", ".txt"}
FILES = sorted(p for folder in FOLDERS for p in folder.iterdir() if p.is_file() and p.suffix not in TEXTS)

DIFFERENT = {
    "Pillow__apng_syntax_num_frames_high.png": "Pillow believes the number in acTL, ours counts the frames",
    "music-metadata__mp3_layer3_he_44khz.mp3": "no index: others estimate, ours counts frames",
    "music-metadata__outofbounds.mp3": "its last frame is cut off: each reader counts otherwise",
    "Pillow__16bit.cropped.jp2": "JPEG 2000 is not read",
    "Pillow__seek_too_large.tif": "16 bytes without a directory, refused",
    "derived__sample_truncated_in_moov.mp4": "its tables are cut off, refused",
    "go-mp4__sample_qt.mp4": "its frames are cut off; ours says what its tables say",
    "music-metadata__aac_adts-sf-escape.aac": "its sample rate index is 15, which ADTS forbids: refused",
}
"""Files on which readers differ, and why ours is as it is."""


@pytest.fixture(scope="module")
def probed():
    """What `dflop probe` says of every file, by path; read in one call."""
    done = subprocess.run(
        [sys.executable, "-m", "dflop", "probe", "--json", *map(str, FILES)], capture_output=True, text=True
    )
    rows = [json.loads(line) for line in done.stdout.splitlines()]
    assert len(rows) == len(FILES), done.stderr
    return {row["path"]: row for row in rows}


def test_limits_of_the_decoder_are_those_of_the_profile():
    """What Pillow refuses, the profile of a dataset calls a bad sample."""
    source = (Path(__file__).parents[2] / "crates/data/src/media/decoder.rs").read_text()
    found = re.search(r"PICTURE_PIXELS_MAX: u64 = ([\d_]+);", source)
    assert found is not None
    assert int(found[1]) == 2 * Image.MAX_IMAGE_PIXELS
    assert not {".heic", ".heif"} & set(Image.registered_extensions())


@pytest.mark.parametrize("path", FILES, ids=lambda p: p.name)
def test_pictures_are_those_of_pillow(path, probed):
    if path.name in DIFFERENT:
        pytest.skip(DIFFERENT[path.name])
    found = probed[str(path)]
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            with Image.open(path) as image:
                num_frames = getattr(image, "n_frames", 1)
                # Of a picture of several pages ours is the first, as processors read it.
                size = ImageOps.exif_transpose(image).size
                form = image.format
    except (UnidentifiedImageError, OSError, SyntaxError, ValueError, Image.DecompressionBombError) as error:
        pytest.skip(f"Pillow does not read it: {error}")
    assert found["error"] is None
    assert (found["width"], found["height"]) == size
    if form in {"GIF", "WEBP", "PNG"}:
        assert found["frames"] == num_frames


@pytest.mark.parametrize("path", FILES, ids=lambda p: p.name)
def test_sounds_are_those_of_soundfile(path, probed):
    soundfile = pytest.importorskip("soundfile")
    if path.name in DIFFERENT:
        pytest.skip(DIFFERENT[path.name])
    found = probed[str(path)]
    try:
        about = soundfile.info(str(path))
    except soundfile.LibsndfileError as error:
        pytest.skip(f"libsndfile does not read it: {error}")
    if found["kind"] == "video":
        pytest.skip("libsndfile finds a sound where others find a picture")
    assert found["error"] is None
    assert (found["sample_rate"], found["channels"]) == (about.samplerate, about.channels)
    # Of a stream of unknown length libsndfile says the largest number it has.
    if 0 < about.frames < 1 << 62:
        assert found["duration_s"] == pytest.approx(about.duration, abs=0.06)


@pytest.mark.skipif(shutil.which("ffprobe") is None, reason="ffprobe is not installed")
@pytest.mark.parametrize("path", FILES, ids=lambda p: p.name)
def test_clips_and_sounds_are_those_of_ffprobe(path, probed):
    if path.name in DIFFERENT:
        pytest.skip(DIFFERENT[path.name])
    found = probed[str(path)]
    done = subprocess.run(
        ["ffprobe", "-v", "error", "-count_packets", "-show_streams", "-show_format", "-of", "json", path],
        capture_output=True,
        text=True,
    )
    about = json.loads(done.stdout or "{}")
    streams = about.get("streams", [])
    videos = [s for s in streams if s["codec_type"] == "video" and not s["disposition"]["attached_pic"]]
    sounds = [s for s in streams if s["codec_type"] == "audio"]
    if done.returncode != 0 or not (videos or sounds) or found["kind"] == "image":
        pytest.skip("ffprobe does not read it, or it is a picture")
    if videos and not videos[0]["width"]:
        pytest.skip("ffprobe does not read it: no size")
    assert found["error"] is None
    if found["kind"] == "video" and videos:
        video = videos[0]
        turned = any(
            abs(round(float(d.get("rotation", 0)))) % 180 == 90 for d in video.get("side_data_list", [])
        )
        size = (video["width"], video["height"])
        assert (found["width"], found["height"]) == (size[::-1] if turned else size)
        if int(video.get("nb_read_packets", 0)) and found["frames"] is not None:
            assert found["frames"] == int(video["nb_read_packets"])
    if found["kind"] == "audio" and sounds:
        sound = sounds[0]
        assert (found["sample_rate"], found["channels"]) == (int(sound["sample_rate"]), sound["channels"])
        duration = sound.get("duration") or about["format"].get("duration")
        # ffprobe counts what an MP3 encoder adds at both ends, up to three frames of 1,152.
        added = 3 * 1152 / found["sample_rate"] if found["format"] == "mp3" else 0.0
        if duration and found["duration_s"]:
            assert found["duration_s"] == pytest.approx(float(duration), abs=0.06 + added)
