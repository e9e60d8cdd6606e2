"""What the processors of families need: `KNOWN` have a shape rule in Rust, `OTHERS` have none."""

from __future__ import annotations

import copy
from typing import TYPE_CHECKING, Any

import processor_dirs
from processor_more import MORE, PALIGEMMA_TEMPLATE, REFUSED
from tiny_families import TINY

if TYPE_CHECKING:
    from pathlib import Path

_SQUARE = {"size": {"height": 56, "width": 56}}
_CLIP = {"size": {"shortest_edge": 56}, "crop_size": {"height": 56, "width": 56}}
_PATCH = {"patch_size": 14}
_PIXTRAL = {"image_processor": {"size": {"longest_edge": 224}, "patch_size": 14}}
_QWEN = {
    "tokens": ["<|vision_start|>", "<|vision_end|>"],
    "named": {"image_token": "<|image_pad|>", "video_token": "<|video_pad|>"},
    "marks": {
        "image": "<|vision_start|><|image_pad|><|vision_end|>",
        "video": "<|vision_start|><|video_pad|><|vision_end|>",
    },
    "ids": {"image_token_id": "<|image_pad|>", "video_token_id": "<|video_pad|>"},
}
_QWEN3 = {**_QWEN, "parts": {"image_processor": _PATCH, "video_processor": _PATCH}}
_GLM = {
    "tokens": ["<|begin_of_image|>", "<|end_of_image|>", "<|begin_of_video|>", "<|end_of_video|>"],
    "named": {"image_token": "<|image|>", "video_token": "<|video|>"},
    "marks": {
        "image": "<|begin_of_image|><|image|><|end_of_image|>",
        "video": "<|begin_of_video|><|video|><|end_of_video|>",
    },
    "ids": {"image_token_id": "<|image|>", "video_token_id": "<|video|>"},
}
_PLACES = [f"<row_{row}_col_{column}>" for row in range(1, 7) for column in range(1, 7)]
_SPLIT = {"size": {"longest_edge": 4 * 56}, "max_image_size": {"longest_edge": 56}}
_IMAGE = {
    "tokens": ["<image>"],
    "marks": {"image": "<image>"},
    "ids": {"image_token_index": "<image>", "image_token_id": "<image>"},
}
_LLAVA = {
    **_IMAGE,
    "patch_size": 14,
    "vision_feature_select_strategy": "default",
    "num_additional_image_tokens": 1,
}
_MEL = {"feature_extractor": {"feature_size": 8}}
_OMNI = {
    "tokens": [],
    "named": {
        **{f"{kind}_token": f"<|{kind}_pad|>" for kind in ("image", "video", "audio")},
        "vision_bos_token": "<|vision_start|>",
        "vision_eos_token": "<|vision_end|>",
        "audio_bos_token": "<|audio_start|>",
        "audio_eos_token": "<|audio_end|>",
    },
    "marks": {
        "image": "<|vision_start|><|image_pad|><|vision_end|>",
        "video": "<|vision_start|><|video_pad|><|vision_end|>",
        "audio": "<|audio_start|><|audio_pad|><|audio_end|>",
    },
    "ids": {f"{kind}_token_id": f"<|{kind}_pad|>" for kind in ("image", "video", "audio")},
}

KNOWN: dict[str, dict[str, Any]] = {
    "qwen2_vl": _QWEN,
    "qwen2_5_vl": _QWEN,
    "qwen3_vl": _QWEN3,
    "qwen3_5": _QWEN3,
    "glm4v": _GLM,
    "glm46v": _GLM,
    "internvl": {
        "tokens": [],
        "named": {
            "context_image_token": "<IMG_CONTEXT>",
            "start_image_token": "<img>",
            "end_image_token": "</img>",
            "video_token": "<video>",
        },
        "marks": {"image": "<IMG_CONTEXT>", "video": "<video>"},
        "ids": {"image_token_id": "<IMG_CONTEXT>"},
        "parts": {"image_processor": _SQUARE, "video_processor": _SQUARE},
        "image_seq_length": 4,
    },
    "idefics3": {
        "tokens": [
            "<fake_token_around_image>",
            "<image>",
            "<end_of_utterance>",
            "<global-img>",
            *_PLACES,
        ],
        "marks": {"image": "<image>"},
        "ids": {"image_token_id": "<image>"},
        "parts": {"image_processor": _SPLIT},
        "image_seq_len": 4,
    },
    "llava": {**_LLAVA, "parts": {"image_processor": _CLIP}},
    "llava_next": {
        **_LLAVA,
        "parts": {"image_processor": {**_CLIP, "image_grid_pinpoints": [[56, 112], [112, 56], [112, 112]]}},
    },
    "mistral3": {
        "tokens": ["[IMG]", "[IMG_BREAK]", "[IMG_END]"],
        "marks": {"image": "[IMG]"},
        "ids": {"image_token_index": "[IMG]", "image_token_id": "[IMG]"},
        "parts": _PIXTRAL,
        "patch_size": 14,
        "spatial_merge_size": 2,
    },
    "lighton_ocr": {
        "tokens": [],
        "named": {
            "image_token": "<|image_pad|>",
            "image_break_token": "<|vision_pad|>",
            "image_end_token": "<|vision_end|>",
        },
        "marks": {"image": "<|image_pad|>"},
        "ids": {"image_token_id": "<|image_pad|>"},
        "parts": _PIXTRAL,
        "patch_size": 14,
        "spatial_merge_size": 2,
    },
    "paddleocr_vl": {
        "tokens": ["<|IMAGE_START|>", "<|IMAGE_END|>"],
        "named": {"image_token": "<|IMAGE_PLACEHOLDER|>"},
        "marks": {"image": "<|IMAGE_START|><|IMAGE_PLACEHOLDER|><|IMAGE_END|>"},
        "ids": {"image_token_id": "<|IMAGE_PLACEHOLDER|>"},
    },
    "qwen2_audio": {
        "tokens": ["<|AUDIO|>", "<|audio_bos|>", "<|audio_eos|>"],
        "marks": {"audio": "<|audio_bos|><|AUDIO|><|audio_eos|>"},
        "ids": {"audio_token_index": "<|AUDIO|>", "audio_token_id": "<|AUDIO|>"},
        "parts": _MEL,
    },
    "audioflamingo3": {
        "tokens": ["<sound>"],
        "marks": {"audio": "<sound>"},
        "ids": {"audio_token_id": "<sound>"},
        "parts": _MEL,
    },
    "qwen2_5_omni": {
        **_OMNI,
        "parts": {**_MEL, "image_processor": _PATCH, "video_processor": _PATCH},
    },
    "qwen3_omni_moe": {
        **_OMNI,
        "parts": {**_MEL, "image_processor": _PATCH, "video_processor": _PATCH},
    },
}

_VISION = {
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 64,
    "patch_size": 14,
    "image_size": 56,
}
_TEXT = {
    "hidden_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "intermediate_size": 96,
    "vocab_size": 300,
}
_SIGLIP = {**_VISION, "model_type": "siglip_vision_model"}

OTHERS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "aya_vision": (
        {
            "vision_config": _SIGLIP,
            "text_config": {**_TEXT, "model_type": "cohere2"},
            "downsample_factor": 2,
        },
        {
            "tokens": [
                "<image>",
                "<|START_OF_IMG|>",
                "<|END_OF_IMG|>",
                "<|IMG_PATCH|>",
                "<|IMG_LINE_BREAK|>",
                "TILE",
                "TILE_GLOBAL",
            ],
            "marks": {"image": "<image>"},
            "ids": {"image_token_index": "<|IMG_PATCH|>"},
            "parts": {"image_processor": {**_SQUARE, "min_patches": 1, "max_patches": 12}},
            "patch_size": 14,
            "img_size": 56,
            "downsample_factor": 2,
        },
    ),
    "llama4": (
        {
            "vision_config": {**_VISION, "pixel_shuffle_ratio": 0.5, "num_channels": 3},
            "text_config": {**_TEXT, "head_dim": 12, "intermediate_size_mlp": 64},
            "boi_token_index": 1,
        },
        {
            "tokens": [
                "<|image_start|>",
                "<|image_end|>",
                "<|image|>",
                "<|patch|>",
                "<|tile_x_separator|>",
                "<|tile_y_separator|>",
            ],
            "marks": {"image": "<|image|>"},
            "ids": {"image_token_index": "<|patch|>", "image_token_id": "<|patch|>"},
            "parts": {"image_processor": _SQUARE},
            "patch_size": 14,
            "pixel_shuffle_ratio": 0.5,
        },
    ),
    "ovis2": (
        {
            "vision_config": {**_VISION, "hidden_stride": 2, "num_visual_indicator_tokens": 5},
            "text_config": {**_TEXT, "model_type": "qwen2"},
            "visual_indicator_token_ids": [1, 2, 3, 4, 5],
        },
        {
            "tokens": [
                "<image>",
                "<IMG_START>",
                "<IMG_GRID>",
                "<IMG_COL>",
                "<IMG_ROW>",
                "<IMG_END>",
                "<IMG_ATOM>",
                "<image_pad>",
            ],
            "marks": {"image": "<image>"},
            "ids": {"image_token_id": "<IMG_ATOM>"},
            "parts": {"image_processor": _SQUARE},
            "image_seq_length": 4,
        },
    ),
    "video_llama_3": (
        {
            "vision_config": {k: v for k, v in _VISION.items() if k != "image_size"},
            "text_config": {**_TEXT, "model_type": "qwen2"},
        },
        {
            "tokens": [],
            "named": {"image_token": "<image>", "video_token": "<video>"},
            "marks": {"image": "<image>", "video": "<video>"},
            "ids": {"image_token_id": "<image>", "video_token_id": "<video>"},
        },
    ),
    "paligemma": (
        {
            "vision_config": _SIGLIP,
            "text_config": {**_TEXT, "model_type": "gemma", "head_dim": 12, "vocab_size": 1_500},
        },
        {
            **_IMAGE,
            "parts": {"image_processor": {**_SQUARE, "image_seq_length": 16}},
            "chat_template": PALIGEMMA_TEMPLATE,
        },
    ),
    **MORE,
}


def write(folder: Path, model_type: str, *, refused: bool = False) -> Any:
    """Writes the model directory of a family, without weights.

    Args:
        folder: to be made.
        model_type: of `KNOWN` or `OTHERS`.
        refused: of `REFUSED`.

    Returns:
        The processor.
    """
    if refused:
        config, spec, _ = REFUSED[model_type]
    else:
        config, spec = OTHERS[model_type] if model_type in OTHERS else (TINY[model_type], KNOWN[model_type])
    config = copy.deepcopy(config)
    if "audio_config" in config and model_type in KNOWN:
        # That of a window of 30 s, which the processor makes.
        config["audio_config"] |= {"max_source_positions": 1_500, "num_mel_bins": 8}
    return processor_dirs.write(folder, model_type, config, **copy.deepcopy(spec))
