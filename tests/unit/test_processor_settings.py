"""Settings that processors seldom have: our rule gives the shapes of Hugging Face's processor, or refuses by name."""

from __future__ import annotations

import copy
import json
from typing import TYPE_CHECKING, Any

import processor_dirs
import pytest
from processor_specs import _GLM, _PLACES, _QWEN3
from tiny_families import TINY

from dflop import ProfileError
from dflop._native import testing
from dflop.data.processor.rule import ProcessorRule

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = pytest.mark.usefixtures("quiet")
QUESTION: dict[str, Any] = {
    "height": 0, "width": 0, "num_images": 0, "num_frames": 0, "fps": None, "duration_s": None, "sample_rate": 0,
    "max_frames": None, "sample_fps": None,
}  # fmt: skip
SIZES = [(31, 90), (57, 56), (112, 56), (100, 300), (420, 130), (256, 256)]
TILE = {"height": 56, "width": 56}
PINPOINTS = [[56, 112], [112, 56], [112, 112], [168, 56]]
_SIGLIP = {**TINY["llava-siglip"]["vision_config"], "image_size": 56, "patch_size": 14}
_SCALED = {"size": {"longest_edge": 168}, "max_image_size": {"longest_edge": 56}}
_FRAMES = {"size": {"longest_edge": 56}, "max_image_size": {"longest_edge": 56}}
_POOLED = {"patch_size": 4, "pooling_kernel_size": 2}
_NUMBERED = {
    f"{name}_token": text
    for name, text in {
        "image": "<|image_pad|>", "video": "<|video_pad|>", "image_start": "<image>", "image_end": "</image>",
        "slice_start": "<slice>", "slice_end": "</slice>", "image_id_start": "<image_id>",
        "image_id_end": "</image_id>",
    }.items()
}  # fmt: skip
_QWEN3_CLASSES = {
    "processor": "Qwen3VLProcessor",
    "image_processor": "Qwen2VLImageProcessor",
    "video_processor": "Qwen3VLVideoProcessor",
}
_GLM_CLASSES = {
    "processor": "Glm4vProcessor",
    "image_processor": "Glm4vImageProcessor",
    "video_processor": "Glm4vVideoProcessor",
}

SPECS: dict[str, dict[str, Any]] = {
    "llava_onevision": {
        "tokens": ["<image>", "<video>"],
        "marks": {"image": "<image>", "video": "<video>"},
        "ids": {"image_token_index": "<image>", "video_token_index": "<video>"},
        "parts": {
            "image_processor": {"size": TILE, "image_grid_pinpoints": PINPOINTS},
            "video_processor": {"size": TILE},
        },
        "num_image_tokens": 16,
        "vision_feature_select_strategy": "full",
        "vision_aspect_ratio": "anyres_max_2",
    },
    "smolvlm": {
        "tokens": ["<fake_token_around_image>", "<image>", "<video>", "<end_of_utterance>", "<global-img>", *_PLACES],
        "marks": {"image": "<image>", "video": "<video>"},
        "ids": {"image_token_id": "<image>"},
        "parts": {"image_processor": _SCALED, "video_processor": _FRAMES},
        "image_seq_len": 4,
    },
    "gemma3": {
        "tokens": [],
        "named": {"boi_token": "<start_of_image>", "eoi_token": "<end_of_image>", "image_token": "<image_soft_token>"},
        "marks": {"image": "<start_of_image>"},
        "ids": {"image_token_index": "<image_soft_token>", "image_token_id": "<image_soft_token>"},
        "parts": {"image_processor": {"size": TILE}},
        "image_seq_length": 16,
    },
    "gemma4": {
        "tokens": ["<|video|>"],
        "named": {
            "image_token": "<|image|>", "boi_token": "<|image>", "eoi_token": "<image|>",
            "audio_token": "<|audio|>", "boa_token": "<|audio>", "eoa_token": "<audio|>",
        },
        "marks": {"image": "<|image|>", "video": "<|video|>"},
        "ids": {"image_token_id": "<|image|>", "video_token_id": "<|video|>"},
        "parts": {
            "image_processor": {**_POOLED, "max_soft_tokens": 70}, "video_processor": _POOLED, "feature_extractor": {},
        },
    },
    "lfm2_vl": {
        "tokens": [
            "<image>", "<|image_start|>", "<|image_end|>", "<|img_thumbnail|>",
            *(f"<|img_row_{row}_col_{column}|>" for row in range(1, 11) for column in range(1, 11)),
        ],
        "marks": {"image": "<image>"},
        "ids": {"image_token_id": "<image>"},
        "parts": {
            "image_processor": {
                "encoder_patch_size": 14, "downsample_factor": 2, "tile_size": 56, "min_image_tokens": 1,
                "max_image_tokens": 8, "max_tiles": 4,
            },
        },
    },
    "minicpmv4_6": {
        "tokens": [],
        "named": _NUMBERED,
        "marks": {"image": "<|image_pad|>"},
        "ids": {"image_token_id": "<|image_pad|>", "video_token_id": "<|video_pad|>"},
        "parts": {"image_processor": {"scale_resolution": 112}, "video_processor": {}},
    },
    "qwen3_vl": _QWEN3,
    "qwen3_vl_moe": {**_QWEN3, "classes": _QWEN3_CLASSES},
    "qwen3_5_moe": {**_QWEN3, "classes": _QWEN3_CLASSES},
    "glm4v_moe": {**_GLM, "classes": _GLM_CLASSES},
}  # fmt: skip
CONFIGS = {
    "llava_onevision": {
        "vision_config": _SIGLIP,
        "text_config": {**TINY["llava-siglip"]["text_config"], "model_type": "qwen2"},
        "image_grid_pinpoints": PINPOINTS,
        "vision_aspect_ratio": "anyres_max_2",
    },
    "gemma4": {
        **TINY["gemma4"],
        "vision_config": {**TINY["gemma4"]["vision_config"], "position_embedding_size": 10_240},
    },
    "smolvlm": {**TINY["smolvlm"], "scale_factor": 2},
}
# A part and fields of it; null is no for transformers, where the class would do a thing.
UNUSUAL: dict[str, list[tuple[str, dict[str, Any]]]] = {
    "llava_onevision": [
        ("image_processor", {"size": {"shortest_edge": 56}}), ("video_processor", {"do_center_crop": None}),
        ("image_processor", {"do_resize": None}), ("image_processor", {"do_resize": False}),
    ],
    "smolvlm": [("image_processor", {"do_image_splitting": None}), ("image_processor", {"size": {"longest_edge": 157}})],
    "gemma3": [("image_processor", {"do_pan_and_scan": None, "do_convert_rgb": None})],
    "gemma4": [("video_processor", {"do_sample_frames": None}), ("video_processor", {"num_frames": 3})],
    "lfm2_vl": [("image_processor", {name: None}) for name in ("use_thumbnail", "do_image_splitting")],
    "minicpmv4_6": [
        ("image_processor", {name: None, "max_slice_nums": 4}) for name in ("slice_mode", "use_image_id")
    ],
    "qwen3_vl": [
        ("video_processor", {"do_sample_frames": None}),
        ("video_processor", {"fps": None}), ("video_processor", {"fps": None, "num_frames": 4}),
    ],
    "qwen3_vl_moe": [("video_processor", {"fps": 3, "min_frames": 2, "max_frames": 6})],
    "qwen3_5_moe": [("image_processor", {"size": {"shortest_edge": 3136, "longest_edge": 20_000}})],
    "glm4v_moe": [("video_processor", {"do_sample_frames": None})],
}  # fmt: skip


def written(folder: Path, family: str, part: str, fields: dict[str, Any]) -> tuple[str, str]:
    """A model directory whose processor has these fields; its configuration and the processor's file."""
    spec, config = copy.deepcopy(SPECS[family]), copy.deepcopy(CONFIGS.get(family, TINY.get(family)))
    assert config is not None
    processor_dirs.write(folder, family, config, **spec)
    path = folder / "processor_config.json"
    saved = json.loads(path.read_text())
    # As a file has them: a processor that is made of a null would not write it.
    saved.setdefault(part, {}).update(fields)
    path.write_text(json.dumps(saved))
    return (folder / "config.json").read_text(), json.dumps(saved)


def questions(kinds: list[str]) -> list[dict[str, Any]]:
    found = []
    for place, (height, width) in enumerate(SIZES):
        size = {**QUESTION, "height": height, "width": width}
        if "image" in kinds:
            found.append({**size, "kind": "image", "num_images": 1})
        if "video" in kinds:
            frames = {"num_frames": 3 + 5 * place, "fps": 4.0, "duration_s": (3 + 5 * place) / 4}
            found.append({**size, "kind": "video", **frames})
    return found


def ours(config: str, processor: str, question: dict[str, Any]) -> Any:
    asked = {name: value for name, value in question.items() if value is not None and name != "kind"}
    try:
        shape = testing.media_shape(config, processor, "{}", question["kind"], **asked)
    except ProfileError as error:
        if " shape for " not in str(error):
            raise
        return "refused"
    pieces = [count if text is None else text for text, count in shape.pieces]
    runs: list[tuple[int, int]] = []
    for count, tokens in shape.segments:
        # The whole and its slices may be alike.
        before = runs.pop()[0] if runs and runs[-1][1] == tokens else 0
        runs.append((before + count, tokens))
    return runs, pieces, shape.frame_indices


def theirs(rule: ProcessorRule, question: dict[str, Any]) -> Any:
    try:
        shape = rule(**question)
    except ValueError:
        return "refused"
    # Its number in the sample, which the rule of ours leaves to the sample.
    pieces = [
        one.replace("<image_id>0</image_id>", "") if isinstance(one, str) else one for one in shape["pieces"]
    ]
    return shape["segments"], pieces, shape.get("frame_indices", [])


CASES = [(family, *case) for family, cases in UNUSUAL.items() for case in cases]


@pytest.mark.parametrize(("family", "part", "fields"), CASES)
def test_shapes_are_those_of_the_processor(
    family: str, part: str, fields: dict[str, Any], tmp_path: Path
) -> None:
    config, processor = written(tmp_path, family, part, fields)
    rule = ProcessorRule(tmp_path)
    kinds = [kind for kind in rule.marks if family != "minicpmv4_6" or kind == "image"]
    same = 0
    for question in questions(kinds):
        expected = theirs(rule, question)
        assert ours(config, processor, question) == expected, question
        same += expected != "refused"
    assert same >= 4


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"do_sample_frames": True, "num_frames": 3}, "`do_sample_frames` of `"),
        ({"do_center_crop": True, "crop_size": {"height": 28, "width": 28}}, "`crop_size.width` of `"),
        ({"do_resize": None}, "`do_resize` of `"),
        ({"size": {"shortest_edge": 56}}, "`size.width` of `"),
    ],
)
def test_videos_that_llava_onevision_reads_otherwise_are_refused(
    fields: dict[str, Any], words: str, tmp_path: Path
) -> None:
    """The processor gives other frames, or frames that its encoder does not read; images stay sound."""
    config, processor = written(tmp_path, "llava_onevision", "video_processor", fields)
    clip = {"height": 48, "width": 64, "num_frames": 9, "fps": 3.0, "duration_s": 3.0}
    with pytest.raises(ProfileError, match=words):
        testing.media_shape(config, processor, "{}", "video", **clip)
    assert (
        testing.media_shape(config, processor, "{}", "image", height=48, width=64, num_images=1).num_tiles
        == 3
    )
    if "do_sample_frames" in fields:
        assert testing.media_shape(config, processor, "{}", "video", **clip, max_frames=2).num_tiles == 2


@pytest.mark.parametrize(
    ("family", "field"), [("lfm2_vl", "do_pad"), ("gemma3", "do_resize"), ("minicpmv4_6", "do_resize")]
)
def test_a_null_that_the_processor_fails_with_is_named(family: str, field: str, tmp_path: Path) -> None:
    config, processor = written(tmp_path, family, "image_processor", {field: None})
    with pytest.raises(ProfileError, match=f"`{field}` is null, must be true"):
        testing.media_shape(config, processor, "{}", "image", height=48, width=64, num_images=1)
