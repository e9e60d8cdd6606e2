"""Tiny configurations of each family, whose operations and bytes are counted."""

QWEN2 = {
    "model_type": "qwen2",
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "vocab_size": 100,
}
LLAMA = {**QWEN2, "model_type": "llama", "head_dim": 12}
TILES = {
    "hidden_size": 32,
    "intermediate_size": 56,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "image_size": 28,
    "patch_size": 7,
}
PATCHES = {"depth": 4, "num_heads": 4, "patch_size": 7, "spatial_merge_size": 2, "temporal_patch_size": 2}
SOUND = {
    "model_type": "qwen2_audio_encoder",
    "d_model": 32,
    "encoder_layers": 2,
    "encoder_attention_heads": 4,
    "encoder_ffn_dim": 72,
    "num_mel_bins": 10,
    "max_source_positions": 12,
}
LONG_SOUND = {
    "model_type": "audioflamingo3_encoder",
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 72,
    "num_mel_bins": 10,
    "max_source_positions": 12,
}
VL_TEXT = {k: v for k, v in QWEN2.items() if k != "model_type"}
ROPE = {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [2, 1, 1]}}
QWEN3_VISION = {
    **PATCHES,
    "hidden_size": 32,
    "intermediate_size": 40,
    "out_hidden_size": 48,
    "num_position_embeddings": 16,
    "deepstack_visual_indexes": [0, 2],
}
QWEN3_TEXT = {
    **VL_TEXT,
    "head_dim": 12,
    "rope_scaling": {"rope_type": "default", "mrope_section": [2, 2, 2]},
}
QWEN35_VISION = {name: value for name, value in QWEN3_VISION.items() if name != "deepstack_visual_indexes"}
QWEN35_TEXT = {
    **VL_TEXT,
    "num_hidden_layers": 4,
    "head_dim": 12,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 6,
    "linear_conv_kernel_dim": 4,
    "rope_parameters": {
        "rope_type": "default",
        "rope_theta": 1e4,
        "partial_rotary_factor": 0.5,
        "mrope_section": [1, 1, 1],
    },
}
PIXTRAL = {name: value for name, value in TILES.items() if name != "image_size"}
EXPERTS = {"num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 24}
GLM_VISION = {
    **PATCHES,
    "hidden_size": 32,
    "intermediate_size": 40,
    "out_hidden_size": 48,
    "image_size": 28,
}
GLM_TEXT = {
    **VL_TEXT,
    "rope_parameters": {
        "rope_type": "default",
        "rope_theta": 1e4,
        "partial_rotary_factor": 0.5,
        "mrope_section": [1, 1, 0],
    },
}
GLM_MOE_TEXT = {
    **VL_TEXT,
    "model_type": "glm4v_moe_text",
    "first_k_dense_replace": 1,
    "n_routed_experts": 6,
    "n_shared_experts": 2,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 24,
    "n_group": 3,
    "topk_group": 2,
    "rope_parameters": GLM_TEXT["rope_parameters"],
}
# The third of its layers sees all tokens before; the others see 20.
GEMMA_TEXT = {
    **VL_TEXT,
    "model_type": "gemma3_text",
    "head_dim": 12,
    "sliding_window": 20,
    "sliding_window_pattern": 3,
}
# The last of its layers sees all tokens before, with wider heads and keys that are values too.
GEMMA4_TEXT = {
    **VL_TEXT,
    "model_type": "gemma4_text",
    "head_dim": 12,
    "global_head_dim": 20,
    "num_global_key_value_heads": 1,
    "attention_k_eq_v": True,
    "hidden_size_per_layer_input": 0,
    "layer_types": ["sliding_attention", "sliding_attention", "full_attention"],
    "sliding_window": 20,
    "use_bidirectional_attention": "vision",
    "final_logit_softcapping": 9.0,
}
GEMMA4_VISION = {
    "model_type": "gemma4_vision",
    "hidden_size": 32,
    "intermediate_size": 40,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "head_dim": 8,
    "patch_size": 7,
    "pooling_kernel_size": 2,
    "position_embedding_size": 30,
    "standardize": True,
}
GEMMA_KINDS = ["sliding_attention", "full_attention", "full_attention"]
CONFIGS = {
    "llava_onevision": {
        "model_type": "llava_onevision",
        "vision_config": {**TILES, "model_type": "siglip_vision_model", "vision_use_head": False},
        "text_config": QWEN2,
    },
    "llava_onevision head": {
        "model_type": "llava_onevision",
        "vision_config": {**TILES, "model_type": "siglip_vision_model"},
        "text_config": {**LLAMA, "attention_bias": True, "mlp_bias": True},
        "multimodal_projector_bias": False,
    },
    "llava": {
        "model_type": "llava",
        "vision_config": {**TILES, "model_type": "clip_vision_model"},
        "text_config": LLAMA,
    },
    "llava siglip": {
        "model_type": "llava",
        "vision_config": {**TILES, "model_type": "siglip_vision_model"},
        "text_config": QWEN2,
        "vision_feature_layer": -1,
        "vision_feature_select_strategy": "full",
        "multimodal_projector_bias": False,
    },
    "llava_next": {
        "model_type": "llava_next",
        "vision_config": {**TILES, "model_type": "clip_vision_model"},
        "text_config": LLAMA,
    },
    "idefics3": {"model_type": "idefics3", "vision_config": TILES, "text_config": LLAMA},
    "smolvlm": {"model_type": "smolvlm", "vision_config": TILES, "text_config": LLAMA, "scale_factor": 4},
    "internvl": {
        "model_type": "internvl",
        "vision_config": {**TILES, "attention_bias": True},
        "text_config": QWEN2,
        "tie_word_embeddings": False,
    },
    "internvl 6b": {
        "model_type": "internvl",
        "vision_config": {
            **TILES,
            "use_qk_norm": True,
            "norm_type": "rms_norm",
            "use_mask_token": True,
            "use_mean_pooling": False,
        },
        "text_config": QWEN2,
    },
    "internvl qwen3": {
        "model_type": "internvl",
        "vision_config": {**TILES, "attention_bias": True},
        "text_config": {**VL_TEXT, "model_type": "qwen3", "head_dim": 12},
        "tie_word_embeddings": False,
    },
    "internvl experts": {
        "model_type": "internvl",
        "vision_config": {**TILES, "attention_bias": True},
        "text_config": {**VL_TEXT, "model_type": "qwen3_moe", **EXPERTS, "norm_topk_prob": True},
        "tie_word_embeddings": False,
    },
    "lfm2_vl": {
        "model_type": "lfm2_vl",
        "vision_config": {
            **{name: value for name, value in TILES.items() if name != "image_size"},
            "model_type": "siglip2_vision_model",
            "num_patches": 16,
            "vision_use_head": False,
        },
        "text_config": {
            **QWEN2,
            "model_type": "lfm2",
            # 2/3 of it are 73, rounded up to 80.
            "intermediate_size": 110,
            "block_multiple_of": 16,
            "conv_L_cache": 3,
            "layer_types": ["conv", "conv", "full_attention"],
        },
        "projector_hidden_size": 40,
    },
    "minicpmv4_6": {
        "model_type": "minicpmv4_6",
        "vision_config": {**TILES, "num_hidden_layers": 3},
        "text_config": {**QWEN35_TEXT, "model_type": "qwen3_5_text"},
        "insert_layer_id": 0,
    },
    "minicpmv4_6 4x": {
        "model_type": "minicpmv4_6",
        "vision_config": TILES,
        "text_config": {**QWEN35_TEXT, "model_type": "qwen3_5_text"},
        "downsample_mode": "4x",
    },
    "lighton_ocr": {
        "model_type": "lighton_ocr",
        "vision_config": {**PIXTRAL, "model_type": "pixtral"},
        "text_config": {**VL_TEXT, "model_type": "qwen3", "head_dim": 12},
    },
    "mistral3": {
        "model_type": "mistral3",
        "vision_config": {**PIXTRAL, "model_type": "pixtral"},
        "text_config": {**QWEN2, "model_type": "mistral", "head_dim": 12, "sliding_window": None},
    },
    "mistral3 biases": {
        "model_type": "mistral3",
        "vision_config": {**PIXTRAL, "model_type": "pixtral"},
        "text_config": {**QWEN2, "model_type": "mistral", "sliding_window": None},
        "multimodal_projector_bias": True,
        "tie_word_embeddings": False,
    },
    "qwen2_vl": {
        "model_type": "qwen2_vl",
        "vision_config": {**PATCHES, "embed_dim": 32, "mlp_ratio": 3, "hidden_size": 48},
        "text_config": {**VL_TEXT, **ROPE},
    },
    "qwen2_5_vl": {
        "model_type": "qwen2_5_vl",
        "vision_config": {
            **PATCHES,
            "hidden_size": 32,
            "intermediate_size": 40,
            "out_hidden_size": 48,
            "window_size": 28,
            "fullatt_block_indexes": [1, 3],
        },
        "text_config": {**VL_TEXT, **ROPE},
    },
    "qwen3_vl": {
        "model_type": "qwen3_vl",
        "vision_config": QWEN3_VISION,
        "text_config": {
            **QWEN3_TEXT,
        },
    },
    "qwen3_vl_moe": {
        "model_type": "qwen3_vl_moe",
        "vision_config": QWEN3_VISION,
        "text_config": {
            **QWEN3_TEXT,
            **EXPERTS,
        },
    },
    "qwen3_5": {
        "model_type": "qwen3_5",
        "vision_config": QWEN35_VISION,
        "text_config": {**QWEN35_TEXT, "model_type": "qwen3_5_text"},
    },
    "qwen3_5_moe": {
        "model_type": "qwen3_5_moe",
        "vision_config": {**QWEN35_VISION, "model_type": "qwen3_5_moe_vision"},
        "text_config": {
            **QWEN35_TEXT,
            **EXPERTS,
            "model_type": "qwen3_5_moe_text",
            "shared_expert_intermediate_size": 20,
        },
    },
    "gemma3": {
        "model_type": "gemma3",
        "vision_config": {**TILES, "model_type": "siglip_vision_model", "vision_use_head": False},
        "text_config": GEMMA_TEXT,
        "mm_tokens_per_image": 4,
    },
    "gemma3 biases": {
        "model_type": "gemma3",
        "vision_config": {**TILES, "model_type": "siglip_vision_model"},
        "text_config": {**GEMMA_TEXT, "attention_bias": True, "layer_types": GEMMA_KINDS},
        "mm_tokens_per_image": 16,
        "tie_word_embeddings": False,
    },
    "gemma4": {"model_type": "gemma4", "vision_config": GEMMA4_VISION, "text_config": GEMMA4_TEXT},
    "gemma4 biases": {
        "model_type": "gemma4",
        "vision_config": GEMMA4_VISION,
        "text_config": {
            **GEMMA4_TEXT,
            "attention_bias": True,
            "attention_k_eq_v": False,
            "final_logit_softcapping": None,
            "per_layer_config": {"2": {"head_dim": 10, "num_key_value_heads": 6}},
        },
        "tie_word_embeddings": False,
    },
    "gemma4 experts": {
        "model_type": "gemma4",
        "vision_config": GEMMA4_VISION,
        "text_config": {
            **GEMMA4_TEXT,
            "enable_moe_block": True,
            "num_experts": 6,
            "top_k_experts": 2,
            "moe_intermediate_size": 24,
        },
    },
    "glm4v": {"model_type": "glm4v", "vision_config": GLM_VISION, "text_config": GLM_TEXT},
    "glm4v_moe": {
        "model_type": "glm4v_moe",
        "vision_config": GLM_VISION,
        "text_config": GLM_MOE_TEXT,
        # transformers' own model asks the whole configuration for it.
        "initializer_range": 0.02,
    },
    "glm4v_moe biases": {
        "model_type": "glm4v_moe",
        "vision_config": {**GLM_VISION, "attention_bias": True},
        "text_config": {
            **GLM_MOE_TEXT,
            "attention_bias": False,
            "first_k_dense_replace": 2,
            "head_dim": 12,
            "rope_parameters": {**GLM_TEXT["rope_parameters"], "mrope_section": [1, 1, 1]},
        },
        "initializer_range": 0.02,
    },
    "paddleocr_vl": {
        "model_type": "paddleocr_vl",
        "vision_config": TILES,
        "text_config": {
            **VL_TEXT,
            "head_dim": 12,
            "rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [2, 2, 2]},
        },
    },
    "glm_ocr": {
        "model_type": "glm_ocr",
        "vision_config": GLM_VISION,
        "text_config": {
            **GLM_TEXT,
            "head_dim": 12,
            "rope_parameters": {**GLM_TEXT["rope_parameters"], "mrope_section": [1, 1, 1]},
        },
    },
    "glm_ocr no biases": {
        "model_type": "glm_ocr",
        "vision_config": {**GLM_VISION, "attention_bias": False},
        "text_config": GLM_TEXT,
    },
    "glm46v": {
        "model_type": "glm46v",
        "vision_config": {**GLM_VISION, "attention_bias": True},
        "text_config": GLM_TEXT,
    },
    "qwen2_audio": {"model_type": "qwen2_audio", "audio_config": SOUND, "text_config": QWEN2},
    "audioflamingo3": {"model_type": "audioflamingo3", "audio_config": LONG_SOUND, "text_config": QWEN2},
    "voxtral": {
        "model_type": "voxtral",
        "audio_config": {**LONG_SOUND, "model_type": "voxtral_encoder", "intermediate_size": 128},
        "text_config": LLAMA,
    },
    # transformers takes the names of the other family too.
    "qwen2_audio names": {
        "model_type": "qwen2_audio",
        "audio_config": {**LONG_SOUND, "model_type": "qwen2_audio_encoder"},
        "text_config": QWEN2,
    },
    "audioflamingo3 names": {
        "model_type": "audioflamingo3",
        "audio_config": {**SOUND, "model_type": "audioflamingo3_encoder"},
        "text_config": QWEN2,
        "projector_bias": False,
    },
    "voxtral names": {
        "model_type": "voxtral",
        "audio_config": {**SOUND, "model_type": "voxtral_encoder", "encoder_ffn_dim": 96},
        "text_config": {**LLAMA, "model_type": "mistral", "sliding_window": None},
    },
}
