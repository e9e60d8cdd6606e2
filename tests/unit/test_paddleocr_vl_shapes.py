"""The shape rule of PaddleOCR-VL equals Hugging Face's processor and model, integer for integer."""

import json
import os

import numpy as np
import pytest
import torch
from shape_oracle import drawn_sizes, outcome
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Split
from transformers import (
    PaddleOCRVLConfig,
    PaddleOCRVLForConditionalGeneration,
    PaddleOCRVLImageProcessorPil,
    PaddleOCRVLProcessor,
    PreTrainedTokenizerFast,
)
from transformers.models.paddleocr_vl.image_processing_pil_paddleocr_vl import smart_resize

from dflop._native import testing

SEED = int(os.environ.get("DFLOP_TEST_SEED", "20261128"))
# (height, width): pixels, lines of pixels, both sides of 200:1, sides around a feature, many megapixels both ways.
EXTREMES = [
    (1, 1),
    (1, 200),
    (1, 201),
    (200, 1),
    (201, 1),
    (27, 5600),
    (28, 5600),
    (28, 5601),
    (5, 9),
    (9, 5),
]
EXTREMES += [
    (27, 29),
    (28, 28),
    (42, 70),
    (8, 3),
    (3, 8),
    (4320, 6480),
    (6480, 4320),
    (65_535, 400),
    (14, 14),
]
# Of the configuration; of the image processor.
SETTINGS = {
    "default": ({}, {}),
    "hub": ({"temporal_patch_size": 2}, {"min_pixels": 147_384, "max_pixels": 2_822_400}),
    "other": (
        {"patch_size": 8, "spatial_merge_size": 3},
        {"patch_size": 8, "merge_size": 3, "size": {"shortest_edge": 900, "longest_edge": 40_000}},
    ),
}
MARK = "<|IMAGE_PLACEHOLDER|>"
TOKENS = {token: index for index, token in enumerate(("<unk>", "<pad>", MARK))}


@pytest.fixture(scope="module", params=list(SETTINGS))
def setting(request):
    """Files of the model, its image processor, and our rule."""
    torch.set_num_threads(1)
    vision, preprocessor = SETTINGS[request.param]
    config_json = json.dumps({"model_type": "paddleocr_vl", "vision_config": vision})
    # Pixel values decide no shape; without their arithmetic many megapixels take less time.
    cheap = {"do_rescale": False, "do_normalize": False, "resample": 0}
    images = PaddleOCRVLImageProcessorPil(**preprocessor, **cheap)

    def shape(height, width, file=None):
        file = json.dumps(preprocessor if file is None else file)
        return testing.media_shape(config_json, file, "{}", "image", height=height, width=width)

    return vision, images, shape


def test_thousands_of_sizes(setting):
    """By the processor's own function, which refuses what we refuse."""
    _, images, shape = setting
    factor, refused = images.patch_size * images.merge_size, 0
    limits = {"min_pixels": images.size["shortest_edge"], "max_pixels": images.size["longest_edge"]}
    # Short sides are scaled up first, which only rounding decides.
    narrow = [(height, width) for height in range(1, 30) for width in range(1, 140, 3)]
    for size in EXTREMES + narrow + drawn_sizes(SEED, 2000):
        sides = outcome(lambda size=size: smart_resize(*size, factor=factor, **limits))
        ours = outcome(lambda size=size: shape(*size))
        if sides == "refused":
            assert ours == "refused", size
            refused += 1
            continue
        assert ours != "refused", size
        patches = tuple(side // images.patch_size for side in sides)
        assert ours.patches == patches, size
        assert ours.segments == [(1, patches[0] * patches[1])]
        assert ours.pieces == [(None, patches[0] * patches[1] // images.merge_size**2)]
    assert 0 < refused < 1000


@pytest.mark.some(1)
def test_the_whole_processor_and_model(setting):
    """Ids of the call itself, and a forward, which compares places with features."""
    vision, images, shape = setting
    small = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    config = PaddleOCRVLConfig(
        vision_config={**vision, **small, "image_size": 56},
        text_config={
            **small, "vocab_size": 16, "num_key_value_heads": 1, "head_dim": 8,
            "rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [2, 1, 1]},
        },
        image_token_id=TOKENS[MARK],
    )  # fmt: skip
    words = Tokenizer(WordLevel(TOKENS, unk_token="<unk>"))
    words.pre_tokenizer = Split(" ", "isolated")
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=words, unk_token="<unk>", pad_token="<pad>")
    tokenizer.add_special_tokens({"additional_special_tokens": [MARK]})
    tokenizer.image_token, tokenizer.image_token_id = MARK, TOKENS[MARK]
    processor = PaddleOCRVLProcessor(images, tokenizer)
    model = PaddleOCRVLForConditionalGeneration(config).eval()
    drawn = drawn_sizes(SEED, 14, largest=300)
    for sample in [[size] for size in drawn] + [drawn[:3]]:
        encoded = processor(
            images=[np.zeros((*size, 3), dtype=np.uint8) for size in sample],
            text=" ".join([MARK] * len(sample)),
            images_kwargs={"input_data_format": "channels_last"},
            return_tensors="pt",
        )
        shapes = [shape(*size) for size in sample]
        assert encoded["image_grid_thw"].tolist() == [[1, *one.patches] for one in shapes], sample
        text = " ".join(MARK * one.pieces[0][1] for one in shapes)
        assert encoded["input_ids"][0].tolist() == processor.tokenizer(text)["input_ids"], sample
        with torch.no_grad():
            model(**{**encoded, "pixel_values": encoded["pixel_values"].float() / 255})


def test_files_as_transformers_writes_them(setting, tmp_path):
    """`save_pretrained` names all fields, of which some are not used."""
    _, images, shape = setting
    images.save_pretrained(tmp_path)
    file = json.loads((tmp_path / "preprocessor_config.json").read_text())
    for size in [(1000, 800), (40, 90), (3000, 2100)]:
        assert shape(*size, file).patches == shape(*size).patches
