"""The shape rule of Idefics3 and SmolVLM equals Hugging Face's processors and models, integer for integer."""

import json
import os
import random
import sys
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from num2words import num2words
from shape_oracle import drawn_sizes
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Split
from transformers import (
    AutoModelForImageTextToText,
    Idefics3Config,
    Idefics3Processor,
    PreTrainedTokenizerFast,
    SmolVLMConfig,
    SmolVLMProcessor,
    SmolVLMVideoProcessor,
)
from transformers.models.idefics3.image_processing_pil_idefics3 import Idefics3ImageProcessorPil
from transformers.models.smolvlm.image_processing_pil_smolvlm import SmolVLMImageProcessorPil
from transformers.video_utils import VideoMetadata

import dflop
from dflop._native import testing

SEED = int(os.environ.get("DFLOP_TEST_SEED", "20261126"))
# (height, width): a pixel, lines of pixels, 10:1, 28 megapixels both ways, and the edges of one tile.
EXTREMES = [(1, 1), (1, 6000), (6000, 1), (1000, 100), (100, 1000), (4320, 6480), (6480, 4320), (364, 364)]
EXTREMES += [(365, 364), (728, 729), (1, 2), (2, 1), (1456, 1455), (3000, 1999)]
# Family, side of a tile, of a patch, scale factor, longest edge, further fields of the image processor.
SETTINGS = {
    "idefics3-8b": ("idefics3", 364, 14, 2, 1456, {}),
    "smolvlm-2b": ("smolvlm", 384, 14, 3, 1536, {}),
    "smolvlm-256m": ("smolvlm", 512, 16, 4, 2048, {}),
    "uneven": ("smolvlm", 48, 8, 2, 500, {}),
    "huge": ("idefics3", 512, 16, 4, 9000, {}),
    "whole": ("idefics3", 48, 8, 2, 192, {"do_image_splitting": False}),
    "kept": ("smolvlm", 48, 8, 2, 192, {"do_resize": False}),
}
CONFIGS = {"idefics3": Idefics3Config, "smolvlm": SmolVLMConfig}
MARKS = ("<image>", "<video>", "<fake_token_around_image>", "<global-img>", "<end_of_utterance>")


def tokenizer():
    """One that has the marks, and takes any other text for a word of its own."""
    tokens = {token: index for index, token in enumerate(("<unk>", "<pad>", *MARKS))}
    words = Tokenizer(WordLevel(tokens, unk_token="<unk>"))
    words.pre_tokenizer = Split(" ", "isolated")
    extra = dict(
        zip(("image_token", "video_token", "fake_image_token", "global_image_token"), MARKS, strict=False)
    )
    made = PreTrainedTokenizerFast(
        tokenizer_object=words, unk_token="<unk>", pad_token="<pad>", extra_special_tokens=extra
    )
    made.add_special_tokens({"additional_special_tokens": list(MARKS)}, replace_extra_special_tokens=False)
    return made


@pytest.fixture(scope="module", params=list(SETTINGS))
def setting(request):
    """Configuration, processor and our rule of one setting."""
    torch.set_num_threads(1)
    family, side, patch, scale, edge, fields = SETTINGS[request.param]
    small = {"intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "hidden_size": 16}
    config = CONFIGS[family](
        vision_config={"image_size": side, "patch_size": patch, **small},
        text_config={"model_type": "llama", "vocab_size": 16, "num_key_value_heads": 2, **small},
        image_token_id=2,
        scale_factor=scale,
    )
    fields = {"size": {"longest_edge": edge}, "max_image_size": {"longest_edge": side}, **fields}
    features = (side // patch // scale) ** 2
    # Pixel values decide no shape; without their arithmetic many megapixels take less time.
    cheap = {"do_rescale": False, "do_normalize": False, "resample": 0, **fields}
    videos = {**cheap, "video_sampling": {"fps": 1, "max_frames": 64, "video_size": fields["size"]}}
    if family == "idefics3":
        images = Idefics3ImageProcessorPil(**cheap)
        processor = Idefics3Processor(images, tokenizer(), image_seq_len=features)
    else:
        images = SmolVLMImageProcessorPil(**cheap)
        processor = SmolVLMProcessor(
            images, tokenizer(), SmolVLMVideoProcessor(**videos), image_seq_len=features
        )
    config_json = json.dumps(config.to_diff_dict())
    preprocessor_json = images.to_json_string()
    # Without the size of another video: the file as it is published.
    video_json = json.dumps({**fields, "video_sampling": {"fps": 1, "max_frames": 64}})

    def shape(kind, height, width, **more):
        return testing.media_shape(
            config_json, preprocessor_json, video_json, kind, height=height, width=width, **more
        )

    return SimpleNamespace(
        family=family,
        config=config,
        processor=processor,
        shape=shape,
        side=side,
        features=features,
        tile_tokens=(side // patch) ** 2,
        resizes=fields.get("do_resize", True),
        edge=edge,
    )


def written(shape):
    """The text of a shape's pieces, with the features spelt out."""
    return "".join(text if text is not None else "<image>" * count for text, count in shape.pieces)


def test_thousands_of_sizes(setting):
    """Rows, columns and text by the processor's own functions, on arrays that take no memory."""
    processor = setting.processor.image_processor
    splits = processor.do_image_splitting
    processor.resize = lambda image, size, resample: blank(*new_size(image, size))

    def new_size(image, size):
        if size.longest_edge:
            module = sys.modules[type(processor).__module__]
            return module.get_resize_output_image_size(image, resolution_max_side=size.longest_edge)
        return size.height, size.width

    for height, width in EXTREMES + drawn_sizes(SEED, 1500):
        rows = columns = 0
        if splits:
            image = blank(height, width)
            if setting.resizes:
                image = processor.resize(image, size=processor_size(processor), resample=0)
            image = processor.resize_for_vision_encoder(image, setting.side, resample=0)
            _, rows, columns = processor.split_images(image, {"longest_edge": setting.side}, resample=0)
        shape = setting.shape("image", height, width)
        tiles = rows * columns + 1
        assert shape.num_tiles == tiles, (height, width)
        assert shape.segments == [(tiles, setting.tile_tokens)]
        inputs = {"rows": [[rows]], "cols": [[columns]]}
        assert setting.processor.replace_image_token(inputs, 0) == written(shape), (height, width)
    del processor.resize


def blank(height, width):
    """An image in the order of channels, rows, columns, that takes no memory."""
    return np.broadcast_to(np.zeros(1, dtype=np.uint8), (3, height, width))


def processor_size(processor):
    """Its `size`, as its methods take it."""
    from transformers.image_utils import SizeDict

    return SizeDict(longest_edge=processor.size["longest_edge"])


def test_the_whole_processor(setting):
    """Pixel values and ids of the call itself, for samples of one image and of several."""
    drawn = [size for size in EXTREMES + drawn_sizes(SEED, 30, largest=900) if max(size) < 1200]
    if setting.edge > 2000:
        drawn = drawn[:3]
    for sample in [[size] for size in drawn[:25]] + [drawn[:3], drawn[-2:]]:
        encoded = setting.processor(
            images=[[np.zeros((*size, 3), dtype=np.uint8) for size in sample]],
            text=" ".join(["<image>"] * len(sample)),
            images_kwargs={"input_data_format": "channels_last"},
            return_tensors="pt",
        )
        shapes = [setting.shape("image", *size, num_images=len(sample)) for size in sample]
        tiles = sum(shape.num_tiles for shape in shapes)
        assert encoded["pixel_values"].shape == (1, tiles, 3, setting.side, setting.side), sample
        expected = setting.processor.tokenizer(" ".join(written(shape) for shape in shapes))["input_ids"]
        assert encoded["input_ids"][0].tolist() == expected, sample


@pytest.mark.parametrize("setting", ["smolvlm-256m", "uneven"], indirect=True)
@pytest.mark.parametrize(("num_frames", "fps"), [(1, 1.0), (7, 2.0), (120, 23.976), (400, 5.0)])
def test_video(setting, num_frames, fps):
    """One tile a frame, the text around each, and the number of frames in words."""
    videos = setting.processor.video_processor
    metadata = VideoMetadata(total_num_frames=num_frames, fps=fps, duration=num_frames / fps)
    metadata.frames_indices = videos.sample_frames(metadata)
    shape = setting.shape("video", 48, 64, num_frames=num_frames, fps=fps, duration_s=num_frames / fps)
    assert shape.frame_indices == metadata.frames_indices.tolist()
    assert shape.segments == [(len(shape.frame_indices), setting.tile_tokens)]
    frames = np.broadcast_to(np.zeros(1), (1, len(shape.frame_indices), 3, 8, 8))
    inputs = {"pixel_values": frames, "video_metadata": [metadata]}
    assert setting.processor.replace_video_token(inputs, 0) == written(shape)


def test_frames_are_those_of_the_video_processor():
    """Frames for settings of the files and for what the user asks; refusals where the processor raises."""
    rng = random.Random(SEED)
    config_json = json.dumps(
        {"model_type": "smolvlm", "vision_config": {"image_size": 64, "patch_size": 8}, "scale_factor": 2}
    )
    fields = {"size": {"longest_edge": 64}, "max_image_size": {"longest_edge": 64}}
    for _ in range(3000):
        total = round(10_000 ** rng.random())
        fps = rng.choice([1.0, 12.5, 23.976, 24, 29.97, 30, 60])
        rate, most = rng.choice([0.1, 0.5, 1, 2, 3.7]), round(64 ** rng.random())
        sampling = {"fps": rate, "max_frames": most}
        videos = SmolVLMVideoProcessor(
            **fields, video_sampling={**sampling, "video_size": {"longest_edge": 64}}
        )
        metadata = VideoMetadata(total_num_frames=total, fps=fps, duration=total / fps)
        expected = videos.sample_frames(metadata).tolist()
        arguments = {"height": 48, "width": 64, "num_frames": total, "fps": fps, "duration_s": total / fps}
        by_file = json.dumps({**fields, "video_sampling": sampling})
        plain = json.dumps(fields)
        found = testing.media_shape(config_json, plain, by_file, "video", **arguments)
        assert found.frame_indices == expected, (sampling, total, fps)
        # Asked by the user, the same numbers give the same frames.
        asked = {"max_frames": most, "sample_fps": rate}
        found = testing.media_shape(config_json, plain, plain, "video", **arguments, **asked)
        assert found.frame_indices == expected, (sampling, total, fps)


def test_numbers_are_written_as_the_package_writes_them():
    config_json = json.dumps(
        {"model_type": "smolvlm", "vision_config": {"image_size": 64, "patch_size": 8}, "scale_factor": 2}
    )
    plain = json.dumps({"size": {"longest_edge": 64}, "max_image_size": {"longest_edge": 64}})
    rng = random.Random(SEED)
    for count in [*range(1, 130), *(rng.randint(130, 65_536) for _ in range(40))]:
        size = {"height": 9, "width": 9, "num_frames": count, "fps": 1.0}
        shape = testing.media_shape(config_json, plain, plain, "video", **size)
        intro = f"You are provided the following series of {num2words(count)} frames from a "
        assert written(shape).startswith(intro), count


@pytest.mark.parametrize("setting", ["uneven", "whole"], indirect=True)
def test_the_whole_model_takes_them(setting):
    """A forward of a small model, which itself compares placeholders with features."""
    torch.manual_seed(SEED)
    model = AutoModelForImageTextToText.from_config(setting.config).eval()
    seen = []
    model.model.vision_model.encoder.layers[0].register_forward_pre_hook(
        lambda _, args: seen.append(tuple(args[0].shape[:2]))
    )
    for sizes in ([(100, 300)], [(50, 90), (90, 50)]):
        encoded = setting.processor(
            images=[[np.full((*size, 3), 7, dtype=np.uint8) for size in sizes]],
            text=" ".join(["<image>"] * len(sizes)),
            images_kwargs={"input_data_format": "channels_last"},
            return_tensors="pt",
        )
        encoded["pixel_values"] = encoded["pixel_values"].float() / 255
        encoded["input_ids"] = encoded["input_ids"].clamp(max=15)
        shapes = [setting.shape("image", *size, num_images=len(sizes)) for size in sizes]
        with torch.no_grad():
            model(**{k: encoded[k] for k in ("input_ids", "pixel_values", "pixel_attention_mask")})
        assert int((encoded["input_ids"] == 2).sum()) == sum(shape.feature_tokens for shape in shapes)
        assert seen[-1] == (sum(shape.num_tiles for shape in shapes), setting.tile_tokens)


def test_the_files_that_transformers_saves_are_read(setting, tmp_path):
    """`config.json` and the one file into which the processor writes all its fields."""
    setting.config.save_pretrained(tmp_path)
    setting.processor.save_pretrained(tmp_path)
    config_json = (tmp_path / "config.json").read_text()
    processor_json = (tmp_path / "processor_config.json").read_text()
    # Without resizing frames would keep their size, which we refuse.
    kinds = ("image", "video") if setting.family == "smolvlm" and setting.resizes else ("image",)
    for kind in kinds:
        size = {"height": 123, "width": 456, "num_frames": 5, "fps": 2.0}
        shape = testing.media_shape(config_json, processor_json, "{}", kind, **size)
        expected = setting.shape(kind, **size)
        assert (shape.num_tiles, shape.segments) == (expected.num_tiles, expected.segments)
        assert (shape.pieces, shape.frame_indices) == (expected.pieces, expected.frame_indices)


def test_what_only_one_of_the_two_reads():
    config_json = json.dumps(
        {"model_type": "idefics3", "vision_config": {"image_size": 364, "patch_size": 14}}
    )
    with pytest.raises(dflop.ProfileError, match="no idefics3 shape for a video"):
        testing.media_shape(config_json, "{}", "{}", "video", height=9, width=9, num_frames=3, fps=1.0)
