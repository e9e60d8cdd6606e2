"""The shape rule of Qwen2-VL and Qwen2.5-VL equals Hugging Face's processors, integer for integer."""

import json
import os
import random

import numpy as np
import pytest
import torch
from shape_oracle import compare_images, drawn_sizes, our_clip, our_image, outcome
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from transformers import (
    PreTrainedTokenizerFast,
    Qwen2_5_VLConfig,
    Qwen2_5_VLForConditionalGeneration,
    Qwen2_5_VLProcessor,
    Qwen2VLConfig,
    Qwen2VLImageProcessor,
    Qwen2VLImageProcessorPil,
    Qwen2VLProcessor,
    Qwen2VLVideoProcessor,
)
from transformers.video_utils import VideoMetadata
from transformers.vision_utils import get_vision_cu_seqlens

from dflop import ProfileError
from dflop._native import testing

pytestmark = pytest.mark.usefixtures("quiet")
SEED = int(os.environ.get("DFLOP_TEST_SEED", "20261121"))
# (height, width): a pixel, 10:1, 1:10, 28 megapixels, lines of pixels, ratios about 200, half factors.
EXTREMES = [(1, 1), (1000, 100), (100, 1000), (4320, 6480), (6480, 4320), (1, 200), (200, 1), (1, 201)]
EXTREMES += [
    (5, 1001),
    (14, 14),
    (42, 42),
    (70, 98),
    (42, 8400),
    (42, 8401),
    (3, 3),
    (65_535, 65_535),
    (100_000, 600),
]
# What the image processor's file says; {} are transformers' own settings.
IMAGE_SETTINGS = {
    "default": {},
    "real": {"min_pixels": 3136, "max_pixels": 12_845_056, "patch_size": 14, "merge_size": 2},
    "edges": {"size": {"shortest_edge": 200_704, "longest_edge": 1_003_520}},
    "old_names_win": {
        "size": {"shortest_edge": 1, "longest_edge": 2},
        "min_pixels": 50_000,
        "max_pixels": 99_999,
    },
    "half_old": {"size": {"shortest_edge": 4_000, "longest_edge": 40_000}, "max_pixels": 77_777},
    "crossed": {"size": {"shortest_edge": 90_000, "longest_edge": 30_000}},
    "patch_16": {"patch_size": 16, "min_pixels": 256 * 256},
    "no_merge": {"patch_size": 7, "merge_size": 1, "max_pixels": 200_000},
    "merge_3": {"patch_size": 12, "merge_size": 3, "max_pixels": 400_000},
}
VIDEO_SETTINGS = {
    "all_frames": {},
    "fps_2": {"do_sample_frames": True, "fps": 2},
    "slow": {"do_sample_frames": True, "fps": 0.7, "min_frames": 6, "max_frames": 31},
    "fixed": {"do_sample_frames": True, "num_frames": 9},
    "threes": {"do_sample_frames": True, "fps": 3.3, "temporal_patch_size": 3, "max_frames": 20},
    "single": {"do_sample_frames": True, "fps": 1, "temporal_patch_size": 1, "max_frames": 64},
    "capped": {"do_sample_frames": True, "fps": 4, "cap_pixels_per_frame": True, "max_video_tokens": 9_000},
    "pixels": {"min_pixels": 4_000, "size": {"shortest_edge": 9, "longest_edge": 150_000}},
}


def tokenizer():
    tokens = ["<unk>", "<pad>", "<|image_pad|>", "<|video_pad|>", "<|vision_start|>", "<|vision_end|>", "a"]
    words = Tokenizer(WordLevel({token: id for id, token in enumerate(tokens)}, unk_token="<unk>"))
    return PreTrainedTokenizerFast(
        tokenizer_object=words,
        unk_token="<unk>",
        pad_token="<pad>",
        additional_special_tokens=tokens[2:6],
    )


def config(patch_size=14, merge_size=2, temporal_patch_size=2, version=2):
    vision = {
        "patch_size": patch_size,
        "spatial_merge_size": merge_size,
        "temporal_patch_size": temporal_patch_size,
    }
    made = (Qwen2VLConfig if version == 2 else Qwen2_5_VLConfig)(vision_config=vision)
    return json.dumps(made.to_dict())


def config_of(settings, version=2):
    fields = ("patch_size", "merge_size", "temporal_patch_size")
    return config(**{field: settings[field] for field in fields if field in settings}, version=version)


@pytest.mark.parametrize("name", IMAGE_SETTINGS)
def test_images_by_the_processors_count(name):
    """Patches and LLM tokens of two thousand sizes a setting."""
    settings = IMAGE_SETTINGS[name]
    processor = Qwen2VLImageProcessor(**settings)
    config_json = config_of(settings)
    compare_images(processor, config_json, settings, EXTREMES + drawn_sizes(SEED, 2000))


@pytest.mark.parametrize("version", [2, 2.5])
def test_images_through_the_whole_processor(version):
    """Grids of `image_grid_thw`, and as many placeholders as the processor writes, in two back ends."""
    kind = Qwen2VLProcessor if version == 2 else Qwen2_5_VLProcessor
    cheap = {"do_rescale": False, "do_normalize": False, "resample": 0}
    for backend, settings in [
        (Qwen2VLImageProcessorPil, IMAGE_SETTINGS["edges"]),
        (Qwen2VLImageProcessor, IMAGE_SETTINGS["half_old"]),
        (Qwen2VLImageProcessor, IMAGE_SETTINGS["merge_3"]),
    ]:
        settings = {**settings, "temporal_patch_size": 2}
        processor = kind(backend(**settings, **cheap), tokenizer(), Qwen2VLVideoProcessor())
        config_json = config_of(settings, version)
        drawn = [
            s
            for s in EXTREMES + drawn_sizes(SEED, 40, 700)
            if s[0] * s[1] < 500_000 and max(s) / min(s) <= 200 and min(s) > 4
        ]
        encoded = processor(
            images=[[np.zeros((*size, 3), dtype=np.uint8) for size in drawn]],
            text="<|vision_start|><|image_pad|><|vision_end|>" * len(drawn),
            images_kwargs={"input_data_format": "channels_last"},
            return_tensors="pt",
        )
        ours = [our_image(config_json, settings, *size) for size in drawn]
        assert encoded["image_grid_thw"].prod(-1).tolist() == [patches for patches, _ in ours]
        assert len(encoded["pixel_values"]) == sum(patches for patches, _ in ours)
        ids = encoded["input_ids"]
        assert int((ids == 2).sum()) == sum(tokens for _, tokens in ours)
        assert int((ids != 2).sum()) == 2 * len(drawn)


def our_video(*files_and_clip, **asked):
    shape = our_clip(*files_and_clip, **asked)
    ((count, tokens),) = shape.segments
    assert (shape.num_tiles, shape.pieces) == (count, [(None, shape.feature_tokens)])
    return count, tokens, shape.feature_tokens, shape.frame_indices


def their_frames(processor, num_frames, fps):
    """Frames that the processor chooses; one past the end, for which it then fails, is not one."""
    if not processor.do_sample_frames:
        return list(range(num_frames))
    fields = ("temporal_patch_size", "min_frames", "max_frames", "num_frames", "fps")
    metadata = VideoMetadata(total_num_frames=num_frames, fps=fps)
    indices = processor.sample_frames(
        metadata, **{field: getattr(processor, field) for field in fields}
    ).tolist()
    inside = [index for index in indices if index < num_frames]
    assert len(indices) - len(inside) <= 1
    assert len(inside) % processor.temporal_patch_size == 0
    return inside


@pytest.mark.parametrize("name", VIDEO_SETTINGS)
def test_videos_by_the_processors_count(name):
    """Frames, patches and LLM tokens of clips from one frame to hours."""
    settings = VIDEO_SETTINGS[name]
    processor = Qwen2VLVideoProcessor(**settings)
    config_json = config_of(settings)
    preprocessor = {key: settings[key] for key in ("temporal_patch_size",) if key in settings}
    rng = random.Random(SEED)
    longest = 2_000 if name in ("all_frames", "pixels") else 30_000
    for height, width in EXTREMES + drawn_sizes(SEED, 400, 3000):
        num_frames = round(longest ** rng.random())
        fps = rng.choice([24.0, 25.0, 30.0, 30_000 / 1001, 60.0, 12.5, rng.uniform(0.5, 120)])

        def theirs(height=height, width=width, num_frames=num_frames, fps=fps):
            frames = their_frames(processor, num_frames, fps)
            size = dict(processor.size)
            if processor.cap_pixels_per_frame:
                factor = processor.patch_size * processor.merge_size
                total = int(processor.max_video_tokens * factor * factor * 0.9)
                share = total * processor.temporal_patch_size // len(frames)
                floor = int(size["shortest_edge"] * 1.05)
                size["longest_edge"] = max(min(size["longest_edge"], share), floor)
            patches = processor.get_num_of_video_patches(len(frames), height, width, {"size": size})
            groups = -(-len(frames) // processor.temporal_patch_size)
            return groups, patches // groups, patches // processor.merge_size**2, frames

        clip = (num_frames, fps, height, width)
        ours = outcome(lambda clip=clip: our_video(config_json, preprocessor, settings, clip))
        assert ours == outcome(theirs), clip


@pytest.mark.parametrize("version", [2, 2.5])
def test_videos_through_the_whole_processor(version):
    """Grids of `video_grid_thw`, segments of the vision tower, placeholders that the processor writes."""
    kind = Qwen2VLProcessor if version == 2 else Qwen2_5_VLProcessor
    rng = random.Random(SEED)
    cheap = {"do_rescale": False, "do_normalize": False, "resample": 0}
    small = {"size": {"shortest_edge": 2_000, "longest_edge": 30_000}}
    for name in ["all_frames", "fps_2", "fixed", "threes", "capped"]:
        settings = {**VIDEO_SETTINGS[name], **small}
        if name == "capped":
            settings["max_video_tokens"] = 100
        images = {key: settings[key] for key in ("temporal_patch_size",) if key in settings}
        processor = kind(
            Qwen2VLImageProcessorPil(**images), tokenizer(), Qwen2VLVideoProcessor(**settings, **cheap)
        )
        config_json = config_of(settings, version)
        for _ in range(12):
            clip = (
                rng.randint(10, 40),
                rng.choice([8.0, 10.0, 24.0]),
                rng.randint(10, 90),
                rng.randint(10, 90),
            )
            num_frames, fps, height, width = clip
            metadata = {"total_num_frames": num_frames, "fps": fps, "frames_indices": list(range(num_frames))}
            encoded = processor(
                videos=[np.zeros((num_frames, height, width, 3), dtype=np.uint8)],
                text="a<|vision_start|><|video_pad|><|vision_end|>",
                videos_kwargs={"input_data_format": "channels_last", "video_metadata": [metadata]},
                return_tensors="pt",
            )
            groups, tokens, features, _ = our_video(config_json, images, settings, clip)
            grid = encoded["video_grid_thw"]
            assert (grid[0, 0].item(), grid[0, 1:].prod().item()) == (groups, tokens), (name, clip)
            assert get_vision_cu_seqlens(grid).diff().tolist() == [tokens] * groups
            assert int((encoded["input_ids"] == 3).sum()) == features
            assert encoded["input_ids"].shape[1] == features + 3


def test_what_the_user_asks_is_what_the_processor_is_told():
    """`fps` and `max_frames` turn sampling on; without a video file the image processor's settings hold."""
    config_json = config()
    rng = random.Random(SEED)
    image_file = {"min_pixels": 3136, "max_pixels": 100_352}
    for _ in range(300):
        clip = (rng.randint(2, 5000), rng.choice([24.0, 30.0, 29.97]), 480, 640)
        fps, most = rng.choice([0.5, 1.0, 2.0, 7.5]), rng.choice([2, 5, 16, 64])
        asked = Qwen2VLVideoProcessor(**image_file, do_sample_frames=True, fps=fps, max_frames=most)
        ours = our_video(config_json, image_file, {}, clip, sample_fps=fps, max_frames=most)
        assert ours[3] == their_frames(asked, *clip[:2]), (clip, fps, most)
        patches = asked.get_num_of_video_patches(len(ours[3]), 480, 640, {})
        assert ours[0] * ours[1] == patches
        # Without a rate: all frames of a short clip, otherwise as many as are allowed, in whole pairs.
        alone = our_video(config_json, image_file, {}, clip, max_frames=most)[3]
        if clip[0] <= most:
            assert alone == list(range(clip[0]))
        else:
            fixed = Qwen2VLVideoProcessor(do_sample_frames=True, num_frames=most // 2 * 2)
            assert alone == their_frames(fixed, *clip[:2])


def test_a_clip_without_a_rate_is_refused_where_the_rate_decides():
    """As the processor does; frames over duration are a rate."""
    config_json, file = config(), json.dumps(VIDEO_SETTINGS["fps_2"])
    clip = {"height": 64, "width": 64, "num_frames": 60}
    with pytest.raises(ProfileError, match="does not tell its frames a second"):
        testing.media_shape(config_json, "{}", file, "video", **clip)
    with pytest.raises(ValueError, match="no video metadata"):
        their_frames(Qwen2VLVideoProcessor(**VIDEO_SETTINGS["fps_2"]), 60, None)
    timed = testing.media_shape(config_json, "{}", file, "video", **clip, duration_s=5.0)
    assert len(timed.frame_indices) == 10
    assert testing.media_shape(config_json, "{}", "{}", "video", **clip).num_tiles == 30


@pytest.mark.parametrize("video_file", [None, {"do_sample_frames": True, "fps": 1, "max_pixels": 90_000}])
def test_files_are_found_as_transformers_finds_them(tmp_path, video_file):
    """Videos take the settings of the image processor's file where they have none of their own."""
    image_file = {"min_pixels": 3136, "max_pixels": 100_352, "patch_size": 14}
    (tmp_path / "preprocessor_config.json").write_text(json.dumps(image_file))
    if video_file:
        (tmp_path / "video_preprocessor_config.json").write_text(json.dumps(video_file))
    processor = Qwen2VLVideoProcessor.from_pretrained(tmp_path)
    for height, width in [(480, 640), (1080, 1920), (64, 64)]:
        clip = (300, 30.0, height, width)
        frames = their_frames(processor, *clip[:2])
        ours = our_video(config(), image_file, video_file or {}, clip)
        assert ours[3] == frames
        assert ours[0] * ours[1] == processor.get_num_of_video_patches(len(frames), height, width, {})


def test_the_whole_model_takes_them():
    """A forward of a small model, which itself compares placeholders with features."""
    torch.manual_seed(SEED)
    made = Qwen2_5_VLConfig(
        vision_config={
            "depth": 2,
            "fullatt_block_indexes": [1],
            "hidden_size": 16,
            "intermediate_size": 16,
            "num_heads": 2,
            "out_hidden_size": 16,
        },
        text_config={
            "vocab_size": 8,
            "hidden_size": 16,
            "intermediate_size": 16,
            "num_hidden_layers": 1,
            "num_attention_heads": 2,
            "num_key_value_heads": 2,
            "rope_parameters": {"rope_type": "default", "mrope_section": [1, 1, 2], "rope_theta": 1e4},
            "bos_token_id": 0,
            "eos_token_id": 0,
        },
        image_token_id=2,
        video_token_id=3,
        vision_start_token_id=4,
        vision_end_token_id=5,
    )
    model = Qwen2_5_VLForConditionalGeneration(made).eval()
    small = {"size": {"shortest_edge": 2_000, "longest_edge": 30_000}}
    processor = Qwen2_5_VLProcessor(
        Qwen2VLImageProcessorPil(**small), tokenizer(), Qwen2VLVideoProcessor(**small)
    )
    config_json = json.dumps(made.to_dict())
    for image, clip in [((100, 300), (5, 8.0, 48, 64)), ((333, 61), (2, 2.0, 90, 50))]:
        metadata = {"total_num_frames": clip[0], "fps": clip[1], "frames_indices": list(range(clip[0]))}
        encoded = processor(
            images=[np.zeros((*image, 3), dtype=np.uint8)],
            videos=[np.zeros((clip[0], *clip[2:], 3), dtype=np.uint8)],
            text="<|vision_start|><|image_pad|><|vision_end|>a<|vision_start|><|video_pad|><|vision_end|>",
            images_kwargs={"input_data_format": "channels_last"},
            videos_kwargs={"input_data_format": "channels_last", "video_metadata": [metadata]},
            return_tensors="pt",
        )
        with torch.no_grad():
            logits = model(**encoded, use_cache=False).logits
        features = our_image(config_json, small, *image)[1] + our_video(config_json, small, small, clip)[2]
        assert logits.shape[1] == features + 5
