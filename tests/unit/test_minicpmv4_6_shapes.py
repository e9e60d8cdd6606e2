"""The shape rule of MiniCPM-V 4.6 equals Hugging Face's processor and model, integer for integer."""

import json
import os
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from PIL import Image
from shape_oracle import drawn_sizes
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Split
from transformers import PreTrainedTokenizerFast

from dflop._native import Dataset, run_cli, testing

minicpm = pytest.importorskip("transformers.models.minicpmv4_6", reason="transformers 5.23 has it")
from transformers.models.minicpmv4_6.image_processing_pil_minicpmv4_6 import (  # noqa: E402
    MiniCPMV4_6ImageProcessorPil,
)

SEED = int(os.environ.get("DFLOP_TEST_SEED", "20261129"))
# (height, width): a pixel, lines of pixels, 10:1, 28 megapixels both ways, halves of a feature, squares, whose grids of slices
# come in mirrored pairs, and the largest picture that is not cut.
EXTREMES = [(1, 1), (1, 6000), (6000, 1), (1000, 100), (100, 1000), (4320, 6480), (6480, 4320), (84, 140)]
EXTREMES += [(448, 448), (448, 449), (449, 448), *((side, side) for side in range(600, 1500, 60))]
# Patch, mode, and fields of the image processor.
SETTINGS = {
    "published": (14, "16x", {}),
    "fine": (14, "4x", {"downsample_mode": "4x", "use_image_id": False}),
    "odd": (7, "16x", {"patch_size": 7, "max_slice_nums": 6, "scale_resolution": 101}),
    "whole": (14, "16x", {"slice_mode": False}),
}
MARKS = {
    "image_token": "<|image_pad|>",
    "video_token": "<|video_pad|>",
    "image_start_token": "<image>",
    "image_end_token": "</image>",
    "slice_start_token": "<slice>",
    "slice_end_token": "</slice>",
    "image_id_start_token": "<image_id>",
    "image_id_end_token": "</image_id>",
}
TOKENS = ("<unk>", "<pad>", *MARKS.values(), "\n", "0", "1", "2", "look", "yes")
TEMPLATE = (
    "{%- for message in messages -%}{%- if message.content is string -%}{{- message.content -}}{%- else -%}"
    "{%- for part in message.content -%}{%- if part.type == 'image' -%}{{- '<|image_pad|>' -}}"
    "{%- elif part.type == 'text' -%}{{- part.text -}}{%- endif -%}{%- endfor -%}{%- endif -%}{%- endfor -%}"
)


@pytest.fixture(scope="module", params=list(SETTINGS))
def setting(request):
    """Configuration, processor and our rule of one setting."""
    torch.set_num_threads(1)
    patch, mode, fields = SETTINGS[request.param]
    small = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2}
    config = minicpm.MiniCPMV4_6Config(
        vision_config={"patch_size": patch, "image_size": 4 * patch, **small},
        text_config={"model_type": "qwen3", "vocab_size": len(TOKENS), "num_key_value_heads": 2, **small},
        image_token_id=2,
        video_token_id=3,
        insert_layer_id=0,
        downsample_mode=mode,
    )
    words = Tokenizer(WordLevel({token: n for n, token in enumerate(TOKENS)}, unk_token="<unk>"))
    words.pre_tokenizer = Split(" ", "isolated")
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=words, unk_token="<unk>", pad_token="<pad>", extra_special_tokens=MARKS
    )
    # Pixel values decide no shape; without their arithmetic many megapixels take less time.
    images = MiniCPMV4_6ImageProcessorPil(do_rescale=False, do_normalize=False, resample=0, **fields)
    config_json, preprocessor_json = json.dumps(config.to_dict()), images.to_json_string()

    def shape(height, width):
        return testing.media_shape(config_json, preprocessor_json, "{}", "image", height=height, width=width)

    videos = minicpm.MiniCPMV4_6VideoProcessor()
    processor = minicpm.MiniCPMV4_6Processor(images, videos, tokenizer, chat_template=TEMPLATE)
    return SimpleNamespace(
        config=config, processor=processor, shape=shape, divisor={"4x": 4, "16x": 16}[mode]
    )


def written(shape):
    """The text of a shape's pieces, with the features spelt out."""
    return "".join(text if text is not None else "<|image_pad|>" * count for text, count in shape.pieces)


def sides_of_tiles(shape):
    """Rows and columns of patches of the whole, and of each slice."""
    first = [shape.first_patches] if shape.first_patches else []
    return first + [shape.patches] * (shape.num_tiles - len(first))


def told_of(images, size):
    """What the processor tells of a picture, by its own functions."""
    asked = {"patch_size": images.patch_size, "downsample_mode": images.downsample_mode}
    grid = None
    if images.slice_mode:
        grid = images.get_sliced_grid(size, images.max_slice_nums, images.scale_resolution)
    sides = [
        images.find_best_resize(size, images.scale_resolution, allow_upscale=grid is None, **asked),
    ]
    if grid is not None:
        height, width = images.get_refine_size(
            size, grid, images.scale_resolution, allow_upscale=True, **asked
        )
        sides += [(height // grid[0], width // grid[1])] * (grid[0] * grid[1])
    return {
        "grids": [grid or [0, 0]],
        "num_patches_per_image": [len(sides)],
        "target_sizes": np.array(sides) // images.patch_size,
    }


@pytest.mark.some(2)
def test_thousands_of_sizes(setting):
    """Sides, grid and text by the processor's own functions."""
    cut = 0
    for size in EXTREMES + drawn_sizes(SEED, 2000):
        told = told_of(setting.processor.image_processor, size)
        shape = setting.shape(*size)
        assert [list(sides) for sides in sides_of_tiles(shape)] == told["target_sizes"].tolist(), size
        text = setting.processor.replace_image_token(told, 0, image_token_divisor=setting.divisor)
        assert written(shape) == text, size
        patches = told["target_sizes"].prod(1).tolist()
        assert [tokens for count, tokens in shape.segments for _ in range(count)] == patches, size
        assert shape.parts == [(n, 1, tokens // setting.divisor) for n, tokens in shape.segments]
        cut += shape.num_tiles > 1
    assert (cut > 300) == setting.processor.image_processor.slice_mode


@pytest.mark.some(1)
def test_the_whole_processor_and_model(setting, tmp_path):
    """Sizes and ids of whole chat calls, pictures numbered; and a forward, which compares placeholders with features."""
    torch.manual_seed(SEED)
    model = minicpm.MiniCPMV4_6ForConditionalGeneration(setting.config).eval()
    folder = tmp_path / "model"
    setting.config.save_pretrained(folder)
    setting.processor.image_processor.save_pretrained(folder)
    setting.processor.tokenizer.chat_template = TEMPLATE
    setting.processor.tokenizer.save_pretrained(folder)
    drawn = [size for size in drawn_sizes(SEED, 60, largest=1200) if min(size) > 20][:9]
    samples = [[size] for size in [*drawn[:6], (700, 1100)]] + [drawn[6:9]]
    lines, calls = [], []
    for k, sizes in enumerate(samples):
        paths = [tmp_path / f"{k}-{n}.png" for n in range(len(sizes))]
        for path, (height, width) in zip(paths, sizes, strict=True):
            Image.new("RGB", (width, height)).save(path)
        says = [{"type": "image", "image": str(path)} for path in paths] + [{"type": "text", "text": "look"}]
        calls.append([{"role": "user", "content": says}, {"role": "assistant", "content": "yes"}])
        turns = [{"from": "human", "value": "<image>" * len(paths) + "look"}, {"from": "gpt", "value": "yes"}]
        lines.append(json.dumps({"image": [path.name for path in paths], "conversations": turns}))
    (tmp_path / "data.jsonl").write_text("\n".join(lines))
    (tmp_path / "mixture.yaml").write_text("datasets:\n  - {path: data.jsonl, media_root: .}\n")
    (tmp_path / "dflop.yaml").write_text("model: {dir: model}\ndata: {mixture: mixture.yaml}\n")
    assert run_cli(["dflop", "profile", "data", "-c", str(tmp_path / "dflop.yaml")]) == (0, None)
    dataset = Dataset(str(tmp_path / "dflop.yaml"), str(tmp_path / "data_profile.parquet"))
    for k, (call, sizes) in enumerate(zip(calls, samples, strict=True)):
        encoded = setting.processor.apply_chat_template(
            call, tokenize=True, return_dict=True, return_tensors="pt"
        )
        assert dataset.encode(k).input_ids == encoded["input_ids"][0].tolist(), sizes
        sides = [list(sides) for size in sizes for sides in sides_of_tiles(setting.shape(*size))]
        assert encoded["target_sizes"].tolist() == sides, sizes
        with torch.no_grad():
            model(**encoded | {"pixel_values": encoded["pixel_values"].float() / 255}, use_cache=False)
