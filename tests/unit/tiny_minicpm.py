"""A small MiniCPM-V 4.6, and one without the merger between its layers."""

from tiny_backbone import LINEAR, TEXT

MINICPM = {
    "vision_config": {
        "hidden_size": 32,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "intermediate_size": 64,
        "patch_size": 14,
        # A grid of 6 x 6 learnt positions.
        "image_size": 84,
    },
    "text_config": {**TEXT, "model_type": "qwen3_5_text", **LINEAR},
    # The last of three layers stands behind the merger.
    "insert_layer_id": 1,
    "downsample_mode": "16x",
    "tie_word_embeddings": False,
}
MINICPM_4X = {**MINICPM, "downsample_mode": "4x"}
