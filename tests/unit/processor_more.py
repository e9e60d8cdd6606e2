"""What the processors of further families without a shape rule in Rust need: `MORE`; `REFUSED` cannot be followed."""

from __future__ import annotations

from typing import Any

from processor_dirs import BOS

_SQUARE = {"size": {"height": 56, "width": 56}}
_SMALL = {"hidden_size": 32, "num_attention_heads": 4, "intermediate_size": 64, "num_hidden_layers": 2}
_IMAGE = {"image_token": "<image>"}
_BOTH = {**_IMAGE, "video_token": "<video>"}
_ID = {"image_token_id": "<image>"}
_IDS = {**_ID, "video_token_id": "<video>"}
_HUNYUAN = {**_IMAGE, "image_start_token": "<im_start>", "image_end_token": "<im_end>"}
_ERNIE = {
    **_BOTH,
    **{f"{kind}_{end}_token": f"<{kind}_{end}>" for kind in ("image", "video") for end in ("start", "end")},
}

MORE: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "cohere2_vision": (
        {},
        {
            "tokens": [],
            "named": {
                **_IMAGE,
                "boi_token": "<boi>",
                "eoi_token": "<eoi>",
                "img_line_break_token": "<line>",
            },
            "marks": {"image": "<image>"},
            "ids": _ID,
            "parts": {"image_processor": {**_SQUARE, "patch_size": 14}},
        },
    ),
    "deepseek_vl": (
        {},
        {"tokens": [], "named": _IMAGE, "marks": {"image": "<image>"}, "ids": _ID},
    ),
    "ernie4_5_vl_moe": (
        {},
        {
            "tokens": [],
            "named": _ERNIE,
            "marks": {"image": "<image_start><image><image_end>", "video": "<video_start><video><video_end>"},
            "ids": _IDS,
            "parts": {"video_processor": {"draw_on_frames": False}},
        },
    ),
    "hunyuan_vl": (
        {},
        {
            "tokens": [],
            "named": _HUNYUAN,
            "marks": {"image": "<im_start><image><im_end>"},
            "ids": _ID,
        },
    ),
    "janus": (
        {},
        {
            "tokens": [],
            "named": {**_IMAGE, "boi_token": "<boi>", "eoi_token": "<eoi>"},
            "marks": {"image": "<image>"},
            "ids": _ID,
        },
    ),
    "kimi_k25": (
        {},
        {
            "tokens": ["<|kimi_k25_video_placeholder|>", "<|media_pad|>"],
            "marks": {"image": "<|media_pad|>", "video": "<|kimi_k25_video_placeholder|>"},
            "ids": {"image_token_id": "<|media_pad|>"},
        },
    ),
    "mllama": (
        {
            "vision_config": {
                "hidden_size": 32,
                "attention_heads": 4,
                "intermediate_size": 64,
                "num_hidden_layers": 2,
                "num_global_layers": 1,
                "intermediate_layers_indices": [0],
                "image_size": 56,
                "max_num_tiles": 4,
            }
        },
        {
            "tokens": ["<|image|>", "<|python_tag|>"],
            "marks": {"image": "<|image|>"},
            "ids": {"image_token_index": "<|image|>"},
            "parts": {"image_processor": {**_SQUARE, "max_image_tiles": 4}},
            "start": BOS,
        },
    ),
    "molmo2": (
        {
            "vision_config": {**_SMALL, "num_key_value_heads": 4, "head_dim": 8},
            "adapter_config": {"vision_feature_layer": [-1, -2]},
        },
        {
            "tokens": [
                "<frame_end>",
                "<frame_start>",
                "<im_col>",
                "<im_end>",
                "<im_low>",
                "<im_patch>",
                "<im_start>",
                "<low_res_im_start>",
                "<|image|>",
                "<|video|>",
            ],
            "marks": {"image": "<|image|>", "video": "<|video|>"},
            "ids": {"image_patch_id": "<im_patch>"},
            "start": BOS,
        },
    ),
    "perception_lm": (
        {},
        {
            "tokens": [],
            "named": _BOTH,
            "marks": {"image": "<image>", "video": "<video>"},
            "ids": _IDS,
            "parts": {"image_processor": {"tile_size": 56, "max_num_tiles": 4}},
            "patch_size": 14,
            "pooling_ratio": 2,
        },
    ),
    "phi4_multimodal": (
        {
            "vision_config": {**_SMALL, "num_hidden_layers": 3},
            "audio_config": {
                **_SMALL,
                "num_blocks": 2,
                "ext_pw_out_channel": 32,
                "nemo_conv_channels": 32,
                "depthwise_separable_out_channel": 32,
            },
        },
        {
            "tokens": [],
            "named": {**_IMAGE, "audio_token": "<audio>"},
            "marks": {"image": "<image>", "audio": "<audio>"},
            "ids": {},
        },
    ),
    "qianfan_ocr": (
        {},
        {
            "tokens": ["<image>"],
            "named": {
                "context_image_token": "<IMG_CONTEXT>",
                "start_image_token": "<img>",
                "end_image_token": "</img>",
            },
            "marks": {"image": "<image>"},
            "ids": {"image_token_id": "<IMG_CONTEXT>"},
        },
    ),
    "video_llava": (
        {},
        {
            "tokens": ["<image>", "<video>"],
            "marks": {"image": "<image>", "video": "<video>"},
            "ids": {"image_token_index": "<image>", "video_token_index": "<video>"},
            "patch_size": 14,
            "vision_feature_select_strategy": "default",
            "num_additional_image_tokens": 1,
        },
    ),
}

PALIGEMMA_TEMPLATE = (
    "{% for message in messages %}{% for part in message['content'] %}{% if part['type'] == 'image' %}"
    "{{ '<image>' }}{% else %}{{ part['text'] }}{% endif %}{% endfor %}"
    "{{ '\n' if message['role'] == 'user' else eos_token }}{% endfor %}"
)
"""As docs/data.md has it."""

REFUSED: dict[str, tuple[dict[str, Any], dict[str, Any], str]] = {
    "deepseek_vl_hybrid": (
        {},
        {"tokens": [], "named": _IMAGE, "marks": {"image": "<image>"}, "ids": _ID},
        "are not known from what the processor gives: `high_res_pixel_values`",
    ),
    "emu3": (
        {},
        {
            "tokens": [],
            "named": {
                **_IMAGE,
                "boi_token": "<boi>",
                "eoi_token": "<eoi>",
                "image_wrapper_token": "<wrap>",
                "eof_token": "<eof>",
            },
            "marks": {"image": "<image>"},
            "ids": _ID,
        },
        "its encoder is a stack of convolutions",
    ),
    "florence2": (
        {},
        {"tokens": [], "named": _IMAGE, "marks": {"image": "<image>"}, "ids": _ID},
        "`florence2` has an encoder and a decoder of text",
    ),
    "idefics2": (
        {},
        {
            "tokens": ["<end_of_utterance>", "<fake_token_around_image>", "<image>"],
            "marks": {"image": "<image>"},
            "ids": _ID,
        },
        "Idefics2Processor changes a text besides its media",
    ),
    "mllama": (
        *MORE["mllama"][:1],
        {**MORE["mllama"][1], "start": ""},
        "MllamaProcessor puts `<s>` before a text",
    ),
    # Without a template that writes the answer as the processor has it.
    "paligemma": (
        {},
        {
            "tokens": ["<image>"],
            "marks": {"image": "<image>"},
            "ids": {"image_token_index": "<image>"},
            "parts": {"image_processor": {**_SQUARE, "image_seq_length": 16}},
        },
        "PaliGemmaProcessor changes a text besides its media",
    ),
}
