"""Models of each family, small enough to run."""

from __future__ import annotations

import json

from tiny_backbone import LINEAR, TEXT
from tiny_lfm2 import LFM2_VL
from tiny_minicpm import MINICPM, MINICPM_4X

_MROPE = {"rope_scaling": {"type": "mrope", "mrope_section": [2, 2, 2]}}
_PATCHES = {"patch_size": 14, "spatial_merge_size": 2, "temporal_patch_size": 2, "num_heads": 4, "depth": 4}
_VISION = {
    "hidden_size": 32,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "intermediate_size": 64,
    "patch_size": 14,
}
_EXPERTS = {"num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "head_dim": 12}
_PIXTRAL = {**_VISION, "model_type": "pixtral", "hidden_size": 32}
_INTERNVIT = {**_VISION, "image_size": [56, 56], "patch_size": [14, 14], "attention_bias": True}
_QWEN3_VISION = {
    "patch_size": 14,
    "spatial_merge_size": 2,
    "temporal_patch_size": 2,
    "num_heads": 4,
    "depth": 4,
    "hidden_size": 32,
    "out_hidden_size": 48,
    "intermediate_size": 64,
    # A grid of 6 x 6 learnt positions.
    "num_position_embeddings": 36,
    "deepstack_visual_indexes": [1, 2],
}
_QWEN35_VISION = {name: value for name, value in _QWEN3_VISION.items() if name != "deepstack_visual_indexes"}
# Longer samples than a chunk of the recurrence (64 tokens) are among those of the tests, and shorter ones.
_GLM = {
    "vision_config": {
        **_PATCHES,
        "hidden_size": 32,
        "out_hidden_size": 48,
        "intermediate_size": 40,
        # A grid of 6 x 6 learnt positions.
        "image_size": 84,
    },
    "text_config": {
        **TEXT,
        "model_type": "glm4v_text",
        "rope_parameters": {
            "rope_type": "default",
            "rope_theta": 10_000.0,
            "partial_rotary_factor": 0.5,
            "mrope_section": [1, 1, 1],
        },
    },
    "tie_word_embeddings": False,
}
_GLM_MOE = {
    "vision_config": _GLM["vision_config"],
    "text_config": {
        **_GLM["text_config"],
        "model_type": "glm4v_moe_text",
        "first_k_dense_replace": 1,
        "n_routed_experts": 6,
        "n_shared_experts": 1,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 32,
        # Three groups, of which a token reads two.
        "n_group": 3,
        "topk_group": 2,
        "routed_scaling_factor": 1.5,
    },
    # transformers' own model asks the whole configuration for it.
    "initializer_range": 0.02,
    "tie_word_embeddings": False,
}
# A picture has more features than the window has tokens, so both ways of it reach beyond the window.
_GEMMA = {
    "vision_config": {
        **_VISION,
        "model_type": "siglip_vision_model",
        "image_size": 56,
        "patch_size": 7,
        "vision_use_head": False,
    },
    "text_config": {
        **TEXT,
        "model_type": "gemma3_text",
        "head_dim": 12,
        "query_pre_attn_scalar": 20,
        "sliding_window": 5,
        "sliding_window_pattern": 3,
        "rope_scaling": {"rope_type": "linear", "factor": 8.0},
        "rope_local_base_freq": 100.0,
    },
    "mm_tokens_per_image": 16,
    "tie_word_embeddings": False,
}
_GEMMA4 = {
    "vision_config": {
        **_VISION,
        "model_type": "gemma4_vision",
        "num_hidden_layers": 2,
        "patch_size": 4,
        "pooling_kernel_size": 2,
        "num_key_value_heads": 4,
        "head_dim": 8,
        "position_embedding_size": 160,
        "standardize": True,
    },
    "text_config": {
        **TEXT,
        "model_type": "gemma4_text",
        "head_dim": 12,
        # The layer that sees all tokens has other heads, and its keys are values too.
        "global_head_dim": 16,
        "num_global_key_value_heads": 1,
        "attention_k_eq_v": True,
        "hidden_size_per_layer_input": 0,
        "layer_types": ["sliding_attention", "sliding_attention", "full_attention"],
        "sliding_window": 5,
        "use_bidirectional_attention": "vision",
        "final_logit_softcapping": 3.0,
    },
    "tie_word_embeddings": False,
}
TINY = {
    "gemma3": _GEMMA,
    "gemma4": _GEMMA4,
    # Experts beside the MLP.
    "gemma4-experts": {
        **_GEMMA4,
        "text_config": {
            **_GEMMA4["text_config"],
            "enable_moe_block": True,
            "num_experts": 6,
            "top_k_experts": 2,
            "moe_intermediate_size": 32,
        },
    },
    "glm4v": _GLM,
    "glm4v_moe": _GLM_MOE,
    "glm_ocr": {
        **_GLM,
        "vision_config": {**_GLM["vision_config"], "attention_bias": True},
        "text_config": {**_GLM["text_config"], "model_type": "glm_ocr_text", "head_dim": 12},
    },
    "glm46v": {**_GLM, "vision_config": {**_GLM["vision_config"], "attention_bias": True, "depth": 2}},
    "internvl": {
        "vision_config": _INTERNVIT,
        "text_config": {**TEXT, "model_type": "qwen2"},
        "tie_word_embeddings": False,
    },
    "internvl-llama": {
        # As the larger InternVits: a norm over queries and keys, and one after the layers.
        "vision_config": {**_INTERNVIT, "use_qk_norm": True, "use_mean_pooling": False},
        "text_config": {**TEXT, "model_type": "llama"},
        "tie_word_embeddings": False,
    },
    "idefics3": {
        "vision_config": {**_VISION, "image_size": 56},
        "text_config": {**TEXT, "model_type": "llama"},
        "tie_word_embeddings": False,
    },
    "smolvlm": {
        "vision_config": {**_VISION, "image_size": 56},
        "text_config": {**TEXT, "model_type": "llama"},
        "scale_factor": 4,
        "tie_word_embeddings": False,
    },
    # As InternVL3.5.
    "internvl-qwen3": {
        "vision_config": _INTERNVIT,
        "text_config": {**TEXT, "model_type": "qwen3", "head_dim": 12},
        "tie_word_embeddings": False,
    },
    "internvl-qwen3_moe": {
        "vision_config": _INTERNVIT,
        "text_config": {**TEXT, "model_type": "qwen3_moe", **_EXPERTS},
        "tie_word_embeddings": False,
    },
    "llava": {
        "vision_config": {
            **_VISION,
            "model_type": "clip_vision_model",
            "image_size": 56,
            "projection_dim": 8,
        },
        "text_config": {**TEXT, "model_type": "llama"},
        "tie_word_embeddings": False,
    },
    # As LLaVA-Interleave.
    "llava-siglip": {
        "vision_config": {
            **_VISION,
            "model_type": "siglip_vision_model",
            "image_size": 56,
            "vision_use_head": False,
        },
        "text_config": {**TEXT, "model_type": "qwen2"},
        "vision_feature_layer": -1,
        "vision_feature_select_strategy": "full",
        "tie_word_embeddings": False,
    },
    "llava_next": {
        "vision_config": {
            **_VISION,
            "model_type": "clip_vision_model",
            "image_size": 56,
            "projection_dim": 8,
        },
        "text_config": {**TEXT, "model_type": "mistral", "sliding_window": None},
        "image_grid_pinpoints": [[56, 112], [112, 56], [112, 112]],
        "tie_word_embeddings": False,
    },
    "lfm2_vl": LFM2_VL,
    "lighton_ocr": {
        "vision_config": _PIXTRAL,
        "text_config": {**TEXT, "model_type": "qwen3", "head_dim": 12},
        "tie_word_embeddings": False,
    },
    "paddleocr_vl": {
        # A grid of 6 x 6 learnt positions.
        "vision_config": {**_VISION, "num_hidden_layers": 4, "image_size": 84},
        "text_config": {
            **TEXT,
            "model_type": "paddleocr_vl_text",
            "head_dim": 12,
            "rope_parameters": {"rope_type": "default", "rope_theta": 10_000.0, "mrope_section": [2, 2, 2]},
        },
        "tie_word_embeddings": False,
    },
    "mistral3": {
        "vision_config": _PIXTRAL,
        "text_config": {**TEXT, "model_type": "mistral", "sliding_window": None},
        "tie_word_embeddings": False,
    },
    # As Ministral 3: queries are scaled by their positions, here from the 8th on.
    "mistral3-ministral3": {
        "vision_config": _PIXTRAL,
        "text_config": {
            **TEXT,
            "model_type": "ministral3",
            "head_dim": 12,
            "rope_parameters": {
                "rope_type": "yarn",
                "rope_theta": 10_000.0,
                "factor": 16.0,
                "original_max_position_embeddings": 8,
                "beta_fast": 32.0,
                "beta_slow": 1.0,
                "mscale": 1.0,
                "mscale_all_dim": 1.0,
                "llama_4_scaling_beta": 0.1,
            },
        },
        "tie_word_embeddings": False,
    },
    "qwen2_vl": {
        "vision_config": {**_PATCHES, "embed_dim": 32, "hidden_size": 48, "mlp_ratio": 2},
        **TEXT,
        **_MROPE,
    },
    "qwen2_5_vl": {
        "vision_config": {
            **_PATCHES,
            "hidden_size": 32,
            "out_hidden_size": 48,
            "intermediate_size": 64,
            "window_size": 112,
            "fullatt_block_indexes": [1, 3],
        },
        **TEXT,
        **_MROPE,
    },
    # Two encoders; the file is that of the whole model. Windows of 16 mel frames, 8 tokens, 4 features.
    "qwen2_5_omni": {
        "thinker_config": {
            "model_type": "qwen2_5_omni_thinker",
            "vision_config": {
                **_PATCHES,
                "hidden_size": 32,
                "out_hidden_size": 48,
                "intermediate_size": 64,
                "window_size": 112,
                "fullatt_block_indexes": [1, 3],
            },
            "audio_config": {
                "d_model": 32,
                "encoder_layers": 3,
                "encoder_attention_heads": 4,
                "encoder_ffn_dim": 64,
                "num_mel_bins": 8,
                "n_window": 8,
                "output_dim": 48,
            },
            "text_config": {
                **TEXT,
                "rope_parameters": {
                    "rope_type": "default",
                    "rope_theta": 10_000.0,
                    "mrope_section": [2, 2, 2],
                },
            },
            "vision_start_token_id": 7,
            "tie_word_embeddings": False,
        },
    },
    # As above; a sound is a second of 13 tokens after the other, in windows of two of them.
    "qwen3_omni_moe": {
        "thinker_config": {
            "model_type": "qwen3_omni_moe_thinker",
            "vision_config": _QWEN3_VISION,
            "audio_config": {
                "d_model": 32,
                "encoder_layers": 3,
                "encoder_attention_heads": 4,
                "encoder_ffn_dim": 64,
                "num_mel_bins": 8,
                "n_window_infer": 200,
                "downsample_hidden_size": 6,
                "output_dim": 48,
            },
            "text_config": {
                **TEXT,
                **_EXPERTS,
                "rope_parameters": {
                    "rope_type": "default",
                    "rope_theta": 10_000.0,
                    "mrope_section": [2, 2, 2],
                    "interleaved": True,
                },
            },
            "vision_start_token_id": 7,
            "tie_word_embeddings": False,
        },
    },
    "qwen3_vl": {
        "vision_config": _QWEN3_VISION,
        "text_config": {
            **TEXT,
            "model_type": "qwen3_vl_text",
            "head_dim": 12,
            "rope_scaling": {"rope_type": "default", "mrope_section": [2, 2, 2], "mrope_interleaved": True},
        },
        "tie_word_embeddings": False,
    },
    "qwen3_vl_moe": {
        "vision_config": _QWEN3_VISION,
        "text_config": {
            **TEXT,
            "model_type": "qwen3_vl_moe_text",
            **_EXPERTS,
            "rope_scaling": {"rope_type": "default", "mrope_section": [2, 2, 2], "mrope_interleaved": True},
        },
        "tie_word_embeddings": False,
    },
    "qwen3_5": {
        "vision_config": {**_QWEN35_VISION, "model_type": "qwen3_5_vision"},
        "text_config": {**TEXT, "model_type": "qwen3_5_text", **LINEAR},
        "tie_word_embeddings": False,
    },
    "qwen3_5_moe": {
        "vision_config": {**_QWEN35_VISION, "model_type": "qwen3_5_moe_vision"},
        "text_config": {
            # As the published ones: all layers have experts, so nothing says how wide an MLP would be.
            **{name: value for name, value in TEXT.items() if name != "intermediate_size"},
            "model_type": "qwen3_5_moe_text",
            **LINEAR,
            **_EXPERTS,
            "shared_expert_intermediate_size": 40,
        },
        "tie_word_embeddings": False,
    },
    "minicpmv4_6": MINICPM,
    "minicpmv4_6-4x": MINICPM_4X,
    "qwen2_audio": {
        "audio_config": {
            "d_model": 32,
            "encoder_layers": 3,
            "encoder_attention_heads": 4,
            "encoder_ffn_dim": 64,
            "num_mel_bins": 8,
            "max_source_positions": 20,
        },
        "text_config": {**TEXT, "model_type": "qwen2"},
    },
    "audioflamingo3": {
        "audio_config": {
            "hidden_size": 32,
            "num_hidden_layers": 3,
            "num_attention_heads": 4,
            "intermediate_size": 64,
            "num_mel_bins": 8,
            "max_source_positions": 20,
        },
        "text_config": {**TEXT, "model_type": "qwen2"},
    },
    # Four tokens are a feature; a `head_dim` that is not named is 128.
    "voxtral": {
        "audio_config": {
            "hidden_size": 32,
            "num_hidden_layers": 3,
            "num_attention_heads": 4,
            "intermediate_size": 128,
            "num_mel_bins": 8,
            "max_source_positions": 20,
        },
        "text_config": {**TEXT, "model_type": "llama", "head_dim": 12},
    },
}
"""`config.json` by family, and by what else differs."""
CONDITION = {
    "minicpmv4_6": 50,
    "minicpmv4_6-4x": 50,
    "qwen3_5": 50,
    "qwen3_5_moe": 50,
    "gemma4": 4,
    "gemma4-experts": 6,
}
"""How much larger rounding is where weights differ by it already: linear attention takes the exponent of sums of
decays over 64 tokens, which are several hundred, in float32. With decays drawn up to 0.5 instead of 16, it is gone.
Gemma 4's encoder does not scale scores down by the width of heads, and each picture has 280 patches: 3.03 on one processor, below 3 on others."""
RESORTED = {"minicpmv4_6": 10, "minicpmv4_6-4x": 10}
"""The same wherever it runs: patches are sorted for the mergers, so sums of the encoder's attention round otherwise,
and linear attention stands behind it."""
ROUNDED = {"gemma4-experts": 2, **RESORTED}
"""The same where ranks add gradients in another order, and nothing else differs."""
WITH_EXPERTS = (
    "internvl-qwen3_moe",
    "qwen3_vl_moe",
    "qwen3_omni_moe",
    "qwen3_5_moe",
    "glm4v_moe",
    "gemma4-experts",
)
"""Those whose backbone has experts: in place of the MLP, the last one beside it."""
OMNI = ("qwen2_5_omni", "qwen3_omni_moe")
"""Those that read pictures and sounds, each by an encoder of its own; the file is that of a whole model."""
OF_SOUND = ("qwen2_audio", "audioflamingo3", "voxtral")
"""Those that read sound alone."""


def write_config(directory, name, content=None):
    """Writes the `config.json` of a tiny model, or `content`, and gives its folder."""
    directory.mkdir(parents=True, exist_ok=True)
    config = {"model_type": name.split("-")[0], **(TINY[name] if content is None else content)}
    (directory / "config.json").write_text(json.dumps(config))
    return directory


def hugging_face_model(directory):
    """The whole model by Hugging Face's own way, on the current default device."""
    import transformers

    config = transformers.AutoConfig.from_pretrained(directory)
    if config.model_type == "audioflamingo3":
        # None of transformers' lists of models with inputs of several kinds has it.
        return transformers.AudioFlamingo3ForConditionalGeneration(config)
    if config.model_type in OMNI:
        # Of the whole model only the thinker.
        kinds = ("Qwen2_5OmniThinker", "Qwen3OmniMoeThinker")
        name = kinds[OMNI.index(config.model_type)]
        return getattr(transformers, f"{name}ForConditionalGeneration")(config.thinker_config)
    is_sound = config.model_type in OF_SOUND
    kind = transformers.AutoModelForMultimodalLM if is_sound else transformers.AutoModelForImageTextToText
    return kind.from_config(config)


def tiny(tmp_path, name):
    """Pieces by name, and the folder of their model."""
    from dflop.profiling.families import load_pieces

    directory = write_config(tmp_path / name, name)
    return {piece.name: piece for piece in load_pieces(directory)}, directory


def some_segments(piece):
    """Packings of several sizes."""
    unit = piece.unit()
    if piece.segment_tokens is not None:
        return [[piece.segment_tokens] * count for count in (1, 3)]
    return [[unit], [unit * 5, unit, unit * 12], [unit * 31]]
