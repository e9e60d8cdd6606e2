"""The LLaVA-NeXT shape rule equals Hugging Face's processor and model, integer for integer."""

import json
import os
import random
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from shape_oracle import drawn_sizes
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from transformers import (
    LlavaNextConfig,
    LlavaNextForConditionalGeneration,
    LlavaNextImageProcessorPil,
    LlavaNextProcessor,
    PreTrainedTokenizerFast,
)
from transformers.models.llava_next.modeling_llava_next import LlavaNextModel, image_size_to_num_patches

import dflop
from dflop._native import testing

SEED = int(os.environ.get("DFLOP_TEST_SEED", "20261120"))
# (height, width): a pixel, lines of pixels, 10:1, 28 megapixels both ways, and the edges of one tile.
EXTREMES = [(1, 1), (1, 6000), (6000, 1), (1000, 100), (100, 1000), (4320, 6480), (6480, 4320), (336, 336)]
EXTREMES += [(337, 336), (672, 672), (1, 2), (2, 1)]
DEFAULT = [[336, 672], [672, 336], [672, 672], [1008, 336], [336, 1008]]
# Side of a tile, of a patch, pinpoints, encoder.
SETTINGS = {
    "real": (336, 14, DEFAULT, "clip_vision_model"),
    "many": (56, 14, [[56 * h, 56 * w] for h in range(1, 7) for w in range(1, 7)], "clip_vision_model"),
    "siglip": (84, 12, [[84, 168], [252, 84], [168, 168]], "siglip_vision_model"),
    # An odd number of patches a side, which does not fill the tile either.
    "odd": (70, 13, [[70, 70], [70, 210], [210, 140]], "clip_vision_model"),
    "one": (64, 32, [[64, 64]], "clip_vision_model"),
}


@pytest.fixture(scope="module", params=list(SETTINGS))
def setting(request):
    """Configuration, processor and our rule of one setting."""
    torch.set_num_threads(1)
    side, patch, pinpoints, encoder = SETTINGS[request.param]
    num_cls = int(encoder == "clip_vision_model")
    small = {"intermediate_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "hidden_size": 16}
    config = LlavaNextConfig(
        vision_config={"model_type": encoder, "image_size": side, "patch_size": patch, **small},
        text_config={"model_type": "llama", "vocab_size": 8, "num_key_value_heads": 2, **small},
        image_grid_pinpoints=pinpoints,
        image_token_index=1,
        vision_feature_select_strategy="default" if num_cls else "full",
    )
    words = Tokenizer(WordLevel({"<unk>": 0, "<image>": 1, "<pad>": 2}, unk_token="<unk>"))
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=words, unk_token="<unk>", pad_token="<pad>", additional_special_tokens=["<image>"]
    )
    # Pixel values decide no shape; without their arithmetic many megapixels take less time.
    cheap = {"do_rescale": False, "do_normalize": False, "resample": 0}
    processor = LlavaNextProcessor(
        LlavaNextImageProcessorPil(
            size={"shortest_edge": side},
            crop_size={"height": side, "width": side},
            image_grid_pinpoints=pinpoints,
            **cheap,
        ),
        tokenizer,
        patch_size=patch,
        num_additional_image_tokens=num_cls,
        vision_feature_select_strategy=config.vision_feature_select_strategy,
    )
    config_json = json.dumps(config.to_diff_dict())
    preprocessor_json = processor.image_processor.to_json_string()

    def ours(height, width, num_images=1):
        shape = testing.media_shape(
            config_json, preprocessor_json, "{}", "image", height=height, width=width, num_images=num_images
        )
        return shape.num_tiles, shape.segments, shape.feature_tokens

    return SimpleNamespace(
        config=config,
        processor=processor,
        ours=ours,
        side=side,
        pinpoints=pinpoints,
        tile_features=(side // patch) ** 2,
        tile_tokens=(side // patch) ** 2 + num_cls,
        config_json=config_json,
    )


def edges(pinpoints, count):
    """Sizes about those at which the best pinpoint or the padding changes."""
    rng = random.Random(SEED)
    near = []
    for _ in range(count):
        height, width = rng.choice(pinpoints)
        times = rng.choice([1, 2, 3, 0.5, rng.uniform(0.1, 4)])
        moved = [max(1, int(side * times) + rng.randint(-2, 2)) for side in (height, width)]
        near.append(tuple(moved))
    return near


def pixels(height, width):
    return np.zeros((height, width, 3), dtype=np.uint8)


def test_thousands_of_sizes(setting):
    """Tiles as the model counts them, tokens as the processor does."""
    drawn = EXTREMES + drawn_sizes(SEED, 1500) + edges(setting.pinpoints, 500)
    expected_tokens = setting.processor._get_num_multimodal_tokens(image_sizes=[list(size) for size in drawn])
    for size, tokens in zip(drawn, expected_tokens["num_image_tokens"], strict=True):
        tiles = image_size_to_num_patches(size, setting.pinpoints, setting.side)
        assert setting.ours(*size) == (tiles, [(tiles, setting.tile_tokens)], tokens), size


def test_the_model_packs_as_many(setting):
    """Features that the model's own unpadding and packing leave of tiles of one channel."""
    for size in EXTREMES + drawn_sizes(SEED, 60):
        tiles, _, tokens = setting.ours(*size)
        packed, lengths = LlavaNextModel.pack_image_features(
            SimpleNamespace(config=setting.config),
            [torch.zeros(tiles, setting.tile_features, 1)],
            torch.tensor([size]),
            vision_feature_select_strategy=setting.config.vision_feature_select_strategy,
            image_newline=torch.zeros(1),
        )
        assert [tokens] == lengths.tolist() == [len(packed[0])], size


def test_the_whole_processor(setting):
    """Pixel values and placeholders of the call itself, for samples of one image and of several."""
    drawn = [size for size in EXTREMES + drawn_sizes(SEED, 45, largest=900) if max(size) < 1200]
    samples = [[size] for size in drawn] + [drawn[:3], drawn[-2:]]
    for sample in samples:
        encoded = setting.processor(
            images=[pixels(*size) for size in sample],
            text="<image>" * len(sample),
            images_kwargs={"input_data_format": "channels_last"},
            return_tensors="pt",
        )
        shapes = [setting.ours(*size, num_images=len(sample)) for size in sample]
        # The tiles of all images, each padded to the same number of tiles.
        most = max(tiles for tiles, _, _ in shapes)
        assert encoded["pixel_values"].shape == (len(sample), most, 3, setting.side, setting.side)
        assert int((encoded["input_ids"] == 1).sum()) == sum(tokens for _, _, tokens in shapes), sample


@pytest.mark.parametrize("setting", ["many", "siglip", "one"], indirect=True)
def test_the_whole_model_takes_them(setting):
    """A forward of a small model, which itself compares placeholders with features."""
    torch.manual_seed(SEED)
    model = LlavaNextForConditionalGeneration(setting.config).eval()
    seen = []
    embeddings = model.model.vision_tower.get_submodule("encoder").register_forward_pre_hook(
        lambda _, args, kwargs: seen.append(kwargs["inputs_embeds"].shape[:2]), with_kwargs=True
    )
    for sample in [[(100, 300)], [(333, 61)], [(50, 90), (90, 50)]]:
        encoded = setting.processor(
            images=[pixels(*size) for size in sample],
            text="<image>" * len(sample),
            images_kwargs={"input_data_format": "channels_last"},
            return_tensors="pt",
        )
        encoded["pixel_values"] = encoded["pixel_values"].float() / 255
        with torch.no_grad():
            logits = model(**encoded, use_cache=False).logits
        shapes = [setting.ours(*size, num_images=len(sample)) for size in sample]
        assert logits.shape[1] == sum(tokens for _, _, tokens in shapes)
        read = [(count, tokens) for _, segments, _ in shapes for count, tokens in segments]
        assert tuple(seen[-1]) == (sum(count for count, _ in read), setting.tile_tokens)
        assert {tokens for _, tokens in read} == {setting.tile_tokens}
    embeddings.remove()


@pytest.mark.parametrize("setting", ["real"], indirect=True)
def test_the_strategy_that_the_model_refuses_is_refused(setting):
    """With its CLS a tile is no grid any more."""
    with pytest.raises(RuntimeError):
        LlavaNextModel.pack_image_features(
            SimpleNamespace(config=setting.config),
            [torch.zeros(5, setting.tile_tokens, 4096)],
            torch.tensor([(672, 672)]),
            vision_feature_select_strategy="full",
            image_newline=torch.zeros(4096),
        )
    config = json.loads(setting.config_json) | {"vision_feature_select_strategy": "full"}
    preprocessor_json = setting.processor.image_processor.to_json_string()
    with pytest.raises(dflop.ProfileError, match='`vision_feature_select_strategy` is "full"'):
        testing.media_shape(json.dumps(config), preprocessor_json, "{}", "image", height=9, width=9)


@pytest.mark.parametrize("setting", ["real"], indirect=True)
def test_videos_are_refused(setting):
    preprocessor_json = setting.processor.image_processor.to_json_string()
    with pytest.raises(dflop.ProfileError, match="no llava_next shape for a video"):
        testing.media_shape(
            setting.config_json, preprocessor_json, "{}", "video", height=9, width=9, num_frames=4
        )


def test_the_files_that_transformers_saves_are_read(setting, tmp_path):
    """`config.json` and the one file into which the processor writes all its fields."""
    setting.config.save_pretrained(tmp_path)
    setting.processor.save_pretrained(tmp_path)
    config_json = (tmp_path / "config.json").read_text()
    processor_json = (tmp_path / "processor_config.json").read_text()
    shape = testing.media_shape(config_json, processor_json, "{}", "image", height=123, width=456)
    assert (shape.num_tiles, shape.segments, shape.feature_tokens) == setting.ours(123, 456)
