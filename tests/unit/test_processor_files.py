"""Which file of a model directory counts: shapes are those of transformers' processor, or the field is named."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import processor_specs
import pytest
from PIL import Image
from processor_specs import KNOWN
from transformers import AutoProcessor

from dflop._native import Dataset, run_cli
from dflop.models.processor_files import processor_fields

if TYPE_CHECKING:
    from pathlib import Path

SIZES = [(123, 77), (400, 300)]
OWN = {
    "idefics3": "image_seq_len",
    "internvl": "image_seq_length",
    "lighton_ocr": "spatial_merge_size",
    "llava": "num_additional_image_tokens",
    "llava_next": "patch_size",
    "mistral3": "patch_size",
}
"""A field by which the processor itself counts tokens, by family."""


def written(path: Path, content: Any) -> None:
    path.write_text(json.dumps(content))


def profiled(folder: Path) -> list[int] | None:
    """LLM tokens of a sample with a picture of each size; `None` where the profile is refused."""
    turns = [{"role": "user", "content": "<image>What?"}, {"role": "assistant", "content": "That."}]
    lines = []
    for index, size in enumerate(SIZES):
        Image.new("RGB", size).save(folder / f"{index}.png")
        lines.append(json.dumps({"messages": turns, "images": [f"{index}.png"]}) + "\n")
    (folder / "data.jsonl").write_text("".join(lines))
    (folder / "dflop.yaml").write_text("model: {dir: model}\ndata: {mixture: data.jsonl}\n")
    if run_cli(["dflop", "profile", "data", "-c", str(folder / "dflop.yaml")]) != (0, None):
        return None
    dataset = Dataset(str(folder / "dflop.yaml"), str(folder / "data_profile.parquet"))
    return [len(dataset.encode(index).input_ids) for index in range(len(dataset))]


def by_transformers(folder: Path) -> list[int]:
    """The same by the processor that transformers makes of the directory."""
    processor = AutoProcessor.from_pretrained(folder / "model")
    parts = [{"type": "image"}, {"type": "text", "text": "What?"}]
    answer = {"role": "assistant", "content": [{"type": "text", "text": "That."}]}
    text = processor.apply_chat_template([{"role": "user", "content": parts}, answer], tokenize=False)
    pictures = [Image.new("RGB", size) for size in SIZES]
    return [len(processor(text=[text], images=[one])["input_ids"][0]) for one in pictures]


@pytest.fixture
def model(tmp_path, request):
    """The folder with a model, and what its `processor_config.json` says."""
    processor_specs.write(tmp_path / "model", request.param)
    return tmp_path, json.loads((tmp_path / "model/processor_config.json").read_text())


@pytest.mark.parametrize("model", ["qwen2_vl", "mistral3"], indirect=True)
def test_a_processor_that_was_saved_again_goes_before_the_older_file(model, request):
    """`save_pretrained` writes `processor_config.json`, and leaves the `preprocessor_config.json` of the download."""
    folder, saved = model
    family = request.node.callspec.params["model"]
    other = {"qwen2_vl": {"shortest_edge": 3136, "longest_edge": 3136}, "mistral3": {"longest_edge": 56}}
    older = {**saved["image_processor"], "size": other[family]}
    written(folder / "model/preprocessor_config.json", older)
    expected = by_transformers(folder)
    assert profiled(folder) == expected
    assert processor_fields(folder / "model", "image_processor") == saved["image_processor"]
    # Without the newer parts the older file counts.
    written(
        folder / "model/processor_config.json", {"processor_class": saved["processor_class"]} | _own(saved)
    )
    assert processor_fields(folder / "model", "image_processor") == older
    assert profiled(folder) == by_transformers(folder) != expected


def _own(saved: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in saved.items() if not isinstance(value, dict)}


@pytest.mark.some(3)
@pytest.mark.parametrize("model", OWN, indirect=True)
def test_fields_of_an_older_processors_own_file_are_compared_with_the_model(model, capfd, request):
    """Releases before 5 write the image processor's file and, beside it, what belongs to the processor alone."""
    folder, saved = model
    field = OWN[request.node.callspec.params["model"]]
    written(folder / "model/preprocessor_config.json", saved["image_processor"])
    if "video_processor" in saved:
        written(folder / "model/video_preprocessor_config.json", saved["video_processor"])
    written(folder / "model/processor_config.json", _own(saved))
    assert profiled(folder) == by_transformers(folder)
    written(folder / "model/processor_config.json", {**_own(saved), field: 2 * saved[field]})
    capfd.readouterr()
    assert profiled(folder) is None
    assert f"`processor_config.json`: `{field}` is {2 * saved[field]}, must be" in capfd.readouterr().err
    assert set(OWN) < set(KNOWN)


def test_llava_onevision_counts_as_its_processor_is_told_to(tmp_path, capfd):
    assert run_cli(["dflop", "demo-data", str(tmp_path / "demo"), "--samples", "8"]) == (0, None)
    config, path = tmp_path / "demo/dflop.yaml", tmp_path / "demo/model/processor_config.json"
    sound = json.loads(path.read_text())
    for field, value in [("num_image_tokens", 729), ("vision_aspect_ratio", "anyres_max_4")]:
        written(path, {**sound, field: value})
        assert run_cli(["dflop", "profile", "data", "-c", str(config)])[0] == 2
        assert f"`{field}` is {json.dumps(value)}, must be" in capfd.readouterr().err
