"""Public models as numbers."""

_QWEN_7B = {
    "hidden_size": 3584,
    "intermediate_size": 18944,
    "num_hidden_layers": 28,
    "num_attention_heads": 28,
    "num_key_value_heads": 4,
    "vocab_size": 152064,
    "tie_word_embeddings": False,
}
_MROPE_128 = {"rope_scaling": {"type": "mrope", "mrope_section": [16, 24, 24]}}
REAL = {
    # zai-org/GLM-4.1V-9B-Thinking and GLM-4.6V-Flash.
    "glm4v": {
        "vision_config": {
            "depth": 24,
            "hidden_size": 1536,
            "out_hidden_size": 4096,
            "num_heads": 12,
            "intermediate_size": 13696,
            "image_size": 336,
        },
        "text_config": {
            "model_type": "glm4v_text",
            "hidden_size": 4096,
            "intermediate_size": 13696,
            "num_hidden_layers": 40,
            "num_attention_heads": 32,
            "num_key_value_heads": 2,
            "vocab_size": 151552,
            "rope_parameters": {
                "rope_type": "default",
                "rope_theta": 10_000.0,
                "partial_rotary_factor": 0.5,
                "mrope_section": [8, 12, 12],
            },
        },
        "tie_word_embeddings": False,
    },
    # PaddlePaddle/PaddleOCR-VL: the backbone's fields stand at the top.
    # LFM2-VL-450M.
    "lfm2_vl": {
        "vision_config": {"model_type": "siglip2_vision_model", "vision_use_head": False},
        "text_config": {
            "model_type": "lfm2",
            "hidden_size": 1024,
            "intermediate_size": 6656,
            "num_hidden_layers": 16,
            "num_attention_heads": 16,
            "full_attn_idxs": [2, 5, 8, 10, 12, 14],
        },
    },
    "paddleocr_vl": {
        "hidden_size": 1024,
        "intermediate_size": 3072,
        "num_hidden_layers": 18,
        "num_attention_heads": 16,
        "num_key_value_heads": 2,
        "head_dim": 128,
        "vocab_size": 103424,
        "rope_theta": 500_000,
        "rope_scaling": {"type": "default", "rope_type": "default", "mrope_section": [16, 24, 24]},
        "vision_config": {
            "model_type": "paddleocr_vl",
            "hidden_size": 1152,
            "intermediate_size": 4304,
            "num_hidden_layers": 27,
            "num_attention_heads": 16,
            "image_size": 384,
            "temporal_patch_size": 2,
        },
    },
    # zai-org/GLM-OCR.
    "glm_ocr": {
        "vision_config": {
            "depth": 24,
            "hidden_size": 1024,
            "out_hidden_size": 1536,
            "num_heads": 16,
            "intermediate_size": 4096,
            "attention_bias": True,
        },
        "text_config": {
            "model_type": "glm_ocr_text",
            "hidden_size": 1536,
            "intermediate_size": 4608,
            "num_hidden_layers": 16,
            "num_attention_heads": 16,
            "num_key_value_heads": 8,
            "head_dim": 128,
            "vocab_size": 59392,
            "rope_parameters": {
                "rope_type": "default",
                "rope_theta": 10_000.0,
                "partial_rotary_factor": 1.0,
                "mrope_section": [16, 24, 24],
            },
        },
        "tie_word_embeddings": False,
    },
    # zai-org/GLM-4.5V.
    "glm4v_moe": {
        "vision_config": {
            "depth": 24,
            "hidden_size": 1536,
            "out_hidden_size": 4096,
            "num_heads": 12,
            "intermediate_size": 10944,
            "image_size": 336,
        },
        "text_config": {
            "model_type": "glm4v_moe_text",
            "hidden_size": 4096,
            "intermediate_size": 10944,
            "num_hidden_layers": 46,
            "num_attention_heads": 96,
            "num_key_value_heads": 8,
            "head_dim": 128,
            "attention_bias": True,
            "first_k_dense_replace": 1,
            "n_routed_experts": 128,
            "n_shared_experts": 1,
            "num_experts_per_tok": 8,
            "moe_intermediate_size": 1408,
            "vocab_size": 151552,
            "rope_parameters": {
                "rope_type": "default",
                "rope_theta": 10_000.0,
                "partial_rotary_factor": 0.5,
                "mrope_section": [8, 12, 12],
            },
        },
        "tie_word_embeddings": False,
    },
    # Qwen/Qwen2.5-Omni-7B, the thinker.
    "qwen2_5_omni": {
        "thinker_config": {
            "model_type": "qwen2_5_omni_thinker",
            "vision_config": {"hidden_size": 1280},
            "audio_config": {},
            "text_config": {
                **_QWEN_7B,
                "rope_scaling": {"type": "default", "mrope_section": [16, 24, 24]},
            },
            "vision_start_token_id": 151652,
            "tie_word_embeddings": False,
        },
    },
    # Qwen/Qwen3-Omni-30B-A3B-Instruct, the thinker.
    "qwen3_omni_moe": {
        "thinker_config": {
            "model_type": "qwen3_omni_moe_thinker",
            "vision_config": {"out_hidden_size": 2048},
            "audio_config": {"output_dim": 2048},
            "text_config": {
                "hidden_size": 2048,
                "num_hidden_layers": 48,
                "num_attention_heads": 32,
                "num_key_value_heads": 4,
                "num_experts": 128,
                "num_experts_per_tok": 8,
                "moe_intermediate_size": 768,
                "head_dim": 128,
                "vocab_size": 152064,
                "rope_parameters": {
                    "rope_type": "default",
                    "rope_theta": 1_000_000,
                    "mrope_section": [24, 20, 20],
                    "interleaved": True,
                },
            },
            "vision_start_token_id": 151652,
            "tie_word_embeddings": False,
        },
    },
    # OpenGVLab/InternVL2_5-8B in Hugging Face's form: InternViT-300M and InternLM2.5-7B, which is a Llama.
    "internvl": {
        "vision_config": {
            "hidden_size": 1024,
            "num_hidden_layers": 24,
            "num_attention_heads": 16,
            "intermediate_size": 4096,
            "image_size": [448, 448],
            "patch_size": [14, 14],
            "attention_bias": True,
            "use_qk_norm": False,
        },
        "text_config": {
            "model_type": "llama",
            "hidden_size": 4096,
            "intermediate_size": 14336,
            "num_hidden_layers": 32,
            "num_attention_heads": 32,
            "num_key_value_heads": 8,
            "vocab_size": 92553,
            "tie_word_embeddings": False,
        },
        "tie_word_embeddings": False,
    },
    # HuggingFaceTB/SmolVLM2-2.2B-Instruct: SigLIP so400m and SmolLM2 1.7B, which is a Llama.
    "smolvlm": {
        "vision_config": {
            "hidden_size": 1152,
            "num_hidden_layers": 27,
            "num_attention_heads": 16,
            "intermediate_size": 4304,
            "image_size": 384,
            "patch_size": 14,
        },
        "text_config": {
            "model_type": "llama",
            "hidden_size": 2048,
            "intermediate_size": 8192,
            "num_hidden_layers": 24,
            "num_attention_heads": 32,
            "num_key_value_heads": 32,
            "vocab_size": 49280,
        },
        "scale_factor": 3,
    },
    # google/gemma-3-4b-it.
    "gemma3": {
        "vision_config": {
            "model_type": "siglip_vision_model",
            "hidden_size": 1152,
            "num_hidden_layers": 27,
            "num_attention_heads": 16,
            "intermediate_size": 4304,
            "image_size": 896,
            "patch_size": 14,
            "vision_use_head": False,
        },
        "text_config": {
            "model_type": "gemma3_text",
            "hidden_size": 2560,
            "intermediate_size": 10240,
            "num_hidden_layers": 34,
            "rope_scaling": {"factor": 8.0, "rope_type": "linear"},
            "sliding_window": 1024,
        },
    },
    # google/gemma-4-31B-it, as transformers' script that converts its weights has it.
    "gemma4": {
        "vision_config": {
            "model_type": "gemma4_vision",
            "hidden_size": 1152,
            "num_hidden_layers": 27,
            "num_attention_heads": 16,
            "num_key_value_heads": 16,
            "head_dim": 72,
            "intermediate_size": 4304,
            "standardize": True,
        },
        "text_config": {
            "model_type": "gemma4_text",
            "hidden_size": 5376,
            "intermediate_size": 21504,
            "num_hidden_layers": 60,
            "num_attention_heads": 32,
            "num_key_value_heads": 16,
            "num_global_key_value_heads": 4,
            "attention_k_eq_v": True,
            "hidden_size_per_layer_input": 0,
            "use_bidirectional_attention": "vision",
            "sliding_window": 1024,
            "final_logit_softcapping": 30.0,
        },
    },
    # Qwen/Qwen2-VL-7B-Instruct.
    "qwen2_vl": {
        "vision_config": {
            "depth": 32,
            "embed_dim": 1280,
            "hidden_size": 3584,
            "num_heads": 16,
            "mlp_ratio": 4,
        },
        **_QWEN_7B,
        **_MROPE_128,
    },
    # Qwen/Qwen3-VL-8B-Instruct.
    "qwen3_vl": {
        "vision_config": {
            "depth": 27,
            "hidden_size": 1152,
            "out_hidden_size": 4096,
            "num_heads": 16,
            "intermediate_size": 4304,
            "num_position_embeddings": 2304,
            "deepstack_visual_indexes": [8, 16, 24],
        },
        "text_config": {
            "model_type": "qwen3_vl_text",
            "hidden_size": 4096,
            "intermediate_size": 12288,
            "num_hidden_layers": 36,
            "num_attention_heads": 32,
            "num_key_value_heads": 8,
            "head_dim": 128,
            "vocab_size": 151936,
            "rope_scaling": {
                "rope_type": "default",
                "mrope_section": [24, 20, 20],
                "mrope_interleaved": True,
            },
        },
        "tie_word_embeddings": False,
    },
    # Qwen/Qwen3-VL-30B-A3B-Instruct.
    "qwen3_vl_moe": {
        "vision_config": {
            "depth": 27,
            "hidden_size": 1152,
            "out_hidden_size": 2048,
            "num_heads": 16,
            "intermediate_size": 4304,
            "num_position_embeddings": 2304,
            "deepstack_visual_indexes": [8, 16, 24],
        },
        "text_config": {
            "model_type": "qwen3_vl_moe_text",
            "hidden_size": 2048,
            "intermediate_size": 6144,
            "num_hidden_layers": 48,
            "num_attention_heads": 32,
            "num_key_value_heads": 4,
            "num_experts": 128,
            "num_experts_per_tok": 8,
            "moe_intermediate_size": 768,
            "head_dim": 128,
            "vocab_size": 151936,
            "rope_scaling": {
                "rope_type": "default",
                "mrope_section": [24, 20, 20],
                "mrope_interleaved": True,
            },
        },
        "tie_word_embeddings": False,
    },
    # Qwen/Qwen2.5-VL-7B-Instruct.
    "qwen2_5_vl": {
        "vision_config": {
            "depth": 32,
            "hidden_size": 1280,
            "out_hidden_size": 3584,
            "num_heads": 16,
            "intermediate_size": 3420,
            "window_size": 112,
            "fullatt_block_indexes": [7, 15, 23, 31],
        },
        **_QWEN_7B,
        **_MROPE_128,
    },
    # Qwen/Qwen2-Audio-7B-Instruct.
    "qwen2_audio": {
        "audio_config": {
            "d_model": 1280,
            "encoder_layers": 32,
            "encoder_attention_heads": 20,
            "encoder_ffn_dim": 5120,
            "num_mel_bins": 128,
            "max_source_positions": 1500,
        },
        "text_config": {
            "model_type": "qwen2",
            "hidden_size": 4096,
            "intermediate_size": 11008,
            "num_hidden_layers": 32,
            "num_attention_heads": 32,
            "num_key_value_heads": 32,
            "vocab_size": 156032,
            "tie_word_embeddings": False,
        },
    },
    # nvidia/audio-flamingo-3-hf.
    "audioflamingo3": {
        "audio_config": {
            "hidden_size": 1280,
            "num_hidden_layers": 32,
            "num_attention_heads": 20,
            "intermediate_size": 5120,
            "num_mel_bins": 128,
            "max_source_positions": 1500,
        },
        "text_config": {**_QWEN_7B, "model_type": "qwen2", "vocab_size": 151672},
    },
    # mistralai/Voxtral-Mini-3B-2507; the class has the rest of the backbone.
    "voxtral": {
        "audio_config": {
            "hidden_size": 1280,
            "num_hidden_layers": 32,
            "num_attention_heads": 20,
            "intermediate_size": 5120,
            "num_mel_bins": 128,
            "max_source_positions": 1500,
        },
        "text_config": {"model_type": "llama", "num_attention_heads": 32},
    },
}
"""`config.json` of public models, by family."""
