"""Parts of a processor in several files: videos and sounds are those of transformers, and errors name the file."""

from __future__ import annotations

import json
import wave
from pathlib import Path
from typing import TYPE_CHECKING, Any

import av
import numpy as np
import processor_specs
import pytest
import torch
from transformers import AutoProcessor
from transformers.video_utils import VideoMetadata

from dflop._native import Dataset, run_cli
from dflop.models.processor_files import processor_fields, processor_file

if TYPE_CHECKING:
    from collections.abc import Sequence

pytestmark = pytest.mark.filterwarnings("ignore:At least one mel filter")
CLIP = Path(__file__).resolve().parents[2] / "fixtures/media/made_mpeg4.mov"
RATE = 16_000
SECONDS = 2.5
FILES = ("preprocessor_config.json", "video_preprocessor_config.json", "processor_config.json")
KINDS = {"qwen2_vl": "video", "qwen2_audio": "audio"}
SMALL = {"size": {"shortest_edge": 784, "longest_edge": 3136}}
HALF = {"chunk_length": 15, "hop_length": 80, "n_samples": 240_000}
"""A window of half the seconds, with as many frames."""


@pytest.fixture
def model(tmp_path, request):
    """The folder with a model of this family, and what its `processor_config.json` says."""
    processor_specs.write(tmp_path / "model", request.param)
    return tmp_path, json.loads((tmp_path / "model/processor_config.json").read_text())


def write(folder: Path, *contents: Any) -> None:
    """The files of a model's processor, in the order of `FILES`; those with nothing are not there."""
    for name, content in zip(FILES, contents, strict=True):
        (folder / "model" / name).unlink(missing_ok=True)
        if content is not None:
            (folder / "model" / name).write_text(json.dumps(content))


def profiled(folder: Path, kind: str) -> list[int] | None:
    """Ids of a sample with a clip or a sound; `None` where the profile is refused."""
    with wave.open(str(folder / "sound.wav"), "wb") as file:
        file.setnchannels(1)
        file.setsampwidth(2)
        file.setframerate(RATE)
        file.writeframes(bytes(2 * round(SECONDS * RATE)))
    parts = [{"type": kind}, {"type": "text", "text": "What?"}]
    answer = {"role": "assistant", "content": [{"type": "text", "text": "That."}]}
    field, path = ("videos", CLIP) if kind == "video" else ("audios", folder / "sound.wav")
    sample = {"messages": [{"role": "user", "content": parts}, answer], field: [str(path)]}
    (folder / "data.jsonl").write_text(json.dumps(sample) + "\n")
    (folder / "dflop.yaml").write_text("model: {dir: model}\ndata: {mixture: data.jsonl}\n")
    if run_cli(["dflop", "profile", "data", "-c", str(folder / "dflop.yaml")]) != (0, None):
        return None
    return Dataset(str(folder / "dflop.yaml"), str(folder / "data_profile.parquet")).encode(0).input_ids


def by_transformers(folder: Path, kind: str) -> list[int]:
    """The same by the processor that transformers makes of the directory."""
    processor = AutoProcessor.from_pretrained(folder / "model")
    parts = [{"type": kind}, {"type": "text", "text": "What?"}]
    answer = {"role": "assistant", "content": [{"type": "text", "text": "That."}]}
    text = processor.apply_chat_template([{"role": "user", "content": parts}, answer], tokenize=False)
    if kind == "audio":
        sound = np.zeros(round(SECONDS * RATE), dtype=np.float32)
        return processor(text=[text], audio=[sound], sampling_rate=RATE)["input_ids"][0]
    with av.open(str(CLIP)) as clip:
        stream = clip.streams.video[0]
        fps = float(stream.average_rate)
        frames = np.stack([frame.to_ndarray(format="rgb24") for frame in clip.decode(stream)])
    metadata = VideoMetadata(total_num_frames=len(frames), fps=fps, duration=len(frames) / fps)
    found = processor(
        text=[text],
        videos=[torch.from_numpy(frames).permute(0, 3, 1, 2)],
        video_metadata=[metadata],
        return_tensors="pt",
    )
    return found["input_ids"][0].tolist()


def own_of(saved: dict[str, Any], *parts: str) -> dict[str, Any]:
    """What belongs to the processor itself, and these parts."""
    return {name: value for name, value in saved.items() if not isinstance(value, dict) or name in parts}


@pytest.mark.parametrize("model", ["qwen2_vl"], indirect=True)
def test_settings_of_videos_are_found_as_transformers_finds_them(model):
    """In the processor's file, else in their own, else in the image processor's, whatever the newer file has for images."""
    folder, saved = model
    image, video = saved["image_processor"], saved["video_processor"]
    tiny = {"size": {"shortest_edge": 784, "longest_edge": 1568}}
    lengths = []
    for own, of_videos, whole in [
        ({**image, **tiny}, {**video, **SMALL}, saved),
        ({**image, **tiny}, {**video, **SMALL}, own_of(saved, "image_processor")),
        ({**image, **tiny}, None, own_of(saved, "image_processor")),
        (None, None, {**own_of(saved, "image_processor"), "video_processor": {**video, **SMALL}}),
    ]:
        write(folder, own, of_videos, whole)
        expected = by_transformers(folder, "video")
        assert profiled(folder, "video") == expected
        settings = AutoProcessor.from_pretrained(folder / "model").video_processor.size
        found = processor_fields(folder / "model", "video_processor")["size"]
        assert {name: settings[name] for name in found} == found
        lengths.append(len(expected))
    assert lengths[0] > lengths[1] == lengths[3] > lengths[2]


@pytest.mark.parametrize("model", ["qwen2_audio"], indirect=True)
def test_feature_extractors_are_found_as_transformers_finds_them(model):
    """In the processor's file under either of two names, the older one first, else in their own."""
    folder, saved = model
    whole = saved["feature_extractor"]
    half = {**whole, **HALF, "nb_max_frames": 3000}
    newer = {**own_of(saved), "audio_processor": half}
    lengths = []
    for own, content in [
        (half, saved),
        (half, own_of(saved)),
        (whole, newer),
        (None, newer),
        (None, {**newer, "feature_extractor": whole}),
        (whole, {**newer, "feature_extractor": None}),
    ]:
        write(folder, own, None, content)
        expected = by_transformers(folder, "audio")
        assert profiled(folder, "audio") == expected
        found = processor_fields(folder / "model", "feature_extractor")
        extractor = AutoProcessor.from_pretrained(folder / "model").feature_extractor
        assert found["hop_length"] == extractor.hop_length
        lengths.append(len(expected))
    assert lengths[0] == lengths[4] == lengths[5] < lengths[1] == lengths[2] == lengths[3]


def refusals(folder: Path, kind: str, capfd: Any, cases: Sequence[tuple[list[Any], str]]) -> None:
    for contents, expected in cases:
        write(folder, *contents)
        capfd.readouterr()
        assert profiled(folder, kind) is None
        assert expected in capfd.readouterr().err


@pytest.mark.parametrize("model", ["qwen2_vl"], indirect=True)
def test_errors_name_the_file_of_the_part(model, capfd):
    """Also where `processor_config.json` has another part alone, and where images' settings serve for videos."""
    folder, saved = model
    image, video = saved["image_processor"], saved["video_processor"]
    bad_image, bad_video = {**image, "merge_size": 7}, {**video, "fps": -1}
    whole = {name: own_of(saved, f"{name}_processor") for name in ("image", "video")}
    in_own = "`preprocessor_config.json`: `"
    refusals(folder, "video", capfd, [
        ([bad_image, None, whole["video"]], f"{in_own}merge_size` is 7"),
        ([image, None, {**saved, "image_processor": bad_image}], "`processor_config.json`: `merge_size` is 7"),
        ([image, bad_video, whole["image"]], "`video_preprocessor_config.json`: `fps` is -1"),
        ([{**image, "fps": -1}, None, whole["image"]], f"{in_own}fps` is -1"),
        ([{**image, "fps": -1}, None, None], f"{in_own}fps` is -1"),
        ([image, video, {**saved, "video_processor": bad_video}], "`processor_config.json`: `fps` is -1"),
    ])  # fmt: skip
    write(folder, image, None, whole["video"])
    assert processor_file(folder / "model").name == FILES[0]


@pytest.mark.parametrize("model", ["qwen2_audio"], indirect=True)
def test_errors_name_the_file_of_the_feature_extractor(model, capfd):
    folder, saved = model
    bad = {**saved["feature_extractor"], "feature_size": 7}
    refusals(folder, "audio", capfd, [
        ([bad, None, None], "`preprocessor_config.json`: `feature_size` is 7"),
        ([bad, None, {**own_of(saved), "image_processor": {}}], "`preprocessor_config.json`: `feature_size` is 7"),
        ([saved["feature_extractor"], None, {**own_of(saved), "audio_processor": bad}],
         "`processor_config.json`: `feature_size` is 7"),
    ])  # fmt: skip
