"""`model.family: transformers`: shapes by the model's own processor equal those of our rules, and whole samples."""

from __future__ import annotations

import dataclasses
import json
import random
import re
from pathlib import Path
from typing import Any

import processor_specs
import pytest
import torch
import transformers
from PIL import Image
from processor_more import MORE, REFUSED
from processor_specs import KNOWN, OTHERS
from shape_oracle import drawn_sizes
from transformers.video_utils import VideoMetadata

import dflop
from dflop import ProfileError
from dflop._native import Dataset, run_cli, testing
from dflop.data.family import load
from dflop.data.processor.rule import ProcessorRule

QUESTION: dict[str, Any] = {
    "height": 0,
    "width": 0,
    "num_images": 0,
    "num_frames": 0,
    "fps": None,
    "duration_s": None,
    "sample_rate": 0,
    "max_frames": None,
    "sample_fps": None,
}
PAGE = Path(__file__).resolve().parents[2] / "docs/data.md"
CLIPS = Path(__file__).resolve().parents[2] / "fixtures/media"
SOUNDS_S = (0.3, 1.1, 4.0, 11.7, 29.9, 30.0, 31.0, 44.2, 61.0)


def questions(kinds: list[str]) -> list[dict[str, Any]]:
    """Media of drawn sizes: images alone and two in a sample, clips, sounds."""
    found: list[dict[str, Any]] = []
    for index, (height, width) in enumerate(drawn_sizes(7, 25, largest=900)):
        size = {**QUESTION, "height": height, "width": width}
        if "image" in kinds:
            found.append({**size, "kind": "image", "num_images": 1 + (index % 3 == 0)})
        if "video" in kinds:
            frames = {"num_frames": 2 + index, "fps": 4.0, "duration_s": (2 + index) / 4}
            found.append({**size, "kind": "video", **frames})
    if "audio" in kinds:
        sound = {**QUESTION, "kind": "audio", "sample_rate": 16_000}
        found += [{**sound, "duration_s": seconds} for seconds in SOUNDS_S]
    return found


def by_rust(folder: Path, question: dict[str, Any]) -> Any:
    """(segments, pieces) by our own rule; "refused" where it has none."""
    files = {name: folder / f"{name}.json" for name in ("config", "processor_config")}
    parts = json.loads(files["processor_config"].read_text())
    # In a model's directory both stand in `preprocessor_config.json`.
    own = {**parts.get("feature_extractor", {}), **parts.get("image_processor", {})}
    texts = [files["config"].read_text(), json.dumps(own), json.dumps(parts.get("video_processor", {}))]
    asked = {name: value for name, value in question.items() if value is not None and name != "kind"}
    try:
        shape = testing.media_shape(*texts, question["kind"], **asked)
    except ProfileError as error:
        if " shape for " not in str(error):
            raise
        return "refused"
    pieces = [count if text is None else text for text, count in shape.pieces]
    return [tuple(run) for run in shape.segments], pieces


def by_processor(rule: ProcessorRule, question: dict[str, Any]) -> Any:
    """The same by the processor."""
    try:
        shape = rule(**question)
    except ValueError:
        return "refused"
    return shape["segments"], shape["pieces"]


@pytest.mark.some(6)
@pytest.mark.parametrize("family", KNOWN)
def test_the_processor_and_our_rule_give_the_same_shapes(family, tmp_path):
    """Encoder segments, words and runs of features; both refuse the same media."""
    processor_specs.write(tmp_path, family)
    rule = ProcessorRule(tmp_path)
    asked = questions(list(rule.marks))
    assert len(asked) >= len(SOUNDS_S)
    found = [by_processor(rule, question) for question in asked]
    for question, shape in zip(asked, found, strict=True):
        assert shape == by_rust(tmp_path, question), question
    assert sum(shape != "refused" for shape in found) >= 5


@pytest.mark.parametrize("family", ["qwen2_vl", "qwen3_vl", "glm4v"])
def test_limits_of_frames_are_kept(family, tmp_path):
    """As our rule keeps them, or the processor refuses them by name."""
    processor_specs.write(tmp_path, family)
    rule = ProcessorRule(tmp_path)
    clip = {**QUESTION, "kind": "video", "height": 70, "width": 98, "num_frames": 90, "fps": 30.0}
    clip["duration_s"] = 3.0
    kept = 0
    for limits in ({"max_frames": 8}, {"sample_fps": 1.0}, {"sample_fps": 2.0, "max_frames": 4}):
        asked = {**clip, **limits}
        shape = by_processor(rule, asked)
        if shape == "refused":
            with pytest.raises(
                ValueError, match="reads 6 frames, `data|chooses frames, and does not say which"
            ):
                rule(**asked)
            continue
        assert shape == by_rust(tmp_path, asked), limits
        assert 0 < len(rule(**asked)["frame_indices"]) <= limits.get("max_frames", 8)
        kept += 1
    assert kept >= 2


_MORE = [pytest.param(family, marks=pytest.mark.more) for family in MORE if family != "mllama"]


@pytest.fixture(params=["aya_vision", "llama4", "ovis2", "video_llama_3", "mllama", *_MORE])
def profiled(request, tmp_path):
    """(processor, folder with the data profile, samples) of a family without a rule of ours."""
    processor = processor_specs.write(tmp_path / "model", request.param)
    samples, rng = [], random.Random(3)
    for index, (height, width) in enumerate(drawn_sizes(11, 10, largest=300)):
        size = (max(width, 20), max(height, 20))
        names = [f"{index}_{k}.png" for k in range(index % 3)]
        for name in names:
            Image.new("RGB", size).save(tmp_path / name)
        parts: list[Any] = [{"type": "image"} for _ in names]
        parts.insert(rng.randint(0, len(parts)), {"type": "text", "text": f"What is this {index}?"})
        answer = {"role": "assistant", "content": [{"type": "text", "text": "A word. " * (1 + index)}]}
        samples.append({"messages": [{"role": "user", "content": parts}, answer], "images": names})
    (tmp_path / "data.jsonl").write_text("".join(json.dumps(sample) + "\n" for sample in samples))
    config = tmp_path / "dflop.yaml"
    # As docs/data.md has it.
    model = re.findall(r"```yaml\n(model: .*family: transformers.*\n)```", PAGE.read_text())
    config.write_text(model[0] + "data: {mixture: data.jsonl}\n")
    words = ["dflop", "profile", "data", "-c", str(config), "--out", str(tmp_path / "profile.parquet")]
    status, request = run_cli(words)
    assert status == 0
    asked = {"family": "transformers", "directory": str(tmp_path / "model")}
    assert request == {"verb": "profile_data", "arguments": asked}
    # As `dflop` goes on.
    assert run_cli(words, load(asked["family"], asked["directory"])) == (0, None)
    return processor, tmp_path, samples


def test_whole_samples_have_the_tokens_that_transformers_gives_them(profiled):
    processor, folder, samples = profiled
    profile = folder / "profile.parquet"
    dataset = Dataset(str(folder / "dflop.yaml"), str(profile))
    costs = dflop.costs(profile)
    for index, sample in enumerate(samples):
        images = [Image.open(folder / name) for name in sample["images"]]
        text = processor.apply_chat_template(sample["messages"], tokenize=False)
        media = {"images": images} if images else {}
        theirs = processor(text=[text], return_tensors="pt", **media)["input_ids"][0].tolist()
        assert dataset.encode(index).input_ids == theirs, sample
        assert (costs.encoder_ns[index] > 0) == bool(images)
    batches = dflop.BalancedBatchSampler(costs, batch_size=2, num_replicas=2, rank=0)
    assert all(len(batch) >= 1 for batch in batches)


@pytest.mark.more
@pytest.mark.parametrize("clip", ["made_mpeg4.mov", "made_vp8.webm"])
@pytest.mark.parametrize("family", [name for name, (_, spec) in OTHERS.items() if "video" in spec["marks"]])
def test_whole_samples_with_a_clip_and_an_image_have_the_tokens_of_transformers(family, clip, tmp_path):
    """Of a clip with as many frames, of the size and rate that dflop reads in the file's header."""
    processor = processor_specs.write(tmp_path / "model", family)
    Image.new("RGB", (90, 50)).save(tmp_path / "0.png")
    parts = [{"type": "image"}, {"type": "text", "text": "What?"}, {"type": "video"}]
    answer = {"role": "assistant", "content": [{"type": "text", "text": "That."}]}
    turns = [{"role": "user", "content": parts}, answer]
    sample = {"messages": turns, "images": ["0.png"], "videos": [str(CLIPS / clip)]}
    (tmp_path / "data.jsonl").write_text(json.dumps(sample) + "\n")
    config, profile = tmp_path / "dflop.yaml", tmp_path / "profile.parquet"
    config.write_text("model: {dir: model, family: transformers}\ndata: {mixture: data.jsonl}\n")
    words = ["dflop", "profile", "data", "-c", str(config), "--out", str(profile)]
    rule, asked = load("transformers", tmp_path / "model"), []

    def heard(**question: Any) -> Any:
        asked.append(question)
        return rule.function(**question)

    assert run_cli(words, dataclasses.replace(rule, function=heard)) == (0, None)
    [read] = [question for question in asked if question["kind"] == "video"]
    size = {name: read[name] for name in ("height", "width", "fps")}
    frames = range(read["num_frames"])
    metadata = VideoMetadata(
        total_num_frames=len(frames), duration=read["duration_s"], frames_indices=list(frames), **size
    )
    theirs = processor(
        text=[processor.apply_chat_template(turns, tokenize=False)],
        images=[Image.open(tmp_path / "0.png")],
        videos=[torch.zeros(len(frames), 3, read["height"], read["width"], dtype=torch.uint8)],
        video_metadata=[metadata],
        return_metadata=True,
        return_tensors="pt",
    )
    assert Dataset(str(config), str(profile)).encode(0).input_ids == theirs["input_ids"][0].tolist()


@pytest.mark.more
def test_a_dataset_of_hugging_face_is_profiled_by_the_processor(tmp_path):
    datasets = pytest.importorskip("datasets")
    processor_specs.write(tmp_path / "model", "aya_vision")
    pictures = [Image.new("RGB", (60 + 40 * k, 90)) for k in range(3)]
    turns = [{"role": "user", "content": "What?"}, {"role": "assistant", "content": "That."}]
    rows = [{"messages": turns, "images": [picture]} for picture in pictures]
    found = dflop.costs(datasets.Dataset.from_list(rows), model_dir=tmp_path / "model")
    assert len(found) == 3
    assert min(found.encoder_ns) > 0


def test_a_model_that_is_only_named_has_no_processor(tmp_path, capfd):
    config = tmp_path / "dflop.yaml"
    config.write_text("model: {name: qwen2.5-vl-7b, family: transformers}\ndata: {mixture: data.jsonl}\n")
    assert run_cli(["dflop", "profile", "data", "-c", str(config)])[0] == 2
    expected = "model.family: `transformers` asks the files of a processor, it needs `model.dir`"
    assert expected in capfd.readouterr().err


def test_paligemma_has_the_tokens_of_a_text_and_its_suffix(tmp_path):
    """Ids and labels of a question and its answer, by the template of the page."""
    processor = processor_specs.write(tmp_path / "model", "paligemma")
    assert processor_specs.PALIGEMMA_TEMPLATE.replace("\n", "\\n") in PAGE.read_text()
    Image.new("RGB", (90, 50)).save(tmp_path / "0.png")
    turns = [{"role": "user", "content": "<image>What is it?"}, {"role": "assistant", "content": "A word."}]
    (tmp_path / "data.jsonl").write_text(json.dumps({"messages": turns, "images": ["0.png"]}) + "\n")
    config, profile = tmp_path / "dflop.yaml", tmp_path / "profile.parquet"
    config.write_text("model: {dir: model, family: transformers}\ndata: {mixture: data.jsonl}\n")
    words = ["dflop", "profile", "data", "-c", str(config), "--out", str(profile)]
    assert run_cli(words, load("transformers", tmp_path / "model")) == (0, None)
    image = Image.open(tmp_path / "0.png")
    theirs = processor(images=image, text="<image>What is it?", suffix="A word.", return_tensors="pt")
    ours = Dataset(str(config), str(profile)).encode(0)
    assert ours.input_ids == theirs["input_ids"][0].tolist()
    assert ours.labels == theirs["labels"][0].tolist()


@pytest.mark.some(1)
@pytest.mark.parametrize("family", REFUSED)
def test_what_a_rule_cannot_follow_is_refused_by_name(family, tmp_path):
    processor_specs.write(tmp_path, family, refused=True)
    with pytest.raises(ProfileError, match=re.escape(REFUSED[family][2])) as error:
        ProcessorRule(tmp_path)
    assert "CONTRIBUTING.md" in error.value.__notes__[0]


def first_layer(family: str, config: Any, kind: str, tensors: Any) -> int:
    """Tokens that enter the first layer of Hugging Face's encoder."""
    if family == "mllama":
        encoder = transformers.models.mllama.modeling_mllama.MllamaVisionModel(config.vision_config)
        layers = encoder.transformer.layers
        arguments = [tensors[name] for name in ("pixel_values", "aspect_ratio_ids", "aspect_ratio_mask")]
    elif family == "molmo2":
        encoder = transformers.models.molmo2.modeling_molmo2.Molmo2VisionModel(config.vision_config)
        layers, arguments = encoder.layers, [tensors["pixel_values"]]
    elif kind == "image":
        module = transformers.models.phi4_multimodal.modeling_phi4_multimodal
        encoder = module.Phi4MultimodalVisionModel(config.vision_config)
        pixels, mask = tensors["image_pixel_values"], tensors["image_attention_mask"]
        layers, arguments = encoder.encoder.layers, [pixels.flatten(0, 1), mask.flatten(0, 1).bool()]
    else:
        module = transformers.models.phi4_multimodal.modeling_phi4_multimodal
        encoder = module.Phi4MultimodalAudioModel(config.audio_config).eval()
        layers, arguments = encoder.encoders, [tensors["audio_input_features"], None]
    seen: list[int] = []

    def listen(_: Any, inputs: Any, named: Any) -> None:
        seen.append(next(iter([*inputs, *named.values()])).shape[:-1].numel())

    layers[0].register_forward_pre_hook(listen, with_kwargs=True)
    with torch.no_grad():
        encoder(*arguments)
    return seen[0]


@pytest.mark.more
@pytest.mark.parametrize("family", ["mllama", "molmo2", "phi4_multimodal"])
def test_the_encoder_of_hugging_face_reads_as_many_tokens(family, tmp_path):
    processor_specs.write(tmp_path, family)
    rule = ProcessorRule(tmp_path)
    sizes = [{"kind": "image", "num_images": 1, "height": h, "width": w} for h, w in ((90, 50), (300, 700))]
    if "audio" in rule.marks:
        sizes += [{"kind": "audio", "sample_rate": 16_000, "duration_s": seconds} for seconds in (3.1, 41.3)]
    for size in sizes:
        question = {**QUESTION, **size}
        tensors = rule._ask(size["kind"], question, 1).tensors
        found = sum(count * tokens for count, tokens in rule(**question)["segments"])
        assert found == first_layer(family, rule.config, size["kind"], tensors), size


def test_a_directory_without_a_processor_says_so(tmp_path):
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    with pytest.raises(ProfileError, match="cannot load a processor from") as error:
        load("transformers", tmp_path)
    assert error.value.__notes__


def test_another_file_of_the_processor_is_another_version(tmp_path):
    """Shapes of an older processor are not taken for those of this one."""
    processor_specs.write(tmp_path, "aya_vision")
    first = load("transformers", tmp_path).version
    assert "AyaVisionProcessor of transformers " in first
    path = tmp_path / "processor_config.json"
    changed = json.loads(path.read_text())
    changed["image_processor"]["max_patches"] = 4
    path.write_text(json.dumps(changed))
    assert load("transformers", tmp_path).version != first
    assert set(OTHERS) & set(KNOWN) == set()
