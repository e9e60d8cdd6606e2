"""The shape rule of Qwen3-VL equals Hugging Face's processors, integer for integer and letter for letter."""

import json
import os
import random

import numpy as np
import pytest
from shape_oracle import compare_images, drawn_sizes, our_clip, our_image, outcome
from tokenizers import Tokenizer, decoders, pre_tokenizers
from tokenizers.models import BPE
from transformers import (
    PreTrainedTokenizerFast,
    Qwen2VLImageProcessor,
    Qwen2VLImageProcessorPil,
    Qwen3VLConfig,
    Qwen3VLMoeConfig,
    Qwen3VLProcessor,
    Qwen3VLVideoProcessor,
)
from transformers.models.qwen3_vl.video_processing_qwen3_vl import smart_resize
from transformers.video_utils import VideoMetadata
from transformers.vision_utils import get_vision_cu_seqlens

from dflop import ProfileError

pytestmark = pytest.mark.usefixtures("quiet")
SEED = int(os.environ.get("DFLOP_TEST_SEED", "20261122"))
EXTREMES = [(1, 1), (1000, 100), (100, 1000), (4320, 6480), (6480, 4320), (1, 200), (200, 1), (1, 201)]
EXTREMES += [
    (5, 1001),
    (16, 16),
    (48, 48),
    (80, 112),
    (31, 31),
    (33, 31),
    (48, 9600),
    (48, 9601),
    (65_535, 65_535),
]
IMAGE_SETTINGS = {
    "patch_alone": {"patch_size": 16},
    "real": {"patch_size": 16, "size": {"shortest_edge": 65_536, "longest_edge": 16_777_216}},
    "old_names": {"patch_size": 16, "min_pixels": 50_000, "max_pixels": 99_999},
    "patch_14": {
        "patch_size": 14,
        "merge_size": 3,
        "size": {"shortest_edge": 5_000, "longest_edge": 300_000},
    },
}
VIDEO_SETTINGS = {
    "default": {},
    "real": {"size": {"shortest_edge": 4_096, "longest_edge": 25_165_824}, "fps": 2, "max_frames": 768},
    "slow": {"fps": 0.7, "min_frames": 7, "max_frames": 31},
    "all_frames": {"do_sample_frames": False, "size": {"shortest_edge": 4_096, "longest_edge": 2_000_000}},
    "threes": {"fps": 3.3, "temporal_patch_size": 3, "max_frames": 20},
    "single": {"fps": 1, "temporal_patch_size": 1, "patch_size": 14, "merge_size": 1, "max_frames": 64},
    "capped": {"fps": 4, "cap_pixels_per_frame": True, "max_video_tokens": 300},
    "floored": {"cap_pixels_per_frame": True, "size": {"shortest_edge": 70_000, "longest_edge": 900_000}},
    "old_names_do_not_count": {"min_pixels": 1, "max_pixels": 2},
}
PATCH_FIELDS = ("patch_size", "merge_size", "temporal_patch_size")


def tokenizer():
    """One token a byte, so that decoded ids are the text that the processor wrote."""
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    words = Tokenizer(BPE({letter: id for id, letter in enumerate(letters)}, []))
    words.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    words.decoder = decoders.ByteLevel()
    special = ["<|image_pad|>", "<|video_pad|>", "<|vision_start|>", "<|vision_end|>", "<pad>"]
    return PreTrainedTokenizerFast(
        tokenizer_object=words, pad_token="<pad>", additional_special_tokens=special[:4]
    )


def files(settings, kind=Qwen3VLConfig):
    """`config.json` and `preprocessor_config.json` with the patches of `settings`."""
    patches = {"patch_size": 16, **{key: settings[key] for key in PATCH_FIELDS if key in settings}}
    vision = {("spatial_" if key == "merge_size" else "") + key: value for key, value in patches.items()}
    return json.dumps(kind(vision_config=vision).to_dict()), patches


@pytest.mark.parametrize("name", IMAGE_SETTINGS)
def test_images_by_the_processors_count(name):
    """Patches and LLM tokens of two thousand sizes a setting."""
    settings = IMAGE_SETTINGS[name]
    processor = Qwen2VLImageProcessor(**settings)
    config_json, _ = files(settings, Qwen3VLMoeConfig if name == "real" else Qwen3VLConfig)
    compare_images(processor, config_json, settings, EXTREMES + drawn_sizes(SEED, 2000))


def our_video(*files_and_clip, **asked):
    shape = our_clip(*files_and_clip, **asked)
    ((count, tokens),) = shape.segments
    assert shape.num_tiles == count == sum(text is None for text, _ in shape.pieces)
    return count, tokens, shape.feature_tokens, shape.frame_indices


@pytest.mark.parametrize("name", VIDEO_SETTINGS)
def test_videos_by_the_processors_count(name):
    """Frames, patches and LLM tokens of clips from one frame to hours."""
    settings = VIDEO_SETTINGS[name]
    processor = Qwen3VLVideoProcessor(**settings)
    config_json, preprocessor = files(settings)
    # An empty file is none: then the image processor's settings would hold.
    video_file = settings or {"do_rescale": True}
    rng = random.Random(SEED)
    longest = 1_500 if name == "all_frames" else 300_000
    refused = 0
    for height, width in EXTREMES + drawn_sizes(SEED, 400, 3000):
        num_frames = round(longest ** rng.random())
        fps = rng.choice([24.0, 25.0, 30.0, 30_000 / 1001, 60.0, 12.5, rng.uniform(0.5, 120)])

        def theirs(height=height, width=width, num_frames=num_frames, fps=fps):
            metadata = VideoMetadata(total_num_frames=num_frames, fps=fps)
            frames = list(range(num_frames))
            if processor.do_sample_frames:
                frames = processor.sample_frames(metadata, fps=processor.fps).tolist()
            patches = processor.get_num_of_video_patches(len(frames), height, width)
            groups = -(-len(frames) // processor.temporal_patch_size)
            return groups, patches // groups, patches // processor.merge_size**2, frames

        clip = (num_frames, fps, height, width)
        expected = outcome(theirs)
        ours = outcome(lambda clip=clip: our_video(config_json, preprocessor, video_file, clip))
        assert ours == expected, clip
        refused += expected == "refused"
    assert 0 < refused < 300


def test_narrow_clips_by_smart_resize():
    """Sides shorter than a factor are scaled up first, which only floats decide."""
    config_json, preprocessor = files({})
    file = {"do_sample_frames": False, "size": {"shortest_edge": 4_096, "longest_edge": 3_000_000}}
    for height in range(1, 34):
        for width in range(1, 140, 3):
            for num_frames in (2, 3, 5):
                sides = outcome(
                    lambda h=height, w=width, n=num_frames: smart_resize(n, h, w, 2, 32, 4_096, 3_000_000)
                )
                ours = outcome(
                    lambda h=height, w=width, n=num_frames: our_video(
                        config_json, preprocessor, file, (n, 8.0, h, w)
                    )[1]
                )
                assert ours == (sides if sides == "refused" else sides[0] * sides[1] // 256)


def test_through_the_whole_processor():
    """Grids, segments of the vision tower, and the text that the processor writes, letter for letter."""
    rng = random.Random(SEED)
    cheap = {"do_rescale": False, "do_normalize": False, "resample": 0}
    small = {"size": {"shortest_edge": 4_096, "longest_edge": 200_000}}
    prompt = "say<|vision_start|><|video_pad|><|vision_end|>, <|vision_start|><|image_pad|><|vision_end|>?"
    for name in ["default", "slow", "all_frames", "threes", "single", "capped"]:
        settings = {**VIDEO_SETTINGS[name], **small}
        config_json, preprocessor = files(settings)
        preprocessor = {**preprocessor, **small}
        processor = Qwen3VLProcessor(
            Qwen2VLImageProcessorPil(**preprocessor, **cheap),
            tokenizer(),
            Qwen3VLVideoProcessor(**settings, **cheap),
        )
        for _ in range(12):
            num_frames, height, width = rng.randint(6, 70), rng.randint(20, 90), rng.randint(20, 90)
            clip = (num_frames, rng.choice([2.0, 8.0, 10.0, 23.976, 29.97]), height, width)
            image = (rng.randint(20, 200), rng.randint(20, 200))
            metadata = {
                "total_num_frames": num_frames,
                "fps": clip[1],
                "frames_indices": list(range(num_frames)),
            }
            encoded = processor(
                images=[np.zeros((*image, 3), dtype=np.uint8)],
                videos=[np.zeros((num_frames, height, width, 3), dtype=np.uint8)],
                text=prompt,
                images_kwargs={"input_data_format": "channels_last"},
                videos_kwargs={"input_data_format": "channels_last", "video_metadata": [metadata]},
                return_tensors="pt",
            )
            groups, tokens, _, _ = our_video(config_json, preprocessor, settings, clip)
            grid = encoded["video_grid_thw"]
            assert (grid[0, 0].item(), grid[0, 1:].prod().item()) == (groups, tokens), (name, clip)
            assert get_vision_cu_seqlens(grid).diff().tolist() == [tokens] * groups
            patches, features = our_image(config_json, preprocessor, *image)
            assert encoded["image_grid_thw"].prod().item() == patches
            pieces = our_clip(config_json, preprocessor, settings, clip).pieces
            video = "".join("<|video_pad|>" * count if text is None else text for text, count in pieces)
            expected = prompt.replace("<|video_pad|>", video)
            expected = expected.replace("<|image_pad|>", "<|image_pad|>" * features)
            assert processor.tokenizer.decode(encoded["input_ids"][0]) == expected


def test_what_the_user_asks_is_what_the_processor_is_told():
    """`fps` and `max_frames` take the place of the processor's own, and turn sampling on."""
    config_json, preprocessor = files({})
    rng = random.Random(SEED)
    for _ in range(300):
        clip = (rng.randint(2, 5000), rng.choice([24.0, 30.0, 29.97]), 480, 640)
        asked = {"fps": rng.choice([None, 0.5, 2.0, 7.5]), "max_frames": rng.choice([None, 2, 5, 64])}
        told = Qwen3VLVideoProcessor(**{key: value for key, value in asked.items() if value})
        expected = told.sample_frames(VideoMetadata(total_num_frames=clip[0], fps=clip[1])).tolist()
        for samples in [True, False]:
            if not samples and not any(asked.values()):
                continue
            file = {"do_sample_frames": samples}
            ours = our_video(
                config_json, preprocessor, file, clip, sample_fps=asked["fps"], max_frames=asked["max_frames"]
            )
            assert ours[3] == expected, (clip, asked)


def test_settings_that_no_processor_would_take_are_refused():
    """A fixed number of frames beside the class's own rate, another patch than the encoder's, no rate."""
    config_json, preprocessor = files({})
    with pytest.raises(
        ProfileError, match="`num_frames` is 8, `fps` is 2, the processor takes one of the two"
    ):
        our_video(config_json, preprocessor, {"num_frames": 8}, (60, 30.0, 64, 64))
    clip = np.zeros((60, 64, 64, 3), dtype=np.uint8)
    metadata = [{"total_num_frames": 60, "fps": 30.0}]
    processor = Qwen3VLVideoProcessor(num_frames=8)
    with pytest.raises(ValueError, match="mutually exclusive"):
        processor([clip], video_metadata=metadata, input_data_format="channels_last")
    with pytest.raises(
        ProfileError, match="`patch_size` is missing, .* says 16 under `vision_config`, so 14"
    ):
        our_image(config_json, {}, 64, 64)
    with pytest.raises(ProfileError, match="does not tell its frames a second"):
        our_video(config_json, preprocessor, {"fps": 2}, (60, None, 64, 64))
