"""The shape rule of Gemma 4 equals Hugging Face's processors and model, integer for integer and letter for letter."""

import json
import os
import random
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from shape_oracle import drawn_sizes, our_clip, outcome
from transformers import (
    Gemma4AudioFeatureExtractor,
    Gemma4Config,
    Gemma4Model,
    Gemma4Processor,
    Gemma4VideoProcessor,
)
from transformers.models.gemma4.image_processing_pil_gemma4 import (
    Gemma4ImageProcessorPil,
    get_aspect_ratio_preserving_size,
)
from transformers.video_utils import VideoMetadata

from dflop import ProfileError
from dflop._native import testing

pytestmark = pytest.mark.usefixtures("quiet")
SEED = int(os.environ.get("DFLOP_TEST_SEED", "20261127"))
# (height, width): points, lines around the budgets' lengths, sizes that fill a budget exactly, and one pixel more.
EXTREMES = [(1, 1), (1, 6000), (6000, 1), (1, 280), (1, 281), (280, 1), (7, 1961), (1961, 7), (4320, 6480)]
EXTREMES += [(768, 768), (672, 960), (960, 672), (673, 960), (48, 48), (47, 49), (336, 480), (65_535, 65_535)]
SETTINGS = {
    "published": {},
    "small": {"max_soft_tokens": 70},
    "large": {"max_soft_tokens": 1120},
    "other patches": {"max_soft_tokens": 140, "patch_size": 14, "pooling_kernel_size": 2},
    "single patches": {"max_soft_tokens": 560, "patch_size": 32, "pooling_kernel_size": 1},
}
VIDEOS = {
    "published": {},
    "few": {"num_frames": 5, "max_soft_tokens": 140},
    "by rate": {"num_frames": None, "fps": 0.7},
    "all": {"do_sample_frames": False},
    "no number": {"num_frames": None},
    "both": {"num_frames": 8, "fps": 2},
}
WORDS = SimpleNamespace(boi_token="<|image>", eoi_token="<image|>", image_token="v", video_token="v")


def config_of(settings):
    vision = {key: settings[key] for key in ("patch_size", "pooling_kernel_size") if key in settings}
    return json.dumps({"model_type": "gemma4", "vision_config": {"model_type": "gemma4_vision", **vision}})


def written(shape):
    return "".join(text if text is not None else "v" * count for text, count in shape.pieces)


def sides(size, patch_size=16, max_soft_tokens=280, pooling_kernel_size=3):
    """Rows and columns of patches, by the processor's own function."""
    found = get_aspect_ratio_preserving_size(
        *size, patch_size, max_soft_tokens * pooling_kernel_size**2, pooling_kernel_size
    )
    return tuple(side // patch_size for side in found)


@pytest.mark.parametrize("name", SETTINGS)
def test_thousands_of_sizes(name):
    settings = SETTINGS[name]
    pool = settings.get("pooling_kernel_size", 3)
    for size in EXTREMES + drawn_sizes(SEED, 2000):

        def ours(size=size):
            file = json.dumps(settings)
            shape = testing.media_shape(
                config_of(settings), file, "{}", "image", height=size[0], width=size[1]
            )
            ((count, tokens),) = shape.segments
            assert (count, shape.num_tiles) == (1, 1)
            assert tokens == shape.patches[0] * shape.patches[1] == pool**2 * shape.feature_tokens
            assert written(shape) == Gemma4Processor.replace_image_token(
                WORDS, {"num_soft_tokens_per_image": [tokens // pool**2]}, 0
            )
            return shape.patches

        expected = outcome(lambda size=size: sides(size, **settings))
        assert outcome(ours) == expected, size
        # Whatever its sides, a picture is scaled to fill the budget.
        assert expected != "refused"


@pytest.mark.parametrize("name", VIDEOS)
def test_videos_by_the_processors_own_steps(name):
    """Frames, their times, patches and features of clips from one frame to hours."""
    settings = VIDEOS[name]
    processor = Gemma4VideoProcessor(**settings)
    rng = random.Random(SEED)
    longest = 1_500 if name in ("all", "no number") else 300_000
    seen = set()
    for size in EXTREMES + drawn_sizes(SEED, 300, 3000):
        num_frames = round(longest ** rng.random())
        fps = rng.choice([24.0, 25.0, 30.0, 30_000 / 1001, 60.0, 12.5, rng.uniform(0.5, 120)])

        def theirs(size=size, num_frames=num_frames, fps=fps):
            metadata = VideoMetadata(total_num_frames=num_frames, fps=fps)
            frames = list(range(num_frames))
            if processor.do_sample_frames:
                # As its call asks for frames: with all that its file says.
                asked = {"num_frames": processor.num_frames, "fps": processor.fps}
                frames = processor.sample_frames(metadata, **asked).tolist()
            metadata.frames_indices = frames
            rows, columns = sides(size, max_soft_tokens=processor.max_soft_tokens)
            made = {"num_soft_tokens_per_video": [rows * columns // 9], "video_metadata": [metadata]}
            return frames, (rows, columns), Gemma4Processor.replace_video_token(WORDS, made, 0)

        def ours(size=size, num_frames=num_frames, fps=fps):
            shape = our_clip(
                config_of({}), {}, {"rescale_factor": 1 / 255, **settings}, (num_frames, fps, *size)
            )
            assert shape.segments == [(len(shape.frame_indices), shape.patches[0] * shape.patches[1])]
            assert shape.num_tiles == len(shape.frame_indices)
            return shape.frame_indices, shape.patches, written(shape)

        expected = outcome(theirs)
        assert outcome(ours) == expected, (num_frames, fps, size)
        seen.add(expected == "refused")
    # Of a fixed number of frames a short clip has too few.
    some = {"both": {True}, "published": {True, False}, "few": {True, False}}
    assert seen == some.get(name, {False})


def test_the_whole_processors_and_model():
    """What calls of the processors give, and a forward of the model: patches of the encoder, features of the LLM."""
    torch.manual_seed(SEED)
    small = {"intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "hidden_size": 16}
    config = Gemma4Config(
        vision_config={
            **small, "num_key_value_heads": 2, "head_dim": 8, "patch_size": 4, "pooling_kernel_size": 2,
        },
        text_config={
            **small, "vocab_size": 32, "num_key_value_heads": 1, "head_dim": 8, "hidden_size_per_layer_input": 0,
            "layer_types": ["full_attention"],
        },
    )  # fmt: skip
    fields = {"patch_size": 4, "pooling_kernel_size": 2, "max_soft_tokens": 70}
    text = json.dumps(config.to_dict())
    model = Gemma4Model(config).eval()
    seen = []
    model.vision_tower.encoder.register_forward_pre_hook(
        lambda _, args, given: seen.append(int(given["attention_mask"].sum())), with_kwargs=True
    )
    images, videos = Gemma4ImageProcessorPil(**fields), Gemma4VideoProcessor(**fields, num_frames=3)
    for height, width in [(50, 60), (50, 61), (9, 200), (200, 45), (5, 5), (2, 110)]:
        shape = testing.media_shape(text, json.dumps(fields), "{}", "image", height=height, width=width)
        made = images([np.zeros((height, width, 3), dtype=np.uint8)], return_tensors="pt")
        assert made["num_soft_tokens_per_image"].tolist() == [shape.feature_tokens]
        positions = made["image_position_ids"][0]
        real = positions[(positions >= 0).all(1)]
        assert (real[:, 1].max() + 1, real[:, 0].max() + 1) == shape.patches
        with torch.no_grad():
            (features,) = model.get_image_features(
                made["pixel_values"], made["image_position_ids"]
            ).pooler_output
        assert len(features) == shape.feature_tokens
        assert seen.pop() == shape.segments[0][1] == len(real)

        clip = (7, 10.0, height, width)
        shape = our_clip(text, fields, {**fields, "num_frames": 3}, clip)
        frames = np.zeros((7, height, width, 3), dtype=np.uint8)
        made = videos(
            [frames], video_metadata=[VideoMetadata(7, 10.0)], return_tensors="pt", return_metadata=True
        )
        assert list(made["num_frames_per_video"]) == [shape.num_tiles] == [3]
        assert list(made["video_metadata"][0].frames_indices) == shape.frame_indices
        assert int(made["num_soft_tokens_per_video"][0]) * 3 == shape.feature_tokens
        real = (made["video_position_ids"] >= 0).all(-1).sum(1).tolist()
        assert real == [shape.segments[0][1]] * 3


EXTRACTORS = {
    "published": {},
    "coarse": {"sampling_rate": 8_000, "frame_length_ms": 25.0, "hop_length_ms": 12.5, "feature_size": 64},
    # Half a sample: Python rounds to even.
    "odd": {"sampling_rate": 10_000, "frame_length_ms": 20.25, "hop_length_ms": 10.15, "feature_size": 32},
}


def sound_of(samples, settings, model=None):
    """What dflop says of a sound that has the extractor's rate."""
    rate = settings.get("sampling_rate", 16_000)
    if model is None:
        audio = {"subsampling_conv_channels": [settings.get("feature_size", 128), 4]}
        model = json.dumps({**json.loads(config_of({})), "audio_config": audio})
    file = json.dumps({"image_processor": {}, "feature_extractor": settings})
    return testing.media_shape(model, file, "{}", "audio", duration_s=samples / rate, sample_rate=rate)


@pytest.mark.parametrize("name", EXTRACTORS)
def test_sounds_through_the_extractor_and_the_processors_own_steps(name):
    """One call a sound: the places that the processor writes, from too short a sound to one that it would cut off."""
    settings = EXTRACTORS[name]
    extractor = Gemma4AudioFeatureExtractor(**settings)
    words = SimpleNamespace(boa_token="<|audio>", eoa_token="<audio|>", audio_token="v")
    rng = random.Random(SEED)
    edges = [n + by for n in (0, 160, 320, 480, 800, 1_440, 16_000) for by in (-1, 0, 1)]
    whole = Gemma4Processor._compute_audio_num_tokens
    holder = SimpleNamespace(feature_extractor=extractor, audio_seq_length=10**9)
    for samples in [*edges[1:], *(rng.randint(1, 40_000) for _ in range(60)), 479_999, 480_000]:
        made = extractor([np.zeros(max(samples, 1), dtype=np.float32)])
        written_by = Gemma4Processor.replace_audio_token(words, made, 0)
        assert written_by.count("v") == whole(holder, np.zeros(max(samples, 1)), extractor.sampling_rate)
        if "v" not in written_by or samples == 0:
            with pytest.raises(ProfileError, match="samples fill no token"):
                sound_of(samples, settings)
            continue
        shape = sound_of(samples, settings)
        assert written(shape) == written_by, samples
        assert shape.segments == [(1, shape.feature_tokens)]
        assert (shape.num_tiles, shape.parts) == (1, [(1, 1, shape.feature_tokens)])
    cut = extractor([np.zeros(480_001, dtype=np.float32)])
    assert np.array_equal(cut["input_features_mask"], made["input_features_mask"]), (
        "the last of these was whole"
    )
    with pytest.raises(ProfileError, match="more than 480000; the processor would cut it off"):
        sound_of(480_001, settings)


def test_sounds_through_the_tower():
    """The tokens that a layer of Hugging Face's encoder is given, and the features that it returns."""
    small = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "output_proj_dims": 8}
    config = Gemma4Config(
        audio_config={**small, "subsampling_conv_channels": [8, 4]},
        vision_config=None,
        text_config={
            "hidden_size": 16, "vocab_size": 32, "num_hidden_layers": 1, "intermediate_size": 16, "head_dim": 8,
            "num_attention_heads": 2, "num_key_value_heads": 1, "hidden_size_per_layer_input": 0,
            "layer_types": ["full_attention"],
        },
    )  # fmt: skip
    model = Gemma4Model(config).eval()
    audio = {**json.loads(config_of({})), "audio_config": config.audio_config.to_dict()}
    extractor = Gemma4AudioFeatureExtractor(feature_size=8)
    seen = []
    model.audio_tower.layers[0].register_forward_pre_hook(lambda _, args: seen.append(args[0].shape[1]))
    for samples in (161, 800, 801, 5_000, 16_000, 33_333):
        shape = sound_of(samples, {"feature_size": 8}, json.dumps(audio))
        made = extractor([np.zeros(samples, dtype=np.float32)], return_tensors="pt")
        frames = int(made["input_features_mask"].sum())
        with torch.no_grad():
            found = model.get_audio_features(
                made["input_features"][:, :frames], made["input_features_mask"][:, :frames]
            )
        # Without padding a layer is given the tokens of the sound.
        assert shape.segments == [(1, seen.pop())]
        assert int(found.attention_mask.sum()) == shape.feature_tokens == found.pooler_output.shape[1]


def test_large_models_do_not_hear():
    with pytest.raises(
        ProfileError, match="the model does not hear: its configuration has no `audio_config`"
    ):
        testing.media_shape(config_of({}), "{}", "{}", "audio", duration_s=1.0, sample_rate=16_000)
