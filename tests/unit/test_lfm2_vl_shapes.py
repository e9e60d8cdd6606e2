"""The shape rule of LFM2-VL equals Hugging Face's processor and model, integer for integer."""

import json
import os
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from shape_oracle import drawn_sizes, outcome
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Split
from transformers import (
    Lfm2VlConfig,
    Lfm2VlForConditionalGeneration,
    Lfm2VlImageProcessor,
    Lfm2VlProcessor,
    PreTrainedTokenizerFast,
)

from dflop._native import testing

SEED = int(os.environ.get("DFLOP_TEST_SEED", "20261128"))
# (height, width): a pixel, lines of pixels, 10:1, 28 megapixels both ways, halves of a feature, and the largest
# picture that is not cut.
EXTREMES = [(1, 1), (1, 6000), (6000, 1), (1000, 100), (100, 1000), (4320, 6480), (6480, 4320), (48, 80)]
EXTREMES += [(512, 1024), (1024, 512), (1024, 528), (528, 1040), (1, 20_000), (512, 512), (1000, 1000)]
# Patch, patches a feature each way, and fields of the image processor.
SETTINGS = {
    "published": (16, 2, {}),
    "without a thumbnail": (16, 2, {"use_thumbnail": False}),
    "odd": (
        7,
        3,
        {"min_tiles": 1, "max_tiles": 7, "min_image_tokens": 9, "max_image_tokens": 30, "tile_size": 105}
        | {"max_pixels_tolerance": 1.3},
    ),
    "whole": (16, 2, {"do_image_splitting": False, "min_image_tokens": 16}),
}
PLACES = [f"<|img_row_{row}_col_{column}|>" for row in range(1, 11) for column in range(1, 11)]
TOKENS = ("<unk>", "<pad>", "<image>", "<|image_start|>", "<|image_end|>", "<|img_thumbnail|>", *PLACES)


@pytest.fixture(scope="module", params=list(SETTINGS))
def setting(request):
    """Configuration, processor and our rule of one setting."""
    torch.set_num_threads(1)
    patch, factor, fields = SETTINGS[request.param]
    small = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    config = Lfm2VlConfig(
        vision_config={
            "model_type": "siglip2_vision_model", "patch_size": patch, "num_patches": 16,
            "vision_use_head": False, **small,
        },
        text_config={
            "model_type": "lfm2", "vocab_size": len(TOKENS), "num_key_value_heads": 2,
            "layer_types": ["conv"], **small,
        },
        image_token_id=2,
        downsample_factor=factor,
        projector_hidden_size=16,
    )  # fmt: skip
    words = Tokenizer(WordLevel({token: n for n, token in enumerate(TOKENS)}, unk_token="<unk>"))
    words.pre_tokenizer = Split(" ", "isolated")
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=words, unk_token="<unk>", pad_token="<pad>")
    tokenizer.add_special_tokens({"additional_special_tokens": list(TOKENS[2:])})
    # Pixel values decide no shape; without their arithmetic many megapixels take less time.
    cheap = {"do_rescale": False, "do_normalize": False, "resample": 0}
    fields = {"encoder_patch_size": patch, "downsample_factor": factor, **fields}
    images = Lfm2VlImageProcessor(**cheap, **fields)
    config_json, preprocessor_json = json.dumps(config.to_dict()), images.to_json_string()

    def shape(height, width):
        return testing.media_shape(config_json, preprocessor_json, "{}", "image", height=height, width=width)

    processor = Lfm2VlProcessor(images, tokenizer)
    return SimpleNamespace(config=config, processor=processor, shape=shape, patch=patch, factor=factor)


def written(shape):
    """The text of a shape's pieces, with the features spelt out."""
    return "".join(text if text is not None else "<image>" * count for text, count in shape.pieces)


def segments_of(images, height, width):
    """Patches of each tile and of the thumbnail, and what the processor tells of them, by its own functions."""
    names = ("downsample_factor", "min_image_tokens", "max_image_tokens", "encoder_patch_size")
    whole = {name: getattr(images, name) for name in names}
    columns, rows = images.smart_resize(height, width, **whole)
    size, thumbnail = (rows, columns), rows * columns // images.encoder_patch_size**2
    del whole["min_image_tokens"]
    is_large = images._is_image_too_large(
        height, width, **whole, max_pixels_tolerance=images.max_pixels_tolerance
    )
    if not (is_large and images.do_image_splitting):
        return [thumbnail], (1, 1, size)
    columns, rows, *_ = images._get_grid_layout(
        height, width, images.min_tiles, images.max_tiles, images.tile_size
    )
    found = [(images.tile_size // images.encoder_patch_size) ** 2] * (rows * columns)
    if images.use_thumbnail and rows * columns > 1:
        found.append(thumbnail)
    return found, (rows, columns, size)


def test_thousands_of_sizes(setting):
    """Sides, grid and text by the processor's own functions; refused is what its model could not read."""
    images, refused = setting.processor.image_processor, 0
    for size in EXTREMES + drawn_sizes(SEED, 2000):
        segments, (rows, columns, resized) = segments_of(images, *size)
        told = {"image_rows": [rows], "image_cols": [columns], "image_sizes": [resized]}
        text = setting.processor.replace_image_token(told, 0, use_image_special_tokens=True)
        shape = outcome(lambda size=size: setting.shape(*size))
        features = text.count("<image>")
        if max(segments) > images.max_num_patches or features * setting.factor**2 != sum(segments):
            assert shape == "refused", size
            refused += 1
            continue
        assert shape != "refused", size
        assert [tokens for count, tokens in shape.segments for _ in range(count)] == segments, size
        assert shape.num_tiles == len(segments)
        sides = [shape.patches, *([shape.last_patches] if shape.last_patches else [])]
        assert [rows * columns for rows, columns in sides] == [tokens for _, tokens in shape.segments]
        assert shape.parts == [(n, 1, tokens // setting.factor**2) for n, tokens in shape.segments]
        assert text == written(shape), size
    assert refused < 1200


def test_the_whole_processor_and_model(setting):
    """Sizes and ids of the call itself, and a forward, which compares placeholders with features."""
    torch.manual_seed(SEED)
    model = Lfm2VlForConditionalGeneration(setting.config).eval()
    drawn = [size for size in drawn_sizes(SEED, 60, largest=1800) if min(size) > 20]
    drawn = [size for size in drawn if outcome(lambda size=size: setting.shape(*size)) != "refused"][:12]
    cut = 0
    for sample in [[size] for size in [*drawn, (700, 1100)]] + [drawn[:3]]:
        encoded = setting.processor(
            images=[torch.zeros(3, *size, dtype=torch.uint8) for size in sample],
            text=" ".join(["<image>"] * len(sample)),
            return_tensors="pt",
        )
        shapes = [setting.shape(*size) for size in sample]
        cut += any(shape.num_tiles > 1 for shape in shapes)
        expected = setting.processor.tokenizer(" ".join(written(shape) for shape in shapes))["input_ids"]
        assert encoded["input_ids"][0].tolist() == expected, sample
        sides = [list(sides) for shape in shapes for sides in sides_of_tiles(shape)]
        assert encoded["spatial_shapes"].tolist() == sides, sample
        assert encoded["pixel_attention_mask"].sum(1).tolist() == [int(np.prod(each)) for each in sides]
        with torch.no_grad():
            model(**encoded | {"pixel_values": encoded["pixel_values"].float() / 255}, use_cache=False)
    assert (cut > 0) == setting.processor.image_processor.do_image_splitting


def sides_of_tiles(shape):
    """Rows and columns of patches of each tile, and of the thumbnail."""
    last = [shape.last_patches] if shape.last_patches else []
    return [shape.patches] * (shape.num_tiles - len(last)) + last
