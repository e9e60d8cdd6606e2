//! What the classes of configurations in transformers 5.23 (`models/*/configuration_*.py`) have for absent fields.

/// `Qwen2Config` (`models/qwen2/configuration_qwen2.py`).
pub(super) const QWEN2: &[(&str, u64)] = &[
    ("vocab_size", 151_936),
    ("hidden_size", 4_096),
    ("intermediate_size", 22_016),
    ("num_hidden_layers", 32),
    ("num_attention_heads", 32),
    ("num_key_value_heads", 32),
];
/// `LlamaConfig` (`models/llama/configuration_llama.py`); absent key-value heads are as many as heads.
pub(super) const LLAMA: &[(&str, u64)] = &[
    ("vocab_size", 32_000),
    ("hidden_size", 4_096),
    ("intermediate_size", 11_008),
    ("num_hidden_layers", 32),
    ("num_attention_heads", 32),
];
/// `MistralConfig` (`models/mistral/configuration_mistral.py`); an absent `head_dim` is the width over the heads.
pub(super) const MISTRAL: &[(&str, u64)] = &[
    ("vocab_size", 32_000),
    ("hidden_size", 4_096),
    ("intermediate_size", 14_336),
    ("num_hidden_layers", 32),
    ("num_attention_heads", 32),
    ("num_key_value_heads", 8),
];
/// `Ministral3Config` (`models/ministral3/configuration_ministral3.py`).
pub(super) const MINISTRAL3: &[(&str, u64)] = &[
    ("vocab_size", 131_072),
    ("hidden_size", 4_096),
    ("intermediate_size", 14_336),
    ("num_hidden_layers", 34),
    ("num_attention_heads", 32),
    ("num_key_value_heads", 8),
    ("head_dim", 128),
];
/// `PixtralVisionConfig` (`models/pixtral/configuration_pixtral.py`).
pub(super) const PIXTRAL: &[(&str, u64)] = &[
    ("hidden_size", 1_024),
    ("intermediate_size", 4_096),
    ("num_hidden_layers", 24),
    ("num_attention_heads", 16),
    ("num_channels", 3),
    ("patch_size", 16),
];
/// `Qwen2VLTextConfig` and `Qwen2_5_VLTextConfig`.
pub(super) const QWEN2_VL_TEXT: &[(&str, u64)] = &[
    ("vocab_size", 152_064),
    ("hidden_size", 8_192),
    ("intermediate_size", 29_568),
    ("num_hidden_layers", 80),
    ("num_attention_heads", 64),
    ("num_key_value_heads", 8),
];
/// `SiglipVisionConfig` (`models/siglip/configuration_siglip.py`).
pub(super) const SIGLIP: &[(&str, u64)] = &[
    ("hidden_size", 768),
    ("intermediate_size", 3_072),
    ("num_hidden_layers", 12),
    ("num_attention_heads", 12),
    ("num_channels", 3),
    ("image_size", 224),
    ("patch_size", 16),
];
/// `Idefics3VisionConfig` and `SmolVLMVisionConfig`.
pub(super) const IDEFICS3_VISION: &[(&str, u64)] = &[
    ("hidden_size", 1_152),
    ("intermediate_size", 3_072),
    ("num_hidden_layers", 12),
    ("num_attention_heads", 16),
    ("num_channels", 3),
    ("image_size", 224),
    ("patch_size", 32),
];
/// `CLIPVisionConfig` (`models/clip/configuration_clip.py`).
pub(super) const CLIP: &[(&str, u64)] = &[
    ("hidden_size", 768),
    ("intermediate_size", 3_072),
    ("num_hidden_layers", 12),
    ("num_attention_heads", 12),
    ("num_channels", 3),
    ("image_size", 224),
    ("patch_size", 32),
];
/// `InternVLVisionConfig` (`models/internvl/configuration_internvl.py`).
pub(super) const INTERNVIT: &[(&str, u64)] = &[
    ("hidden_size", 1_024),
    ("intermediate_size", 4_096),
    ("num_hidden_layers", 24),
    ("num_attention_heads", 16),
    ("num_channels", 3),
    ("image_size", 448),
    ("patch_size", 14),
];
/// `Qwen2VLVisionConfig`; its width is `embed_dim`, and `hidden_size` that of the features.
pub(super) const QWEN2_VL_VISION: &[(&str, u64)] = &[
    ("depth", 32),
    ("embed_dim", 1_280),
    ("mlp_ratio", 4),
    ("num_heads", 16),
    ("in_channels", 3),
    ("patch_size", 14),
    ("spatial_merge_size", 2),
    ("temporal_patch_size", 2),
];
/// `Qwen2_5_VLVisionConfig`.
pub(super) const QWEN2_5_VL_VISION: &[(&str, u64)] = &[
    ("depth", 32),
    ("hidden_size", 3_584),
    ("intermediate_size", 3_420),
    ("num_heads", 16),
    ("in_channels", 3),
    ("patch_size", 14),
    ("spatial_merge_size", 2),
    ("temporal_patch_size", 2),
    ("window_size", 112),
];
/// `Qwen3VLVisionConfig` (`models/qwen3_vl/configuration_qwen3_vl.py`).
pub(super) const QWEN3_VL_VISION: &[(&str, u64)] = &[
    ("depth", 27),
    ("hidden_size", 1_152),
    ("intermediate_size", 4_304),
    ("num_heads", 16),
    ("in_channels", 3),
    ("patch_size", 16),
    ("spatial_merge_size", 2),
    ("temporal_patch_size", 2),
    ("out_hidden_size", 3_584),
    ("num_position_embeddings", 2_304),
];
/// `Qwen3Config` (`models/qwen3/configuration_qwen3.py`).
pub(super) const QWEN3: &[(&str, u64)] = QWEN3_VL_TEXT;
/// `Qwen3MoeConfig` (`models/qwen3_moe/configuration_qwen3_moe.py`); an absent `head_dim` is the width over the heads.
pub(super) const QWEN3_MOE: &[(&str, u64)] = &[
    ("vocab_size", 151_936),
    ("hidden_size", 2_048),
    ("intermediate_size", 6_144),
    ("num_hidden_layers", 24),
    ("num_attention_heads", 32),
    ("num_key_value_heads", 4),
    ("decoder_sparse_step", 1),
    ("moe_intermediate_size", 768),
    ("num_experts_per_tok", 8),
    ("num_experts", 128),
];
/// `Qwen3VLTextConfig`.
pub(super) const QWEN3_VL_TEXT: &[(&str, u64)] = &[
    ("vocab_size", 151_936),
    ("hidden_size", 4_096),
    ("intermediate_size", 22_016),
    ("num_hidden_layers", 32),
    ("num_attention_heads", 32),
    ("num_key_value_heads", 32),
    ("head_dim", 128),
];
/// `Qwen3VLMoeTextConfig` (`models/qwen3_vl_moe/configuration_qwen3_vl_moe.py`); an absent `head_dim` is the width over the
/// heads.
pub(super) const QWEN3_VL_MOE_TEXT: &[(&str, u64)] = &[
    ("vocab_size", 151_936),
    ("hidden_size", 2_048),
    ("intermediate_size", 5_632),
    ("num_hidden_layers", 24),
    ("num_attention_heads", 16),
    ("num_key_value_heads", 16),
    ("decoder_sparse_step", 1),
    ("moe_intermediate_size", 1_408),
    ("num_experts_per_tok", 4),
    ("num_experts", 60),
];
/// `Qwen3_5TextConfig` (`models/qwen3_5/configuration_qwen3_5.py`).
pub(super) const QWEN3_5_TEXT: &[(&str, u64)] = &[
    ("vocab_size", 248_320),
    ("hidden_size", 4_096),
    ("intermediate_size", 12_288),
    ("num_hidden_layers", 32),
    ("num_attention_heads", 16),
    ("num_key_value_heads", 4),
    ("head_dim", 256),
    ("linear_conv_kernel_dim", 4),
    ("linear_key_head_dim", 128),
    ("linear_value_head_dim", 128),
    ("linear_num_key_heads", 16),
    ("linear_num_value_heads", 32),
];
/// `Qwen3_5MoeTextConfig` (`models/qwen3_5_moe/configuration_qwen3_5_moe.py`), whose layers have no MLP but experts.
pub(super) const QWEN3_5_MOE_TEXT: &[(&str, u64)] = &[
    ("vocab_size", 248_320),
    ("hidden_size", 2_048),
    ("intermediate_size", 512),
    ("num_hidden_layers", 40),
    ("num_attention_heads", 16),
    ("num_key_value_heads", 2),
    ("head_dim", 256),
    ("linear_conv_kernel_dim", 4),
    ("linear_key_head_dim", 128),
    ("linear_value_head_dim", 128),
    ("linear_num_key_heads", 16),
    ("linear_num_value_heads", 32),
    ("decoder_sparse_step", 1),
    ("moe_intermediate_size", 512),
    ("shared_expert_intermediate_size", 512),
    ("num_experts_per_tok", 8),
    ("num_experts", 256),
];
/// `Qwen2AudioEncoderConfig` (`models/qwen2_audio/configuration_qwen2_audio.py`).
pub(super) const QWEN2_AUDIO: &[(&str, u64)] = &[
    ("d_model", 1_280),
    ("encoder_layers", 32),
    ("encoder_attention_heads", 20),
    ("encoder_ffn_dim", 5_120),
    ("num_mel_bins", 128),
    ("max_source_positions", 1_500),
];
/// `AudioFlamingo3EncoderConfig` (`models/audioflamingo3/configuration_audioflamingo3.py`).
pub(super) const AUDIOFLAMINGO3: &[(&str, u64)] = &[
    ("hidden_size", 1_280),
    ("num_hidden_layers", 32),
    ("num_attention_heads", 20),
    ("intermediate_size", 5_120),
    ("num_mel_bins", 128),
    ("max_source_positions", 1_500),
];
/// What `VoxtralConfig` writes into a `text_config` that leaves it out (`models/voxtral/configuration_voxtral.py`).
pub(super) const VOXTRAL_TEXT: &[(&str, u64)] = &[
    ("vocab_size", 131_072),
    ("hidden_size", 3_072),
    ("intermediate_size", 8_192),
    ("num_hidden_layers", 30),
    ("num_key_value_heads", 8),
    ("head_dim", 128),
];
/// `Glm4vVisionConfig` (`models/glm4v/configuration_glm4v.py`).
pub(super) const GLM4V_VISION: &[(&str, u64)] = &[
    ("depth", 24),
    ("hidden_size", 1_536),
    ("intermediate_size", 13_696),
    ("num_heads", 12),
    ("in_channels", 3),
    ("image_size", 336),
    ("patch_size", 14),
    ("spatial_merge_size", 2),
    ("temporal_patch_size", 2),
    ("out_hidden_size", 4_096),
];
/// `Glm4vTextConfig`.
pub(super) const GLM4V_TEXT: &[(&str, u64)] = &[
    ("vocab_size", 151_552),
    ("hidden_size", 4_096),
    ("intermediate_size", 13_696),
    ("num_hidden_layers", 40),
    ("num_attention_heads", 32),
    ("num_key_value_heads", 2),
];
/// `GlmOcrVisionConfig` (`models/glm_ocr/configuration_glm_ocr.py`).
pub(super) const GLM_OCR_VISION: &[(&str, u64)] = &[
    ("depth", 24),
    ("hidden_size", 1_024),
    ("intermediate_size", 4_096),
    ("num_heads", 16),
    ("in_channels", 3),
    ("image_size", 336),
    ("patch_size", 14),
    ("spatial_merge_size", 2),
    ("temporal_patch_size", 2),
    ("out_hidden_size", 1_536),
];
/// `GlmOcrTextConfig`; an absent `head_dim` is the width over the heads.
pub(super) const GLM_OCR_TEXT: &[(&str, u64)] = &[
    ("vocab_size", 59_392),
    ("hidden_size", 1_024),
    ("intermediate_size", 4_096),
    ("num_hidden_layers", 16),
    ("num_attention_heads", 16),
    ("num_key_value_heads", 8),
];
/// `Glm4vMoeTextConfig` (`models/glm4v_moe/configuration_glm4v_moe.py`); an absent `head_dim` is the width over the heads.
pub(super) const GLM4V_MOE_TEXT: &[(&str, u64)] = &[
    ("vocab_size", 151_424),
    ("hidden_size", 4_096),
    ("intermediate_size", 10_944),
    ("num_hidden_layers", 46),
    ("num_attention_heads", 96),
    ("num_key_value_heads", 8),
    ("moe_intermediate_size", 1_408),
    ("num_experts_per_tok", 8),
    ("n_routed_experts", 128),
    ("n_shared_experts", 1),
];
/// `PaddleOCRVisionConfig` (`models/paddleocr_vl/configuration_paddleocr_vl.py`).
pub(super) const PADDLEOCR_VISION: &[(&str, u64)] = &[
    ("hidden_size", 1_152),
    ("intermediate_size", 4_304),
    ("num_hidden_layers", 27),
    ("num_attention_heads", 16),
    ("num_channels", 3),
    ("image_size", 384),
    ("patch_size", 14),
    ("spatial_merge_size", 2),
];
/// `PaddleOCRTextConfig`.
pub(super) const PADDLEOCR_TEXT: &[(&str, u64)] = &[
    ("vocab_size", 103_424),
    ("hidden_size", 1_024),
    ("intermediate_size", 3_072),
    ("num_hidden_layers", 18),
    ("num_attention_heads", 16),
    ("num_key_value_heads", 2),
    ("head_dim", 128),
];
/// `Gemma3TextConfig` (`models/gemma3/configuration_gemma3.py`).
pub(super) const GEMMA3_TEXT: &[(&str, u64)] = &[
    ("vocab_size", 262_208),
    ("hidden_size", 2_304),
    ("intermediate_size", 9_216),
    ("num_hidden_layers", 26),
    ("num_attention_heads", 8),
    ("num_key_value_heads", 4),
    ("head_dim", 256),
    ("sliding_window", 4_096),
];
/// `Gemma4TextConfig` (`models/gemma4/configuration_gemma4.py`).
pub(super) const GEMMA4_TEXT: &[(&str, u64)] = &[
    ("vocab_size", 262_144),
    ("hidden_size", 2_304),
    ("intermediate_size", 9_216),
    ("num_hidden_layers", 30),
    ("num_attention_heads", 8),
    ("num_key_value_heads", 4),
    ("head_dim", 256),
    ("global_head_dim", 512),
    ("sliding_window", 512),
];
/// `Gemma4VisionConfig`.
pub(super) const GEMMA4_VISION: &[(&str, u64)] = &[
    ("hidden_size", 768),
    ("intermediate_size", 3_072),
    ("num_hidden_layers", 16),
    ("num_attention_heads", 12),
    ("num_key_value_heads", 12),
    ("head_dim", 64),
    ("patch_size", 16),
    ("pooling_kernel_size", 3),
    ("position_embedding_size", 10_240),
];
/// `Qwen2_5OmniAudioEncoderConfig` (`models/qwen2_5_omni/configuration_qwen2_5_omni.py`).
pub(super) const QWEN2_5_OMNI_AUDIO: &[(&str, u64)] = &[
    ("d_model", 1_280),
    ("encoder_layers", 32),
    ("encoder_attention_heads", 20),
    ("encoder_ffn_dim", 5_120),
    ("num_mel_bins", 128),
    ("output_dim", 3_584),
];
/// `Qwen2_5OmniTextConfig`.
pub(super) const QWEN2_5_OMNI_TEXT: &[(&str, u64)] = &[
    ("vocab_size", 152_064),
    ("hidden_size", 3_584),
    ("intermediate_size", 18_944),
    ("num_hidden_layers", 28),
    ("num_attention_heads", 28),
    ("num_key_value_heads", 4),
];
/// `Qwen3OmniMoeAudioEncoderConfig` (`models/qwen3_omni_moe/configuration_qwen3_omni_moe.py`).
pub(super) const QWEN3_OMNI_AUDIO: &[(&str, u64)] = &[
    ("d_model", 1_280),
    ("encoder_layers", 32),
    ("encoder_attention_heads", 20),
    ("encoder_ffn_dim", 5_120),
    ("num_mel_bins", 128),
    ("output_dim", 3_584),
    ("downsample_hidden_size", 480),
    ("n_window", 50),
];
/// `Qwen3OmniMoeTextConfig`; an absent `head_dim` is the width over the heads.
pub(super) const QWEN3_OMNI_TEXT: &[(&str, u64)] = &[
    ("vocab_size", 3_584),
    ("hidden_size", 2_048),
    ("intermediate_size", 18_944),
    ("num_hidden_layers", 28),
    ("num_attention_heads", 28),
    ("num_key_value_heads", 4),
    ("decoder_sparse_step", 1),
    ("moe_intermediate_size", 768),
    ("num_experts_per_tok", 8),
    ("num_experts", 128),
];
/// `Siglip2VisionConfig` (`models/siglip2/configuration_siglip2.py`).
pub(super) const SIGLIP2: &[(&str, u64)] = &[
    ("hidden_size", 768),
    ("intermediate_size", 3_072),
    ("num_hidden_layers", 12),
    ("num_attention_heads", 12),
    ("num_channels", 3),
    ("patch_size", 16),
    ("num_patches", 256),
];
/// `Lfm2Config` (`models/lfm2/configuration_lfm2.py`); an absent `head_dim` is the width over the heads.
pub(super) const LFM2: &[(&str, u64)] = &[
    ("vocab_size", 65_536),
    ("hidden_size", 2_560),
    ("intermediate_size", 12_288),
    ("num_hidden_layers", 32),
    ("num_attention_heads", 32),
    ("num_key_value_heads", 8),
    ("conv_L_cache", 3),
    ("block_multiple_of", 256),
];
/// `MiniCPMV4_6VisionConfig` (`models/minicpmv4_6/configuration_minicpmv4_6.py`).
pub(super) const MINICPMV4_6_VISION: &[(&str, u64)] = &[
    ("hidden_size", 768),
    ("intermediate_size", 3_072),
    ("num_hidden_layers", 12),
    ("num_attention_heads", 12),
    ("num_channels", 3),
    ("image_size", 224),
    ("patch_size", 16),
];
