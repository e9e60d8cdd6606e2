"""Sizes of a small backbone, and of layers with linear attention."""

VOCABULARY = 300
TEXT = {
    "hidden_size": 48,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": VOCABULARY,
    "max_position_embeddings": 8192,
    "tie_word_embeddings": False,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
LINEAR = {
    "layer_types": ["linear_attention", "linear_attention", "full_attention"],
    "linear_conv_kernel_dim": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 6,
    # As many of keys as ranks share a layer in tests, at most.
    "linear_num_key_heads": 4,
    "linear_num_value_heads": 8,
    "head_dim": 12,
    "rope_parameters": {
        "rope_type": "default",
        "rope_theta": 10_000.0,
        "partial_rotary_factor": 0.5,
        "mrope_section": [1, 1, 1],
        "mrope_interleaved": True,
    },
}
