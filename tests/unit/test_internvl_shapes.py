"""The InternVL shape rule equals Hugging Face's processors and model, integer for integer."""

import json
import os
import random
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import WhitespaceSplit
from transformers import (
    GotOcr2ImageProcessor,
    GotOcr2ImageProcessorPil,
    InternVLConfig,
    InternVLForConditionalGeneration,
    InternVLProcessor,
    InternVLVideoProcessor,
    PreTrainedTokenizerFast,
)
from transformers.video_utils import VideoMetadata

import dflop
from dflop._native import testing

SEED = int(os.environ.get("DFLOP_TEST_SEED", "20261120"))
# (height, width): a pixel, lines of pixels, 10:1, 28 megapixels both ways, and the edges of one tile.
EXTREMES = [(1, 1), (1, 6000), (6000, 1), (1000, 100), (100, 1000), (4320, 6480), (6480, 4320), (448, 448)]
EXTREMES += [(449, 448), (900, 900), (1, 2), (2, 1), (634, 634), (633, 633)]
# Side of a tile, of a patch, downsample ratio, fields of the image processor.
SETTINGS = {
    "real": (448, 14, 0.5, {}),
    # The processor asks for crops whatever the file says.
    "uncropped": (56, 14, 0.5, {"crop_to_patches": False, "min_patches": 1, "max_patches": 12}),
    "few": (56, 14, 0.5, {"min_patches": 2, "max_patches": 6}),
    "many": (32, 8, 0.25, {"min_patches": 1, "max_patches": 40}),
    "one": (32, 8, 1.0, {"max_patches": 1}),
    "none": (32, 8, 0.5, {"min_patches": 5, "max_patches": 4}),
}
TOKENS = {"<unk>": 0, "<IMG_CONTEXT>": 1, "<img>": 2, "</img>": 3, "<video>": 4, "<pad>": 5}


@pytest.fixture(scope="module", params=list(SETTINGS))
def setting(request):
    """Configuration, processor and our rule of one setting."""
    torch.set_num_threads(1)
    side, patch, ratio, fields = SETTINGS[request.param]
    tile_features = int((side // patch) ** 2 * ratio**2)
    small = {"intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "hidden_size": 16}
    config = InternVLConfig(
        vision_config={"image_size": side, "patch_size": patch, **small},
        text_config={"model_type": "qwen2", "vocab_size": 8, "num_key_value_heads": 2, **small},
        image_token_id=1,
        downsample_ratio=ratio,
        image_seq_length=tile_features,
    )
    words = Tokenizer(WordLevel(TOKENS, unk_token="<unk>"))
    words.pre_tokenizer = WhitespaceSplit()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=words,
        unk_token="<unk>",
        pad_token="<pad>",
        extra_special_tokens={
            "context_image_token": "<IMG_CONTEXT>",
            "start_image_token": "<img>",
            "end_image_token": "</img>",
            "video_token": "<video>",
        },
    )
    # Pixel values decide no shape; without their arithmetic many megapixels take less time.
    cheap = {
        "do_rescale": False,
        "do_normalize": False,
        "resample": 0,
        "size": {"height": side, "width": side},
    }
    processor = InternVLProcessor(
        GotOcr2ImageProcessorPil(**cheap, **fields),
        tokenizer,
        InternVLVideoProcessor(**cheap),
        image_seq_length=tile_features,
    )
    config_json = json.dumps(config.to_diff_dict())
    preprocessor_json = processor.image_processor.to_json_string()
    video_json = processor.video_processor.to_json_string()

    def shape(kind, height, width, **more):
        return testing.media_shape(
            config_json, preprocessor_json, video_json, kind, height=height, width=width, **more
        )

    return SimpleNamespace(
        config=config,
        processor=processor,
        shape=shape,
        side=side,
        tile_features=tile_features,
        tile_tokens=(side // patch) ** 2 + 1,
        config_json=config_json,
        preprocessor_json=preprocessor_json,
    )


def sizes(count, largest=6000):
    """The extremes, and sizes drawn log-uniformly from 1 to `largest` pixels a side."""
    print(f"DFLOP_TEST_SEED={SEED}")
    rng = random.Random(SEED)
    drawn = [(round(largest ** rng.random()), round(largest ** rng.random())) for _ in range(count)]
    # Equal aspect ratios tie: the area then decides, and half a grid's area is where.
    for _ in range(count // 4):
        side = rng.randint(1, 1500)
        drawn.append((side * rng.randint(1, 4), side * rng.randint(1, 4)))
    return EXTREMES + drawn


def pixels(height, width):
    return np.zeros((height, width, 3), dtype=np.uint8)


def written(shape):
    """The text of a shape's pieces, with the features spelt out."""
    return "".join(text if text is not None else "<IMG_CONTEXT>" * count for text, count in shape.pieces)


def test_thousands_of_sizes(setting):
    """Tiles and tokens as the processor counts them; two of the tokens are marks."""
    drawn = sizes(1600)
    counted = setting.processor._get_num_multimodal_tokens(image_sizes=[list(size) for size in drawn])
    for size, tiles, tokens in zip(
        drawn, counted["num_image_patches"], counted["num_image_tokens"], strict=True
    ):
        shape = setting.shape("image", *size)
        assert (shape.num_tiles, shape.feature_tokens) == (tiles, tokens - 2), size
        assert shape.segments == [(tiles, setting.tile_tokens)], size


def test_the_whole_processor(setting):
    """Pixel values and placeholders of the call itself, for samples of one image and of several."""
    drawn = [size for size in sizes(45, largest=900) if max(size) < 1200]
    for sample in [[size] for size in drawn] + [drawn[:3], drawn[-2:]]:
        encoded = setting.processor(
            images=[pixels(*size) for size in sample],
            text=" ".join(["<IMG_CONTEXT>"] * len(sample)),
            images_kwargs={"input_data_format": "channels_last"},
            return_tensors="pt",
        )
        shapes = [setting.shape("image", *size, num_images=len(sample)) for size in sample]
        tiles = sum(shape.num_tiles for shape in shapes)
        assert encoded["pixel_values"].shape == (tiles, 3, setting.side, setting.side), sample
        expected = setting.processor.tokenizer(" ".join(written(shape) for shape in shapes))["input_ids"]
        assert encoded["input_ids"][0].tolist() == expected, sample


def test_the_torchvision_processor_cuts_the_same_tiles():
    """What transformers uses where torchvision is installed."""
    torchvision_processor = GotOcr2ImageProcessor(
        crop_to_patches=True, size={"height": 32, "width": 32}, min_patches=1, max_patches=12
    )
    config_json = json.dumps(
        {
            "model_type": "internvl",
            "vision_config": {"image_size": 32, "patch_size": 8},
            "image_seq_length": 4,
        }
    )
    for height, width in sizes(40, largest=200):
        if max(height, width) < 1200:
            found = torchvision_processor(torch.zeros(3, height, width), return_tensors="pt")["num_patches"]
            shape = testing.media_shape(
                config_json, torchvision_processor.to_json_string(), "{}", "image", height=height, width=width
            )
            assert found.tolist() == [shape.num_tiles], (height, width)


@pytest.mark.parametrize("setting", ["few", "real"], indirect=True)
@pytest.mark.parametrize("num_frames", [1, 2, 7])
def test_video(setting, num_frames):
    """One tile a frame, each named, all frames where nobody asks for fewer."""
    clip = np.zeros((num_frames, 48, 64, 3), dtype=np.uint8)
    encoded = setting.processor(videos=[clip], text="<video>", return_tensors="pt")
    shape = setting.shape("video", 48, 64, num_frames=num_frames, fps=5.0)
    assert encoded["pixel_values"].shape == (num_frames, 3, setting.side, setting.side)
    assert shape.segments == [(num_frames, setting.tile_tokens)]
    assert shape.frame_indices == list(range(num_frames))
    assert encoded["input_ids"][0].tolist() == setting.processor.tokenizer(written(shape))["input_ids"]
    replaced = setting.processor.replace_video_token(
        {"pixel_values_videos": encoded["pixel_values"][None]}, 0
    )
    assert replaced == written(shape)


def test_frames_are_those_of_the_video_processor():
    """Frames for settings of the files and for what the user asks; refusals where the processor raises."""
    rng = random.Random(SEED)
    base = {"size": {"height": 448, "width": 448}, "do_sample_frames": True}
    config_json = json.dumps({"model_type": "internvl"})
    refused = 0
    for _ in range(3000):
        total = round(10_000 ** rng.random())
        fps = rng.choice([1.0, 12.5, 23.976, 24, 29.97, 30, 60])
        fields = dict(base)
        if rng.random() < 0.5:
            fields["num_frames"] = round(64 ** rng.random())
        else:
            fields["fps"] = rng.choice([0.1, 0.5, 1, 2, 3.7])
        if rng.random() < 0.5:
            fields["initial_shift"] = rng.choice([True, False, 0, 1, 0.5, 7])
        processor = InternVLVideoProcessor(**fields)
        try:
            # `preprocess` hands over its own settings.
            expected = processor.sample_frames(
                VideoMetadata(total_num_frames=total, fps=fps, duration=total / fps),
                num_frames=fields.get("num_frames"),
                fps=fields.get("fps"),
                initial_shift=processor.initial_shift,
            ).tolist()
        except (ValueError, RuntimeError, ZeroDivisionError):
            expected = []
        # A frame past the end is an IndexError when the frames are taken.
        if expected and expected[-1] >= total:
            expected = []
        arguments = {"height": 48, "width": 64, "num_frames": total, "fps": fps, "duration_s": total / fps}
        preprocessor_json = json.dumps({"size": fields["size"]})
        if not expected:
            refused += 1
            with pytest.raises(dflop.ProfileError, match="no internvl shape for a video"):
                testing.media_shape(config_json, preprocessor_json, json.dumps(fields), "video", **arguments)
            continue
        shape = testing.media_shape(config_json, preprocessor_json, json.dumps(fields), "video", **arguments)
        assert shape.frame_indices == expected, (fields, total, fps)
        # Asked by the user, the same number gives the same frames whatever the files say.
        if "initial_shift" not in fields:
            asked = {"max_frames": fields.get("num_frames"), "sample_fps": fields.get("fps")}
            plain = json.dumps({"size": fields["size"]})
            shape = testing.media_shape(config_json, preprocessor_json, plain, "video", **arguments, **asked)
            assert shape.frame_indices == expected, (asked, total, fps)
    assert 0 < refused < 1500


@pytest.mark.parametrize("setting", ["few", "many", "one"], indirect=True)
def test_the_whole_model_takes_them(setting):
    """A forward of a small model, which itself compares placeholders with features, for each kind."""
    torch.manual_seed(SEED)
    model = InternVLForConditionalGeneration(setting.config).eval()
    seen = []
    hook = model.model.vision_tower.encoder.register_forward_pre_hook(
        lambda _, args: seen.append(tuple(args[0].shape[:2]))
    )
    clip = np.zeros((3, 48, 64, 3), dtype=np.uint8)
    both = "<IMG_CONTEXT> <IMG_CONTEXT>"
    prompts = [
        ({"images": [pixels(100, 300)], "text": "<IMG_CONTEXT>"}, [("image", 100, 300)]),
        ({"images": [pixels(50, 90), pixels(90, 50)], "text": both}, [("image", 50, 90), ("image", 90, 50)]),
        ({"videos": [clip], "text": "<video>"}, [("video", 48, 64)]),
    ]
    for prompt, shown in prompts:
        kwargs = {"images_kwargs": {"input_data_format": "channels_last"}} if "images" in prompt else {}
        encoded = setting.processor(**prompt, **kwargs, return_tensors="pt")
        encoded["pixel_values"] = encoded["pixel_values"].float() / 255
        encoded.pop("token_type_ids", None)
        shapes = [
            setting.shape(kind, height, width, num_images=len(shown), num_frames=3)
            for kind, height, width in shown
        ]
        with torch.no_grad():
            model(**encoded, use_cache=False)
        assert int((encoded["input_ids"] == 1).sum()) == sum(shape.feature_tokens for shape in shapes)
        assert seen[-1] == (sum(shape.num_tiles for shape in shapes), setting.tile_tokens)
        assert {tokens for shape in shapes for _, tokens in shape.segments} == {setting.tile_tokens}
    hook.remove()


def test_the_files_that_transformers_saves_are_read(setting, tmp_path):
    """`config.json` and the one file into which the processor writes all its fields."""
    setting.config.save_pretrained(tmp_path)
    setting.processor.save_pretrained(tmp_path)
    config_json = (tmp_path / "config.json").read_text()
    processor_json = (tmp_path / "processor_config.json").read_text()
    for kind in ("image", "video"):
        size = {"height": 123, "width": 456, "num_frames": 5, "fps": 2.0}
        shape = testing.media_shape(config_json, processor_json, "{}", kind, **size)
        expected = setting.shape(kind, **size)
        assert (shape.num_tiles, shape.segments) == (expected.num_tiles, expected.segments)
        assert (shape.pieces, shape.frame_indices) == (expected.pieces, expected.frame_indices)
