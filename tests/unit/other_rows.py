"""Rows for the models of `other_families.py`, and batches of them.

A row has media, as many tokens for them as the model makes features, and text.
"""

from __future__ import annotations

import inspect

import torch
from other_families import TOKENS
from torch.nn import functional as F

OF_GRIDS = (
    *("cohere_compass", "cosmos3_edge", "cosmos3_omni", "ernie4_5_vl_moe", "exaone4_5", "glm5_next", "glmga"),
    *("hunyuan_vl", "hyperclovax_vision_v2", "kimi_k25", "lfm3_vl", "minimax_m3_vl", "muse_glimmer"),
    *("qwen4_exp", "video_llama_3"),
)
"""Families that read patches and `image_grid_thw`."""
_APART = (
    "glmga",
    "qwen4_exp",
    "cosmos3_edge",
    "cosmos3_omni",
    "cohere_compass",
    "hunyuan_vl",
    "ernie4_5_vl_moe",
)
"""Those of them whose pictures need a token between them: what stands side by side would be one."""
OF_SOUNDS = (
    *(
        "fun_asr_nano",
        "glmasr",
        "granite_speech",
        "granite_speech_plus",
        "moss_transcribe_diarize",
        "qwen3_asr",
    ),
)


def media(model, name, num, generator):
    """Arguments of the model for `num` pictures or sounds, the second picture smaller where sizes differ."""
    config = model.config

    def drawn(*shape):
        return torch.randn(*shape, generator=generator)

    if name in OF_GRIDS:
        grids = [[1, 8, 6], [1, 4, 4]][:num]
        count = sum(rows * columns for _, rows, columns in grids)
        arguments = {"image_grid_thw": torch.tensor(grids)}
        width = {"video_llama_3": 588, "cosmos3_edge": 588, "hunyuan_vl": 588, "ernie4_5_vl_moe": 588}.get(
            name, 1176
        )
        arguments["pixel_values"] = drawn(count, 3, 14, 14) if name == "kimi_k25" else drawn(count, width)
        if name == "video_llama_3":
            arguments["image_merge_sizes"] = torch.ones(num, dtype=torch.long)
        return arguments
    if name.startswith("granite_speech"):
        mask = torch.ones(num, 12, dtype=torch.bool)
        return {"input_features": drawn(num, 60, 16), "input_features_mask": mask}
    if name == "fun_asr_nano":
        width = 8 * config.audio_config.num_stacked_frames
        return {
            "input_features": drawn(num, 40, width),
            "input_features_mask": torch.ones(num, 40, dtype=torch.long),
        }
    if name in OF_SOUNDS:
        frames = 200 if name == "qwen3_asr" else 40
        arguments = {"input_features": drawn(num, 8, frames)}
        arguments["input_features_mask"] = torch.ones(num, frames, dtype=torch.long)
        if name == "moss_transcribe_diarize":
            arguments["padding_mask"] = torch.ones(num, 160 * frames, dtype=torch.long)
        return arguments
    if name == "molmo2":
        # Which of a crop's 4 x 4 patches are pooled.
        pooled = torch.arange(16).view(2, 2, 2, 2).permute(0, 2, 1, 3).reshape(4, 4)
        return {
            "pixel_values": drawn(num, 16, 588),
            "image_token_pooling": torch.cat([pooled + 16 * crop for crop in range(num)]),
            "image_grids": torch.tensor([[2, 2, 0, 0]] * num),
            "image_num_crops": torch.ones(num, dtype=torch.long),
        }
    if name == "gemma4_unified":
        places = torch.stack([torch.arange(16) % 4, torch.arange(16) // 4], dim=-1)
        width = 3 * config.vision_config.model_patch_size**2
        return {"pixel_values": drawn(num, 16, width), "image_position_ids": torch.stack([places] * num)}
    if name == "nemotron_h_omni":
        sizes = [[8, 6], [4, 4]][:num]
        count = sum(rows * columns for rows, columns in sizes)
        return {"pixel_values": drawn(count, 588), "image_grid_hw": torch.tensor(sizes)}
    if name == "minicpm_ocr":
        sizes = [(8, 4), (4, 4)][:num]
        count = sum(rows * columns for rows, columns in sizes)
        return {
            "pixel_values": drawn(1, 3, 14, 14 * count),
            "target_sizes": torch.tensor(sizes, dtype=torch.int32),
        }
    if name == "phi4_multimodal":
        return {
            "image_pixel_values": drawn(num, 2, 3, 56, 56),
            "image_sizes": torch.tensor([[56, 56]] * num),
            "image_attention_mask": torch.ones(num, 2, 4, 4, dtype=torch.bool),
        }
    if name == "mistral_large4":
        return {
            "pixel_values": drawn(num, 3, 112, 112),
            "image_sizes": torch.tensor([[112, 112], [112, 56]][:num]),
        }
    if name == "llava_next_video":
        return {"pixel_values": drawn(num, 3, 3, 56, 56), "image_sizes": torch.tensor([[56, 112]] * num)}
    pixels = drawn(num, 3, 56, 56)
    return {"pixel_values": pixels[None] if name == "idefics2" else pixels}


def _num_features(model, name, arguments):
    """How many features the model makes of each medium."""
    if name == "phi4_multimodal":
        # 2 x 3 of the crop with an end of each row, one between, 2 x 3 of the whole.
        return [13] * len(arguments["image_sizes"])
    method = "get_audio_features" if "input_features" in arguments else "get_image_features"
    read = getattr(getattr(model, "model", model), method, None) or getattr(model, method)
    known = inspect.signature(read).parameters
    with torch.no_grad():
        found = read(**{key: value for key, value in arguments.items() if key in known}).pooler_output
    if isinstance(found, torch.Tensor):
        return [found.shape[:-1].numel()]
    return [one.shape[:-1].numel() for one in found]


def sample(model, name, seed, num_media=1, num_text=7):
    """Arguments of the whole model for one row; labels are of the text behind three words."""
    generator = torch.Generator().manual_seed(seed)
    arguments = media(model, name, num_media, generator) if num_media else {}
    ids = []
    token = TOKENS["audio" if name in OF_SOUNDS else "image"]
    for count in _num_features(model, name, arguments) if num_media else []:
        begin = getattr(model.config, "vision_start_token_id", None) or getattr(
            model.config, "image_start_token_id", 271
        )
        ids += [begin, *[token] * count, 272] if name in _APART else [token] * count
    words = torch.randint(10, 260, (num_text + 3,), generator=generator).tolist()
    labels = [-100] * (len(ids) + 3) + words[3:]
    ids += words
    row = {
        **arguments,
        "input_ids": torch.tensor([ids]),
        "attention_mask": torch.ones(1, len(ids), dtype=torch.long),
        "labels": torch.tensor([labels]),
    }
    known = inspect.signature(type(model).forward).parameters
    types = (row["input_ids"] == TOKENS["image"]).long()
    row.update(
        {
            key: types
            for key in ("mm_token_type_ids", "token_type_ids", "moe_mm_token_type_ids")
            if key in known
        }
    )
    return row


_PADDING = {
    **dict.fromkeys(
        ("input_ids", "attention_mask", "mm_token_type_ids", "token_type_ids", "moe_mm_token_type_ids"), 0
    ),
    "labels": -100,
}


def padded(rows, side="right"):
    """A batch of rows, filled up to the longest; media one after the other."""
    width = max(row["input_ids"].shape[1] for row in rows)
    batch = {}
    for key, value in _PADDING.items():
        if key in rows[0]:
            gaps = [width - row[key].shape[1] for row in rows]
            parts = [(0, gap) if side == "right" else (gap, 0) for gap in gaps]
            batch[key] = torch.cat(
                [F.pad(row[key], part, value=value) for row, part in zip(rows, parts, strict=True)]
            )
    for key in sorted({key for row in rows for key in row} - set(batch)):
        parts = [row[key] for row in rows if key in row]
        if key == "image_token_pooling":
            starts = torch.tensor(
                [0, *(row["pixel_values"].shape[:2].numel() for row in rows if key in row)]
            ).cumsum(0)
            parts = [part + start for part, start in zip(parts, starts.tolist(), strict=False)]
        if (
            key == "pixel_values"
            and parts[0].shape[0] == 1
            and parts[0].dim() == 5
            and parts[0].shape[1] != 3
        ):
            # Of Idefics2 by row: the number of pictures is filled up.
            most = max(part.shape[1] for part in parts)
            parts = [F.pad(part, (0, 0, 0, 0, 0, 0, 0, most - part.shape[1])) for part in parts]
        batch[key] = torch.cat(parts, dim=-1 if key == "pixel_values" and "target_sizes" in rows[0] else 0)
    return batch
