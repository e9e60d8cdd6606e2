"""A small LFM2-VL."""

LFM2_VL = {
    "vision_config": {
        "model_type": "siglip2_vision_model",
        "hidden_size": 32,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "intermediate_size": 64,
        "patch_size": 14,
        # A grid of 6 x 6 learnt positions.
        "num_patches": 36,
        "vision_use_head": False,
    },
    "text_config": {
        "model_type": "lfm2",
        "hidden_size": 48,
        # 2/3 of it, rounded up to a multiple of 16: 96.
        "intermediate_size": 132,
        "block_multiple_of": 16,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "layer_types": ["conv", "full_attention", "conv"],
        "vocab_size": 300,
        "max_position_embeddings": 8192,
        "tie_word_embeddings": False,
        "bos_token_id": 1,
        "eos_token_id": 2,
    },
    "projector_hidden_size": 40,
    "tie_word_embeddings": False,
}
