"""Tiny models of families that dflop has no rules for: what transformers itself gives as a configuration, made small.

Rows for them are in `other_rows.py`.
"""

from __future__ import annotations

import json

import torch
import transformers
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import MODEL_FOR_MULTIMODAL_LM_MAPPING_NAMES

VOCABULARY = 300
TOKENS = {"image": 298, "video": 299, "audio": 297}
_SIZES = {
    "hidden_size": 48,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": VOCABULARY,
    "head_dim": 12,
    "max_position_embeddings": 4096,
    "moe_intermediate_size": 32,
    **dict.fromkeys(("n_routed_experts", "num_experts", "num_local_experts"), 4),
    "num_experts_per_tok": 2,
    **dict.fromkeys(("n_group", "topk_group"), 1),
    **dict.fromkeys(("q_lora_rank", "kv_lora_rank"), 16),
    **dict.fromkeys(("qk_nope_head_dim", "qk_rope_head_dim"), 8),
    "v_head_dim": 12,
    "depth": 3,
    "num_heads": 4,
    **dict.fromkeys(("embed_dim", "d_model"), 32),
    "out_hidden_size": 48,
    "num_mel_bins": 8,
    "encoder_layers": 3,
    "encoder_attention_heads": 4,
    "encoder_ffn_dim": 64,
}
_OF_ENCODER = {
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_key_value_heads": 4,
    "head_dim": 8,
    "image_size": 56,
    "patch_size": 14,
}
_SPECIAL = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
_ROPE = {"rope_type": "default", "rope_theta": 1e4}
_MROPE = {**_ROPE, "mrope_section": [2, 2, 2]}
_GRID = {"num_position_embeddings": 36}
_PINPOINTS = [[56, 112], [112, 56], [112, 112]]
_SPEECH = {
    "encoder_config": {
        "hidden_dim": 32,
        "num_layers": 3,
        "num_heads": 4,
        "dim_head": 8,
        "feedforward_mult": 2,
        "input_dim": 16,
        "output_dim": 42,
        "context_size": 20,
    },
    "projector_config": {"hidden_size": 32, "encoder_hidden_size": 32, "num_attention_heads": 4},
    "has_lora_adapter": False,
}
_POSITIONS = {"pos_emb_height": 6, "pos_emb_width": 6}
CHANGES = {
    "aria": {
        "projector_patch_to_query_dict": {"16": 4},
        "max_value_projector_patch_to_query_dict": 4,
        "text_config": {"moe_num_experts": 4, "moe_topk": 2, "moe_num_shared_experts": 1},
    },
    "cohere_compass": {
        "text_config": {"rope_parameters": {"full_attention": _ROPE, "sliding_attention": _ROPE}},
        "vision_config": {"deepstack_visual_indexes": [0, 1], **_GRID},
    },
    "cosmos3_edge": {
        "text_config": {"rope_parameters": _MROPE},
        "projector_hidden_size": 64,
        "vision_config": {"num_patches": 36},
    },
    "cosmos3_omni": {"vision_config": {"deepstack_visual_indexes": [0, 1], **_GRID}},
    "ernie4_5_vl_moe": {
        "text_config": {
            "moe_intermediate_size": [32, 16],
            "moe_num_experts": 4,
            "moe_k": 2,
            "pad_token_id": 0,
            "mlp_layer_types": ["dense", "sparse", "sparse"],
            "rope_parameters": _MROPE,
        }
    },
    "fun_asr_nano": {
        "adaptor_config": {
            "hidden_size": 48,
            "projector_hidden_size": 64,
            "num_attention_heads": 4,
            "intermediate_size": 12,
        },
        "audio_config": {"num_timestamp_prediction_layers": 1},
    },
    "gemma4_unified": {
        "vision_config": {
            "model_type": "gemma4_unified_vision",
            "patch_size": 4,
            "mm_embed_dim": 48,
            "mm_posemb_size": 8,
            "output_proj_dims": 48,
        },
        "text_config": {"sliding_window": 6},
    },
    "glm5_next": {
        "text_config": {
            "num_key_value_heads": 4,
            "qk_rope_head_dim": 0,
            "head_dim": 0,
            "qk_head_dim": 8,
            "index_n_heads": 2,
            "index_head_dim": 8,
            "index_topk": 512,
            "linear_head_dim": 8,
            "linear_num_heads": 4,
        },
        "vision_config": {"projection_intermediate_size": 64},
    },
    "glmga": {"text_config": {"rope_parameters": _MROPE}},
    "got_ocr2": {"vision_config": {"mlp_dim": 64, "output_channels": 16, "window_size": 4}},
    "granite_speech": _SPEECH,
    "granite_speech_plus": _SPEECH,
    "hunyuan_vl": {
        "text_config": {"head_dim": 12, "rope_parameters": {**_ROPE, "mrope_section": [1, 1, 2, 2]}},
        "vision_config": {
            "text_hidden_size": 48,
            "max_image_size": 112,
            "min_image_size": 28,
            "img_max_token_num": 64,
            "max_vit_seq_len": 128,
        },
    },
    "idefics2": {
        "perceiver_config": {
            "resampler_n_latents": 8,
            "resampler_depth": 2,
            "resampler_n_heads": 4,
            "resampler_head_dim": 8,
            "num_key_value_heads": 2,
        }
    },
    "janus": {
        "vision_config": {"projection_dim": 48},
        "vq_config": {
            "embed_dim": 16,
            "num_embeddings": 64,
            "latent_channels": 32,
            "base_channels": 32,
            "channel_multiplier": [1, 1],
            "projection_dim": 48,
            "image_token_embed_dim": 48,
        },
    },
    "kimi_k25": {
        "text_config": {"first_k_dense_replace": 1, "num_key_value_heads": 4, "head_dim": 8},
        "projection_hidden_size": 32,
        "vision_config": _POSITIONS,
    },
    "llava_next_video": {
        "vision_config": {"projection_dim": 8},
        "image_grid_pinpoints": _PINPOINTS,
    },
    "minicpm_ocr": {"image_token_id": TOKENS["image"]},
    "minimax_m3_vl": {
        "projector_hidden_size": 64,
        "merged_hidden_size": 192,
        "text_config": {
            "dense_intermediate_size": 64,
            "shared_intermediate_size": 32,
            "rotary_dim": 8,
            "index_n_heads": 2,
            "index_head_dim": 12,
            "index_block_size": 16,
            "mlp_layer_types": ["dense", "sparse", "sparse"],
        },
    },
    "mistral_large4": {"text_config": {"num_key_value_heads": 4}},
    "molmo2": {
        "vision_config": {"image_size": [56, 56], "num_position_embeddings": 16},
        "adapter_config": {
            **{name: _OF_ENCODER[name] for name in ("hidden_size", "intermediate_size", "head_dim")},
            "vision_feature_layer": [2, 1],
            "text_hidden_size": 48,
            "num_attention_heads": 4,
            "num_key_value_heads": 4,
        },
        "text_config": {"rope_scaling_layers": [0, 1, 2]},
    },
    "moss_transcribe_diarize": {"audio_config": {"max_source_positions": 20}},
    "muse_glimmer": {
        "projector_hidden_size": 64,
        "out_hidden_size": 128,
        "vision_config": {**_POSITIONS, "max_position_embeddings": 36},
    },
    "nemotron_h_omni": {
        "projector_hidden_size": 64,
        "vision_hidden_size": 32,
        **{f"{kind}_token_id": token for kind, token in TOKENS.items()},
        "vision_config": {"max_img_size": 112, "patch_dim": 588, "video_patch_dim": 1176},
        "text_config": {
            "mamba_num_heads": 4,
            "mamba_head_dim": 24,
            "ssm_state_size": 8,
            "n_groups": 2,
            "moe_shared_expert_intermediate_size": 32,
            "chunk_size": 32,
        },
    },
    "ovis2": {
        "visual_indicator_token_ids": [271, 272, 273, 274, 275],
        "vision_config": {"vocab_size": 40, "num_visual_indicator_tokens": 5},
    },
    "phi4_multimodal": {
        "vision_config": {"crop_size": 56},
        "audio_config": {
            "num_blocks": 2,
            "ext_pw_out_channel": 32,
            "depthwise_separable_out_channel": 32,
            "nemo_conv_channels": 32,
        },
    },
    "qianfan_ocr": {"vision_config": {"patch_size": [14, 14], "image_size": [56, 56]}},
    "qwen3_asr": {"audio_config": {"downsample_hidden_size": 16, "output_dim": 48}},
    "qwen4_exp": {
        "text_config": {
            "indexer_n_heads": 2,
            "indexer_kv_heads": 1,
            "indexer_head_dim": 12,
            "indexer_budget": 512,
            "indexer_compress_ratio": 4,
            "ple_embed_dim": 16,
            "linear_key_head_dim": 8,
            "linear_value_head_dim": 6,
            "linear_num_key_heads": 4,
            "linear_num_value_heads": 8,
            "hc_lowrank": 8,
            "shared_expert_intermediate_size": 32,
            "ngram_vocab_size_base": 100,
            "rope_parameters": {**_ROPE, "partial_rotary_factor": 0.5, "mrope_section": [1, 1, 1]},
        },
        "vision_config": _GRID,
    },
    "step3p7": {"text_config": {"sliding_window": 6}},
    "vipllava": {"vision_feature_layer": [-2, 1]},
}
"""What the rules of `_small` do not know, by family."""


def build(name):
    """A model in training mode, with parameters of seed 0 that are larger than usual, and without dropout."""
    torch.manual_seed(0)
    content = _changed(_small(CONFIG_MAPPING[name]().to_dict()), CHANGES.get(name, {}))
    config = CONFIG_MAPPING[name].from_dict(content)
    model = getattr(transformers, MODEL_FOR_MULTIMODAL_LM_MAPPING_NAMES[name])(config)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                torch.nn.init.normal_(parameter, std=0.1)
    model.config.use_cache = False
    model.config.get_text_config().use_cache = False
    return model.train()


def _small(content, is_text=True):
    """A configuration with small sizes, no dropout, and ids of tokens below the vocabulary."""
    found, layers = {}, _layers(content)
    for name, value in content.items():
        name = str(name)
        is_number = isinstance(value, int | float) and not isinstance(value, bool)
        if name in layers:
            found[name] = layers[name]
        elif isinstance(value, dict) and ("model_type" in value or name.endswith("_config")):
            found[name] = _small(value, "text" in name)
        elif not is_text and name in _OF_ENCODER and is_number:
            found[name] = _OF_ENCODER[name]
        elif name in _SIZES and is_number:
            found[name] = _SIZES[name]
        elif name in _SPECIAL:
            found[name] = _SPECIAL[name]
        elif isinstance(value, float) and "drop" in name:
            found[name] = 0.0
        elif is_number and (kind := _kind_of(name)):
            found[name] = TOKENS[kind]
        elif is_number and ("token_id" in name or name in ("im_start_id", "im_end_id", "im_newline_id")):
            found[name] = 270 + len(found) % 20
        else:
            found[name] = value
    return found


def _kind_of(name):
    """The kind of medium whose token a field names."""
    return {
        "image_patch_id": "image",
        **{f"{kind}_token_{end}": kind for kind in TOKENS for end in ("id", "index")},
    }.get(name)


def _layers(content):
    """Fields with an entry a layer, for the first layer of each kind, three or four in all."""
    count = content.get("num_hidden_layers")
    lists = {
        name: value for name, value in content.items() if isinstance(value, list) and len(value) == count
    }
    if not lists or count < 4:
        return {}
    first = {}
    for layer in range(count):
        first.setdefault(
            json.dumps([lists[name][layer] for name in sorted(lists) if name != "kv_source_layers"]), layer
        )
    kept = sorted(first.values())[:4]
    kept += [kept[-1]] * (3 - len(kept))
    found = {name: [value[layer] for layer in kept] for name, value in lists.items()}
    if "kv_source_layers" in found:
        found["kv_source_layers"] = list(range(len(kept)))
    return {
        **found,
        "num_hidden_layers": len(kept),
        **({"per_layer_config": {}} if "per_layer_config" in content else {}),
    }


def _changed(content, changes):
    for name, value in changes.items():
        old = content.get(name)
        content[name] = _changed(old, value) if isinstance(value, dict) and isinstance(old, dict) else value
    return content
