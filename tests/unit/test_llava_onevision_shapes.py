"""The LLaVA-OneVision shape rule equals Hugging Face's processor and model, integer for integer."""

import json
import os
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from shape_oracle import TINY_QWEN2, drawn_sizes
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from transformers import (
    LlavaOnevisionConfig,
    LlavaOnevisionForConditionalGeneration,
    LlavaOnevisionImageProcessorPil,
    LlavaOnevisionProcessor,
    LlavaOnevisionVideoProcessor,
    PreTrainedTokenizerFast,
)
from transformers.models.llava_onevision.modeling_llava_onevision import LlavaOnevisionModel

from dflop._native import testing

SEED = int(os.environ.get("DFLOP_TEST_SEED", "20261120"))
NUM_SIZES = 200
# (height, width): a pixel, 10:1, 1:10, 28 megapixels both ways, a line of pixels, and the edges of one tile.
EXTREMES = [(1, 1), (1000, 100), (100, 1000), (4320, 6480), (6480, 4320), (1, 5000), (384, 384), (385, 384)]
SETTINGS = {
    "real": (384, [[384 * h, 384 * w] for h in range(1, 7) for w in range(1, 7)]),
    "tiny": (126, [[126, 126], [126, 252], [252, 126], [252, 252], [126, 378]]),
}


@pytest.fixture(scope="module", params=list(SETTINGS))
def setting(request):
    """Configuration, processor and our rule of one setting."""
    torch.set_num_threads(1)
    side, pinpoints = SETTINGS[request.param]
    config = LlavaOnevisionConfig(
        vision_config={
            "model_type": "siglip_vision_model",
            "image_size": side,
            "patch_size": 14,
            "hidden_size": 16,
            "intermediate_size": 16,
            "num_hidden_layers": 1,
            "num_attention_heads": 2,
            "vision_use_head": False,
        },
        text_config=TINY_QWEN2,
        image_grid_pinpoints=pinpoints,
        image_token_index=1,
        video_token_index=2,
    )
    size = {"height": side, "width": side}
    # Pixel values decide no shape; without their arithmetic 28 megapixels take a second.
    cheap = {"do_rescale": False, "do_normalize": False, "resample": 0}
    words = Tokenizer(WordLevel({"<unk>": 0, "<image>": 1, "<video>": 2, "<pad>": 3}, unk_token="<unk>"))
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=words,
        unk_token="<unk>",
        pad_token="<pad>",
        additional_special_tokens=["<image>", "<video>"],
    )
    processor = LlavaOnevisionProcessor(
        LlavaOnevisionImageProcessorPil(size=size, image_grid_pinpoints=pinpoints, **cheap),
        tokenizer,
        LlavaOnevisionVideoProcessor(size=size, **cheap),
        num_image_tokens=(side // 14) ** 2,
        vision_feature_select_strategy="full",
    )
    config_json = json.dumps(config.to_dict())
    preprocessor_json = processor.image_processor.to_json_string()

    def ours(kind, height, width, num_frames=1):
        several = kind == "multi_image"
        shape = testing.media_shape(
            config_json,
            preprocessor_json,
            "{}",
            "image" if several else kind,
            height=height,
            width=width,
            num_images=2 if several else 1,
            num_frames=num_frames,
            max_frames=num_frames or None,
        )
        encoder_tokens = sum(count * tokens for count, tokens in shape.segments)
        return shape.num_tiles, encoder_tokens, shape.feature_tokens

    return SimpleNamespace(config=config, processor=processor, ours=ours, tile_tokens=(side // 14) ** 2)


def pixels(height, width):
    return np.zeros((height, width, 3), dtype=np.uint8)


def features(config, num_tiles, tile_tokens, height, width):
    """LLM tokens that the model's own packing makes of one image's features."""
    packed, lengths = LlavaOnevisionModel.pack_image_features(
        SimpleNamespace(config=config),
        [torch.zeros(num_tiles, tile_tokens, 1)],
        torch.tensor([[height, width]]),
        image_newline=torch.zeros(1),
        vision_aspect_ratio=config.vision_aspect_ratio,
    )
    assert lengths.tolist() == [len(packed[0])]
    return len(packed[0])


def test_single_images(setting):
    """Tiles of the image processor; tokens of the processor and of the model's packing."""
    for height, width in EXTREMES + drawn_sizes(SEED, NUM_SIZES):
        tiles = setting.processor.image_processor(
            pixels(height, width), return_tensors="np", input_data_format="channels_last"
        )["pixel_values"].shape[1]
        counted = setting.processor._get_num_multimodal_tokens(image_sizes=[[height, width]])
        tokens = counted["num_image_tokens"][0]
        assert features(setting.config, tiles, setting.tile_tokens, height, width) == tokens
        expected = (tiles, tiles * setting.tile_tokens, tokens)
        assert setting.ours("image", height, width) == expected, (height, width)


def test_several_images(setting):
    """One tile each, and as many placeholders as the processor writes into the prompt."""
    drawn = drawn_sizes(SEED, NUM_SIZES)[:6]
    encoded = setting.processor(
        images=[[pixels(*size) for size in drawn]],
        text="<image>" * len(drawn),
        images_kwargs={"input_data_format": "channels_last"},
        return_tensors="pt",
    )
    shapes = [setting.ours("multi_image", *size) for size in drawn]
    # The tiles of all images, each padded to the same number of tiles.
    assert encoded["pixel_values"].shape[:2] == (len(drawn), 1)
    assert shapes == [(1, setting.tile_tokens, setting.tile_tokens + 1)] * len(drawn)
    assert int((encoded["input_ids"] == 1).sum()) == sum(tokens for _, _, tokens in shapes)
    assert features(setting.config, 1, setting.tile_tokens, *drawn[0]) == shapes[0][2]


@pytest.mark.parametrize("num_frames", [1, 2, 7, 32])
def test_video(setting, num_frames):
    """One tile a frame, pooled, and as many placeholders as the processor writes into the prompt."""
    clip = np.zeros((num_frames, 48, 64, 3), dtype=np.uint8)
    encoded = setting.processor(videos=[clip], text="<video>", return_tensors="pt")
    tiles, encoder_tokens, tokens = setting.ours("video", 48, 64, num_frames)
    assert encoded["pixel_values_videos"].shape[:2] == (1, tiles)
    assert encoder_tokens == num_frames * setting.tile_tokens
    assert int((encoded["input_ids"] == 2).sum()) == tokens
    pooled = LlavaOnevisionModel.apply_pooling(
        SimpleNamespace(config=setting.config), torch.zeros(num_frames, setting.tile_tokens, 1)
    )
    assert pooled.shape[0] * pooled.shape[1] + 1 == tokens


@pytest.mark.parametrize("setting", ["tiny"], indirect=True)
def test_the_whole_model_takes_them(setting):
    """A forward of a small model, which itself compares placeholders with features, for each kind."""
    torch.manual_seed(SEED)
    model = LlavaOnevisionForConditionalGeneration(setting.config).eval()
    prompts = [
        ("image", {"images": [pixels(100, 300)], "text": "<image>"}, [(100, 300)]),
        ("image", {"images": [pixels(333, 61)], "text": "<image>"}, [(333, 61)]),
        (
            "multi_image",
            {"images": [[pixels(50, 90), pixels(90, 50)]], "text": "<image>" * 2},
            [(50, 90)] * 2,
        ),
        ("video", {"videos": [np.zeros((5, 48, 64, 3), dtype=np.uint8)], "text": "<video>"}, [(48, 64)]),
    ]
    for kind, prompt, shown in prompts:
        kwargs = {} if kind == "video" else {"images_kwargs": {"input_data_format": "channels_last"}}
        encoded = setting.processor(**prompt, **kwargs, return_tensors="pt")
        for name in ("pixel_values", "pixel_values_videos"):
            if name in encoded:
                encoded[name] = encoded[name].float() / 255
        expected = sum(setting.ours(kind, *size, 5)[2] for size in shown)
        assert encoded["input_ids"].shape[1] == expected
        with torch.no_grad():
            logits = model(**encoded, use_cache=False).logits
        assert logits.shape[1] == expected
