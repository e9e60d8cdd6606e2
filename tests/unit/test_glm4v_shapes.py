"""The shape rule of GLM-4.1V, GLM-4.5V, GLM-4.6V and GLM-OCR equals Hugging Face's processors, integer for integer and letter for letter."""

import json
import os
import random

import numpy as np
import pytest
from shape_oracle import compare_images, drawn_sizes, our_clip, our_image, outcome
from tokenizers import Tokenizer, decoders, pre_tokenizers
from tokenizers.models import BPE
from transformers import (
    Glm4vConfig,
    Glm4vImageProcessorPil,
    Glm4vMoeConfig,
    Glm4vProcessor,
    Glm4vVideoProcessor,
    Glm46VConfig,
    Glm46VImageProcessorPil,
    Glm46VProcessor,
    Glm46VVideoProcessor,
    GlmOcrConfig,
    PreTrainedTokenizerFast,
)
from transformers.models.glm4v.video_processing_glm4v import smart_resize
from transformers.video_utils import VideoMetadata

pytestmark = pytest.mark.usefixtures("quiet")
SEED = int(os.environ.get("DFLOP_TEST_SEED", "20261127"))
EXTREMES = [
    (1, 1),
    (1000, 100),
    (100, 1000),
    (4320, 6480),
    (6480, 4320),
    (1, 200),
    (200, 1),
    (1, 201),
    (5, 1001),
]
EXTREMES += [(28, 28), (42, 42), (70, 98), (27, 27), (29, 27), (28, 5600), (28, 5601), (65_535, 65_535)]
CLASSES = {
    "glm4v": (Glm4vConfig, Glm4vProcessor, Glm4vImageProcessorPil, Glm4vVideoProcessor),
    "glm4v_moe": (Glm4vMoeConfig, Glm4vProcessor, Glm4vImageProcessorPil, Glm4vVideoProcessor),
    "glm46v": (Glm46VConfig, Glm46VProcessor, Glm46VImageProcessorPil, Glm46VVideoProcessor),
    "glm_ocr": (GlmOcrConfig, Glm46VProcessor, Glm46VImageProcessorPil, Glm46VVideoProcessor),
}
# GLM-OCR has the processors of `glm46v`.
FAMILIES = [pytest.param(name, marks=pytest.mark.more) if name == "glm_ocr" else name for name in CLASSES]
SIZE_OF_HUB = {"size": {"shortest_edge": 12_544, "longest_edge": 9_633_792}}
IMAGE_SETTINGS = {
    "default": {},
    "hub": SIZE_OF_HUB,
    "other": {"patch_size": 16, "merge_size": 3, "size": {"shortest_edge": 5_000, "longest_edge": 300_000}},
    # Not of this processor.
    "old_names_do_not_count": {"min_pixels": 1, "max_pixels": 2},
}
VIDEO_SETTINGS = {
    "default": {},
    "hub": {"size": {"shortest_edge": 12_544, "longest_edge": 47_040_000}, "fps": 2, "num_frames": 16},
    "slow": {"fps": 0.7, "max_duration": 31, "size": {"shortest_edge": 70_000, "longest_edge": 900_000}},
    "fast": {"fps": 29.97, "max_duration": 20},
    "all_frames": {"do_sample_frames": False, "size": {"shortest_edge": 4_096, "longest_edge": 2_000_000}},
    "other": {"fps": 3, "patch_size": 16, "merge_size": 1},
}
PATCH_FIELDS = ("patch_size", "merge_size")


def tokenizer():
    """One token a byte, so that decoded ids are the text that the processor wrote."""
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    words = Tokenizer(BPE({letter: id for id, letter in enumerate(letters)}, []))
    words.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    words.decoder = decoders.ByteLevel()
    special = [f"<|{name}|>" for name in ("image", "video")]
    special += [f"<|{end}_of_{kind}|>" for end in ("begin", "end") for kind in ("image", "video")]
    return PreTrainedTokenizerFast(
        tokenizer_object=words, pad_token="<pad>", additional_special_tokens=special
    )


def files(settings, name="glm4v"):
    """`config.json` and `preprocessor_config.json` with the patches of `settings`."""
    patches = {key: settings[key] for key in PATCH_FIELDS if key in settings}
    vision = {("spatial_" if key == "merge_size" else "") + key: value for key, value in patches.items()}
    return json.dumps(CLASSES[name][0](vision_config=vision).to_dict()), patches


@pytest.mark.parametrize("name", IMAGE_SETTINGS)
def test_images_by_the_processors_count(name):
    """Patches and LLM tokens of two thousand sizes a setting."""
    settings = IMAGE_SETTINGS[name]
    config_json, _ = files(settings)
    processor = Glm4vImageProcessorPil(**settings)
    compare_images(processor, config_json, settings, EXTREMES + drawn_sizes(SEED, 2000))


def our_video(*files_and_clip, **asked):
    shape = our_clip(*files_and_clip, **asked)
    ((count, tokens),) = shape.segments
    assert shape.num_tiles == count == sum(text is None for text, _ in shape.pieces)
    return count, tokens, shape.feature_tokens, shape.frame_indices


def drawn_clips(count, longest):
    """(frames, frames a second, height, width), and the duration: of the frames, or a little off."""
    rng = random.Random(SEED)
    for height, width in EXTREMES + drawn_sizes(SEED, count, 3000):
        num_frames = round(longest ** rng.random())
        fps = rng.choice([1.0, 24.0, 25.0, 30.0, 30_000 / 1001, 60.0, 12.5, rng.uniform(0.5, 120)])
        yield (num_frames, fps, height, width), num_frames / fps * rng.choice([1, 1, 1, 0.97, 1.02])


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("name", VIDEO_SETTINGS)
def test_videos_by_the_processors_count(name, family):
    """Frames, patches and LLM tokens of clips from one frame to an hour and more."""
    settings = VIDEO_SETTINGS[name]
    processor = CLASSES[family][3](**settings)
    config_json, preprocessor = files(settings, family)
    # An empty file is none: then the image processor's settings would hold.
    video_file = settings or {"fps": None}
    longest = 1_500 if name == "all_frames" else 100_000 if family == "glm4v" else 60_000
    refused = 0
    for clip, duration in drawn_clips(300 if family == "glm4v" else 120, longest):
        num_frames, fps, height, width = clip

        def theirs(height=height, width=width, num_frames=num_frames, fps=fps, duration=duration):
            metadata = VideoMetadata(total_num_frames=num_frames, fps=fps, duration=duration)
            frames = list(range(num_frames))
            if processor.do_sample_frames:
                frames = processor.sample_frames(metadata, fps=processor.fps).tolist()
            patches = processor.get_num_of_video_patches(len(frames), height, width)
            groups = -(-len(frames) // 2)
            return groups, patches // groups, patches // processor.merge_size**2, frames

        expected = outcome(theirs)
        ours = outcome(
            lambda c=clip, d=duration: our_video(config_json, preprocessor, video_file, c, duration_s=d)
        )
        assert ours == expected, (clip, duration)
        refused += expected == "refused"
    assert 0 < refused < 100


def test_narrow_clips_by_smart_resize():
    """Sides shorter than a factor are scaled up first, which only floats decide."""
    config_json, preprocessor = files({})
    file = {"do_sample_frames": False, "size": {"shortest_edge": 4_096, "longest_edge": 3_000_000}}
    for height in range(1, 30):
        for width in range(1, 140, 3):
            for num_frames in (2, 3, 5):
                sides = outcome(
                    lambda h=height, w=width, n=num_frames: smart_resize(n, h, w, 2, 28, 4_096, 3_000_000)
                )
                ours = outcome(
                    lambda h=height, w=width, n=num_frames: our_video(
                        config_json, preprocessor, file, (n, 8.0, h, w)
                    )[1]
                )
                assert ours == (sides if sides == "refused" else sides[0] * sides[1] // 196)


@pytest.mark.parametrize("family", FAMILIES)
def test_through_the_whole_processor(family):
    """Grids, and the text that the processor writes, letter for letter."""
    rng = random.Random(SEED)
    cheap = {"do_rescale": False, "do_normalize": False, "resample": 0}
    small = {"size": {"shortest_edge": 4_096, "longest_edge": 200_000}}
    _, processor_class, image_class, video_class = CLASSES[family]
    prompt = "say<|begin_of_video|><|video|><|end_of_video|>, <|begin_of_image|><|image|><|end_of_image|>?"
    for name in ["default", "slow", "all_frames", "other"]:
        settings = {**VIDEO_SETTINGS[name], **small}
        config_json, preprocessor = files(settings, family)
        preprocessor = {**preprocessor, **small}
        processor = processor_class(
            image_class(**preprocessor, **cheap), tokenizer(), video_class(**settings, **cheap)
        )
        for _ in range(10):
            num_frames, height, width = rng.randint(6, 70), rng.randint(20, 90), rng.randint(20, 90)
            clip = (num_frames, rng.choice([2.0, 8.0, 10.0, 23.976, 29.97]), height, width)
            image = (rng.randint(20, 200), rng.randint(20, 200))
            metadata = {
                "total_num_frames": num_frames,
                "fps": clip[1],
                "duration": num_frames / clip[1],
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
            patches, features = our_image(config_json, preprocessor, *image)
            assert encoded["image_grid_thw"].prod().item() == patches
            pieces = our_clip(config_json, preprocessor, settings, clip).pieces
            video = "".join("<|image|>" * count if text is None else text for text, count in pieces)
            expected = prompt.replace("<|image|>", "<|image|>" * features).replace("<|video|>", video)
            assert processor.tokenizer.decode(encoded["input_ids"][0]) == expected


def test_what_the_user_asks_is_what_the_processor_is_told():
    """Of GLM-4.1V `fps` takes the place of the processor's own, and turns sampling on."""
    config_json, preprocessor = files({})
    rng = random.Random(SEED)
    for _ in range(300):
        clip = (rng.randint(2, 20_000), rng.choice([24.0, 30.0, 29.97]), 480, 640)
        asked = rng.choice([0.5, 2.0, 7.5])
        metadata = VideoMetadata(total_num_frames=clip[0], fps=clip[1], duration=clip[0] / clip[1])
        expected = Glm4vVideoProcessor().sample_frames(metadata, fps=asked).tolist()
        for samples in [True, False]:
            file = {"do_sample_frames": samples}
            assert our_video(config_json, preprocessor, file, clip, sample_fps=asked)[3] == expected, clip
        most = rng.choice([2, 5, 64])
        frames = our_video(config_json, preprocessor, {"fps": asked}, clip, max_frames=most)[3]
        assert len(frames) == min(len(expected), most // 2 * 2)


@pytest.mark.parametrize("family", FAMILIES)
def test_files_as_transformers_writes_them(family, tmp_path):
    """`save_pretrained` names all fields, of which some are not used."""
    _, processor_class, image_class, video_class = CLASSES[family]
    processor = processor_class(image_class(**SIZE_OF_HUB), tokenizer(), video_class())
    processor.save_pretrained(tmp_path)
    config_json, _ = files({}, family)
    file = json.loads((tmp_path / "processor_config.json").read_text())
    assert our_image(config_json, file, 1000, 800) == our_image(config_json, SIZE_OF_HUB, 1000, 800)
    clip = (300, 30.0, 480, 640)
    found = our_clip(config_json, file, {}, clip)
    plain = our_clip(config_json, {}, {"fps": None}, clip)
    assert (found.pieces, found.frame_indices) == (plain.pieces, plain.frame_indices)
