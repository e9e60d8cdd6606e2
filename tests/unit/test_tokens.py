"""What the native dataset encodes equals what Hugging Face's tokenizer and processor make of it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from PIL import Image, ImageOps
from transformers import LlavaOnevisionProcessor, PreTrainedTokenizerFast
from transformers.models.llava_onevision.image_processing_pil_llava_onevision import (
    LlavaOnevisionImageProcessorPil,
)

from dflop._native import Dataset, run_cli

ROLES = {"human": "user", "gpt": "assistant", "system": "system"}
NUM_SAMPLES = 64


@pytest.fixture(scope="module")
def demo(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("tokens") / "demo"
    assert run_cli(["dflop", "demo-data", str(folder), "--samples", str(NUM_SAMPLES)]) == (0, None)
    assert run_cli(["dflop", "profile", "data", "-c", str(folder / "dflop.yaml")]) == (0, None)
    return folder


def records(demo: Path) -> list[dict]:
    """The records in the order of the mixture."""
    lines = (demo / "data/images.jsonl").read_text().splitlines()
    return [json.loads(line) for line in lines] + json.loads((demo / "data/videos.json").read_text())


class _NumTokens:
    """Hugging Face's own arithmetic for the placeholders of a medium."""

    def __init__(self, demo: Path) -> None:
        settings = json.loads((demo / "model/preprocessor_config.json").read_text())
        self._images = LlavaOnevisionImageProcessorPil(
            size=settings["size"], image_grid_pinpoints=settings["image_grid_pinpoints"]
        )
        # Its constructor wants a video processor, which its arithmetic for images does not use.
        self._processor = object.__new__(LlavaOnevisionProcessor)
        self._processor.image_processor = self._images
        self._processor.image_token = "<image>"
        self._processor.video_token = "<video>"
        self._processor.num_image_tokens = 81
        self._processor.vision_aspect_ratio = "anyres_max_9"
        self._processor.vision_feature_select_strategy = "full"

    def of_images(self, paths: list[Path]) -> list[int]:
        images = [ImageOps.exif_transpose(Image.open(path)).convert("RGB") for path in paths]
        inputs = self._images([images], return_tensors="pt")
        texts = [
            self._processor.replace_image_token({**inputs, "batch_num_images": [len(images)]}, k)
            for k in range(len(images))
        ]
        return [len(text) // len("<image>") for text in texts]

    def of_frames(self, num_frames: int) -> int:
        import torch

        frames = torch.zeros(num_frames, 3, 126, 126)
        text = self._processor.replace_video_token({"pixel_values_videos": [frames]}, 0)
        return len(text) // len("<video>")


def test_ids_labels_and_placeholders_equal_hugging_faces(demo):
    """The same ids, with as many placeholders, and labels on what the assistant says and its end."""
    tokenizer = PreTrainedTokenizerFast.from_pretrained(demo / "model")
    num_tokens = _NumTokens(demo)
    dataset = Dataset(str(demo / "dflop.yaml"), str(demo / "data_profile.parquet"))
    image_id, video_id = tokenizer.convert_tokens_to_ids(["<image>", "<video>"])
    assert len(dataset) == NUM_SAMPLES
    for index, record in enumerate(records(demo)):
        encoded = dataset.encode(index)
        assert encoded.id == record["id"]
        names = record.get("image", [])
        paths = [demo / "data/media" / name for name in ([names] if isinstance(names, str) else names)]
        counts = iter(num_tokens.of_images(paths) if paths else [])
        messages = [
            {"role": ROLES[turn["from"]], "content": turn["value"]} for turn in record["conversations"]
        ]
        ids = []
        # The whole text at once, as apply_chat_template does.
        for token in tokenizer.apply_chat_template(messages, return_dict=False):
            if token == image_id:
                ids += [token] * next(counts)
            elif token == video_id:
                ids += [token] * num_tokens.of_frames(len(encoded.media[0].frame_indices))
            else:
                ids.append(token)
        assert next(counts, None) is None
        assert encoded.input_ids == ids, record["id"]
        assert encoded.feature_mask == [token in (image_id, video_id) for token in ids]
        assert all(label in (-100, token) for label, token in zip(encoded.labels, ids, strict=True))
        answers = [turn["value"] + "<|im_end|>" for turn in record["conversations"] if turn["from"] == "gpt"]
        assert tokenizer.decode([label for label in encoded.labels if label != -100]) == "".join(answers)
        assert dataset.shape(index)[1:] == (len(ids), sum(label != -100 for label in encoded.labels))
