"""The LLaVA 1.5 shape rule equals Hugging Face's processor and model, integer for integer."""

import json
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from transformers import (
    CLIPImageProcessorPil,
    LlavaConfig,
    LlavaForConditionalGeneration,
    LlavaImageProcessorPil,
    LlavaProcessor,
    PreTrainedTokenizerFast,
    SiglipImageProcessorPil,
)

from dflop._native import testing

SIZES = [(1, 1), (1, 90), (90, 1), (56, 56), (57, 56), (300, 100), (33, 480), (640, 480)]
SQUARE = {"height": 56, "width": 56}
CUT = {"size": {"shortest_edge": 56}, "crop_size": SQUARE}
# Encoder, patch, strategy, image processor.
SETTINGS = {
    "clip": ("clip_vision_model", 14, "default", CLIPImageProcessorPil(**CUT)),
    "clip full": ("clip_vision_model", 14, "full", CLIPImageProcessorPil(**CUT)),
    "padded to a square": ("clip_vision_model", 14, "default", LlavaImageProcessorPil(**CUT, do_pad=True)),
    # A patch that does not fill the side.
    "odd": ("clip_vision_model", 13, "default", CLIPImageProcessorPil(crop_size=56, size=64)),
    "siglip": ("siglip_vision_model", 14, "full", SiglipImageProcessorPil(size=SQUARE)),
    "siglip default": ("siglip_vision_model", 14, "default", SiglipImageProcessorPil(size=SQUARE)),
}


@pytest.fixture(scope="module", params=list(SETTINGS))
def setting(request):
    """Configuration, processor and our rule of one setting."""
    torch.set_num_threads(1)
    encoder, patch, strategy, image_processor = SETTINGS[request.param]
    small = {"intermediate_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "hidden_size": 16}
    config = LlavaConfig(
        vision_config={"model_type": encoder, "image_size": 56, "patch_size": patch, **small},
        text_config={"model_type": "llama", "vocab_size": 8, "num_key_value_heads": 2, **small},
        image_token_index=1,
        vision_feature_select_strategy=strategy,
    )
    words = Tokenizer(WordLevel({"<unk>": 0, "<image>": 1, "<pad>": 2}, unk_token="<unk>"))
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=words, unk_token="<unk>", pad_token="<pad>", additional_special_tokens=["<image>"]
    )
    processor = LlavaProcessor(
        image_processor,
        tokenizer,
        patch_size=patch,
        num_additional_image_tokens=int(encoder == "clip_vision_model"),
        vision_feature_select_strategy=strategy,
    )
    return SimpleNamespace(config=config, processor=processor)


def encoded(setting, sample):
    """What the processor makes of a sample of images, each of this (height, width)."""
    return setting.processor(
        images=[np.full((*size, 3), 90, dtype=np.uint8) for size in sample],
        text="<image>" * len(sample),
        images_kwargs={"input_data_format": "channels_last"},
        return_tensors="pt",
    )


def ours(setting, files, size, num_images=1):
    """Tiles, segments and features of an image by the rule, from the files of a model directory."""
    config_json = json.dumps(setting.config.to_diff_dict())
    height, width = size
    shape = testing.media_shape(
        config_json, files, "{}", "image", height=height, width=width, num_images=num_images
    )
    return shape.num_tiles, shape.segments, shape.feature_tokens


def files_of(setting, folder):
    """`preprocessor_config.json`, and the processor's own file, as transformers writes them."""
    setting.processor.save_pretrained(folder)
    return [
        setting.processor.image_processor.to_json_string(),
        (folder / "processor_config.json").read_text(),
    ]


def test_sizes_by_the_processor(setting, tmp_path):
    """Tokens as the processor writes them, whatever the image; from either file."""
    for files in files_of(setting, tmp_path):
        for sample in [[size] for size in SIZES] + [SIZES[3:6]]:
            found = encoded(setting, sample)
            shapes = [ours(setting, files, size, len(sample)) for size in sample]
            assert [tiles for tiles, _, _ in shapes] == [1] * len(sample)
            assert found["pixel_values"].shape == (len(sample), 3, 56, 56)
            assert int((found["input_ids"] == 1).sum()) == sum(tokens for _, _, tokens in shapes)


def test_the_whole_model_takes_them(setting):
    """A forward of a small model, which itself compares placeholders with features."""
    model = LlavaForConditionalGeneration(setting.config).eval()
    seen = []
    layers = model.model.vision_tower.get_submodule("encoder")
    layers.register_forward_pre_hook(
        lambda _, args, kwargs: seen.append(kwargs["inputs_embeds"].shape[:2]), with_kwargs=True
    )
    files = setting.processor.image_processor.to_json_string()
    for sample in [[(100, 30)], [(50, 90), (90, 50)]]:
        with torch.no_grad():
            logits = model(**encoded(setting, sample), use_cache=False).logits
        shapes = [ours(setting, files, size, len(sample)) for size in sample]
        assert logits.shape[1] == sum(tokens for _, _, tokens in shapes)
        assert [tuple(seen[-1])] * len(sample) == [
            (len(sample), tokens) for _, segments, _ in shapes for _, tokens in segments
        ]
