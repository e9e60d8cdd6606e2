"""The files of a tiny model of each family that trains, and samples of every kind it reads."""

from __future__ import annotations

import copy

from tiny_families import TEXT, TINY
from tiny_llava import PINPOINTS, TILE

IMAGE, VIDEO, SOUND, VOCABULARY = 290, 291, 292, 293
"""Ids of the tokens that features take the place of; text has smaller ones."""
VISION_START, VISION_END, AUDIO_START, AUDIO_END = 294, 295, 296, 297
"""Of what stands around a medium in Qwen2.5-Omni and Qwen3-Omni, whose positions depend on it."""
_LLAMA_3 = {
    "model_type": "llama",
    "rope_parameters": {
        "rope_type": "llama3", "rope_theta": 500_000.0, "factor": 8.0, "low_freq_factor": 1.0,
        "high_freq_factor": 4.0, "original_max_position_embeddings": 64,
    },
}  # fmt: skip
_MEAN = {"image_mean": [0.5, 0.4, 0.3], "image_std": [0.5, 0.5, 0.6]}
_SIGLIP = {
    "model_type": "siglip_vision_model", "image_size": TILE, "patch_size": 14, "hidden_size": 32,
    "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "vision_use_head": False,
}  # fmt: skip
_ONEVISION = {
    "vision_config": _SIGLIP,
    "image_grid_pinpoints": PINPOINTS,
    "image_token_index": IMAGE,
    "video_token_index": VIDEO,
    "tie_word_embeddings": False,
}
_QWEN_IDS = {"image_token_id": IMAGE, "video_token_id": VIDEO}
# Pictures of 4 to 16 features; those of a longer video are smaller.
_QWEN_IMAGES = {"size": {"shortest_edge": 4 * 28 * 28, "longest_edge": 16 * 28 * 28}, **_MEAN}
_QWEN_VIDEOS = {**_QWEN_IMAGES, "cap_pixels_per_frame": True, "max_video_tokens": 40}
# An image counts as two frames.
_GLM_IMAGES = {"size": {"shortest_edge": 8 * 28 * 28, "longest_edge": 32 * 28 * 28}, **_MEAN}
_GLM_VIDEOS = {
    "size": {"shortest_edge": 4 * 28 * 28, "longest_edge": 40 * 28 * 28},
    **_MEAN,
    "do_sample_frames": False,
}
_SHUFFLED = {"size": {"longest_edge": 168}, "max_image_size": {"longest_edge": 56}}
_LFM2_IMAGES = {
    "encoder_patch_size": 14, "min_image_tokens": 4, "max_image_tokens": 9, "max_tiles": 4, "tile_size": 56, **_MEAN,
}  # fmt: skip
# Pictures of about 2 x 2 features of 56 pixels a side, larger ones with 2 to 4 slices of as many.
_SLICED = {"scale_resolution": 112, "max_slice_nums": 4, **_MEAN}
_TILE_56 = {"size": {"height": 56, "width": 56}, **_MEAN}
IMAGES = {
    "text": [],
    "image": [("image", 90, 130)],
    "tall image": [("image", 150, 31)],
    "several images": [("image", 60, 60), ("image", 100, 200), ("image", 40, 33)],
}
PICTURES = {
    **IMAGES,
    "video": [("video", 90, 120, 7)],
    "video and image": [("video", 60, 70, 2), ("image", 64, 80)],
}
SOUNDS = {
    "text": [],
    "sound": [("audio", 0.43)],
    "several sounds": [("audio", 0.2), ("audio", 1.0), ("audio", 0.0301)],
}
# Of several windows; of the last sound the last window fills no token.
LONG_SOUNDS = {**SOUNDS, "long sound": [("audio", 3.43)], "long sounds": [("audio", 2.0), ("audio", 2.005)]}
# Its processor makes every frame of a video large.
OMNI = {
    **IMAGES,
    "video": [("video", 90, 120, 3)],
    "sound": [("audio", 0.43)],
    "sounds and pictures": [
        ("audio", 0.2), ("image", 90, 130), ("audio", 0.645), ("video", 60, 70, 2), ("image", 64, 80), ("audio", 0.0301),
    ],
}  # fmt: skip

# Of a sound below a second no chunk is whole: alone in its sample, as transformers' model computes it by what stands beside it.
CHUNKED = {
    **OMNI,
    "sound": [("audio", 0.43)],
    "sounds and pictures": [
        ("audio", 1.0), ("image", 90, 130), ("audio", 4.317), ("video", 60, 70, 2), ("image", 64, 80), ("audio", 1.08),
    ],
}  # fmt: skip


def _tiny(name, **ids):
    config = copy.deepcopy(TINY[name])
    config.update(ids)
    return config


SETTINGS = {
    "llava_onevision": ({**_ONEVISION, "text_config": {**TEXT, "model_type": "qwen2"}},
                        {"size": {"height": TILE, "width": TILE}, "image_grid_pinpoints": PINPOINTS, **_MEAN}, None, PICTURES),
    "llava_onevision-llama3": ({**_ONEVISION, "text_config": {**TEXT, **_LLAMA_3}},
                               {"size": {"height": TILE, "width": TILE}, "image_grid_pinpoints": PINPOINTS, **_MEAN}, None, PICTURES),
    "llava": (_tiny("llava", image_token_index=IMAGE),
              {"image_processor_type": "CLIPImageProcessor", "size": {"shortest_edge": 56},
               "crop_size": {"height": 56, "width": 56}, **_MEAN}, None, IMAGES),
    "llava-siglip": (_tiny("llava-siglip", image_token_index=IMAGE),
                     {"image_processor_type": "SiglipImageProcessor", "size": {"height": 56, "width": 56}, **_MEAN}, None, IMAGES),
    "llava_next": (_tiny("llava_next", image_token_index=IMAGE),
                   {"size": {"shortest_edge": 56}, "crop_size": {"height": 56, "width": 56},
                    "image_grid_pinpoints": TINY["llava_next"]["image_grid_pinpoints"], **_MEAN}, None, IMAGES),
    "idefics3": (_tiny("idefics3", image_token_id=IMAGE), {**_SHUFFLED, **_MEAN}, None, IMAGES),
    "smolvlm": (_tiny("smolvlm", image_token_id=IMAGE), {**_SHUFFLED, **_MEAN}, None, PICTURES),
    "internvl": (_tiny("internvl", image_token_id=IMAGE), {**_TILE_56, "max_patches": 4}, _TILE_56, PICTURES),
    "internvl-llama": (_tiny("internvl-llama", image_token_id=IMAGE), {**_TILE_56, "max_patches": 4}, _TILE_56, PICTURES),
    "internvl-qwen3": (_tiny("internvl-qwen3", image_token_id=IMAGE), {**_TILE_56, "max_patches": 4}, _TILE_56, PICTURES),
    "internvl-qwen3_moe": (_tiny("internvl-qwen3_moe", image_token_id=IMAGE), {**_TILE_56, "max_patches": 4}, _TILE_56, PICTURES),
    # Pictures of 4 to 9 features, larger ones in 2 to 4 tiles of 4 features.
    "lfm2_vl": (_tiny("lfm2_vl", image_token_id=IMAGE), _LFM2_IMAGES, None, {**IMAGES, "large image": [("image", 230, 150)]}),
    "lighton_ocr": (_tiny("lighton_ocr", image_token_id=IMAGE), {"size": {"longest_edge": 140}, "patch_size": 14, **_MEAN}, None, IMAGES),
    "minicpmv4_6": (_tiny("minicpmv4_6", image_token_id=IMAGE, video_token_id=VIDEO), _SLICED, None, IMAGES),
    "minicpmv4_6-4x": (_tiny("minicpmv4_6-4x", image_token_id=IMAGE, video_token_id=VIDEO),
                       {"downsample_mode": "4x", **_SLICED, "scale_resolution": 64}, None, IMAGES),
    "mistral3": (_tiny("mistral3", image_token_index=IMAGE), {"size": {"longest_edge": 140}, **_MEAN}, None, IMAGES),
    "mistral3-ministral3": (_tiny("mistral3-ministral3", image_token_index=IMAGE), {"size": {"longest_edge": 140}, **_MEAN}, None, IMAGES),
    "qwen2_vl": (_tiny("qwen2_vl", **_QWEN_IDS), _QWEN_IMAGES, _QWEN_VIDEOS, PICTURES),
    "qwen2_5_vl": (_tiny("qwen2_5_vl", **_QWEN_IDS), _QWEN_IMAGES, _QWEN_VIDEOS, PICTURES),
    "qwen2_5_omni": (
        {"thinker_config": {
            **_tiny("qwen2_5_omni")["thinker_config"],
            "image_token_index": IMAGE, "video_token_index": VIDEO, "audio_token_index": SOUND,
            "vision_start_token_id": VISION_START, "audio_start_token_id": AUDIO_START,
        }},
        {**_QWEN_IMAGES, "feature_size": 8, "chunk_length": 4}, None, OMNI,
    ),
    "qwen3_omni_moe": (
        {"thinker_config": {
            **_tiny("qwen3_omni_moe")["thinker_config"],
            "image_token_id": IMAGE, "video_token_id": VIDEO, "audio_token_id": SOUND,
            "vision_start_token_id": VISION_START, "audio_start_token_id": AUDIO_START,
        }},
        {"patch_size": 14, **_QWEN_IMAGES, "feature_size": 8}, None, CHUNKED,
    ),
    "qwen3_vl": (
        _tiny("qwen3_vl", vision_start_token_id=1, **_QWEN_IDS), {"patch_size": 14, **_QWEN_IMAGES},
        {"patch_size": 14, "size": {"shortest_edge": 4 * 28 * 28, "longest_edge": 40 * 28 * 28}, **_MEAN,
         "do_sample_frames": False}, PICTURES,
    ),
    "qwen3_vl_moe": (
        _tiny("qwen3_vl_moe", vision_start_token_id=1, **_QWEN_IDS), {"patch_size": 14, **_QWEN_IMAGES},
        {"patch_size": 14, "size": {"shortest_edge": 4 * 28 * 28, "longest_edge": 40 * 28 * 28}, **_MEAN,
         "do_sample_frames": False}, PICTURES,
    ),
    # Long pictures are cut.
    "gemma3": (
        _tiny("gemma3", image_token_index=IMAGE),
        {"image_processor": {**_TILE_56, "do_pan_and_scan": True, "pan_and_scan_min_crop_size": 20,
                             "pan_and_scan_max_num_crops": 3, "pan_and_scan_min_ratio_to_activate": 1.5},
         "image_seq_length": 16}, None, IMAGES,
    ),
    # A picture fills a budget of 70 features; its tokens reach beyond the window.
    "gemma4": (
        _tiny("gemma4", **_QWEN_IDS), {"patch_size": 4, "pooling_kernel_size": 2, "max_soft_tokens": 70},
        {"patch_size": 4, "pooling_kernel_size": 2, "max_soft_tokens": 70, "do_sample_frames": False}, PICTURES,
    ),
    "gemma4-experts": (
        _tiny("gemma4-experts", **_QWEN_IDS), {"patch_size": 4, "pooling_kernel_size": 2, "max_soft_tokens": 70},
        {"patch_size": 4, "pooling_kernel_size": 2, "max_soft_tokens": 70, "do_sample_frames": False}, PICTURES,
    ),
    "glm4v": (_tiny("glm4v", **_QWEN_IDS), _GLM_IMAGES, _GLM_VIDEOS, PICTURES),
    "glm4v_moe": (_tiny("glm4v_moe", **_QWEN_IDS), _GLM_IMAGES, _GLM_VIDEOS, PICTURES),
    "paddleocr_vl": (_tiny("paddleocr_vl", **_QWEN_IDS), _GLM_IMAGES, None, IMAGES),
    "glm_ocr": (_tiny("glm_ocr", **_QWEN_IDS), _GLM_IMAGES, _GLM_VIDEOS, PICTURES),
    "glm46v": (_tiny("glm46v", **_QWEN_IDS), _GLM_IMAGES, _GLM_VIDEOS, PICTURES),
    "qwen3_5": (
        _tiny("qwen3_5", vision_start_token_id=1, **_QWEN_IDS), {"patch_size": 14, **_QWEN_IMAGES},
        {"patch_size": 14, "size": {"shortest_edge": 4 * 28 * 28, "longest_edge": 40 * 28 * 28}, **_MEAN,
         "do_sample_frames": False}, PICTURES,
    ),
    "qwen3_5_moe": (
        _tiny("qwen3_5_moe", vision_start_token_id=1, **_QWEN_IDS), {"patch_size": 14, **_QWEN_IMAGES},
        {"patch_size": 14, "size": {"shortest_edge": 4 * 28 * 28, "longest_edge": 40 * 28 * 28}, **_MEAN,
         "do_sample_frames": False}, PICTURES,
    ),
    "qwen2_audio": (
        {**_tiny("qwen2_audio", audio_token_index=SOUND),
         "audio_config": {**TINY["qwen2_audio"]["audio_config"], "max_source_positions": 50}},
        {"feature_size": 8, "chunk_length": 1}, None, SOUNDS),
    "audioflamingo3": (
        {**_tiny("audioflamingo3", audio_token_id=SOUND),
         "audio_config": {**TINY["audioflamingo3"]["audio_config"], "max_source_positions": 50}},
        {"feature_extractor": {"feature_size": 8, "chunk_length": 1}, "max_audio_len": 4}, None, LONG_SOUNDS),
    "voxtral": (
        {**_tiny("voxtral", audio_token_id=SOUND),
         "audio_config": {**TINY["voxtral"]["audio_config"], "max_source_positions": 100}},
        {"feature_size": 8, "chunk_length": 2}, None, LONG_SOUNDS),
}  # fmt: skip
"""(config.json, preprocessor_config.json, video_preprocessor_config.json, samples by name) by family."""
