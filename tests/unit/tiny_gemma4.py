"""A tiny model like Gemma 4 E2B and E4B, and microbatches of Gemma 4: pictures, frames of videos, sounds."""

from __future__ import annotations

import tiny_families
import torch
from tiny_backbone import TEXT

BEGIN, IMAGE, VIDEO, SOUND = 5, 298, 299, 297
_LARGE = tiny_families.TINY["gemma4"]
SMALL = {
    # Its maps are clipped, and its features are not standardised.
    "vision_config": {**_LARGE["vision_config"], "standardize": False, "use_clipped_linears": True},
    "audio_config": {
        "model_type": "gemma4_audio",
        "hidden_size": 32,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        # The first is the number of mel bins.
        "subsampling_conv_channels": [8, 4],
        "conv_kernel_size": 3,
        "attention_chunk_size": 4,
        "attention_context_left": 5,
        "output_proj_dims": 24,
    },
    "text_config": {
        **TEXT,
        "model_type": "gemma4_text",
        "num_hidden_layers": 5,
        "num_key_value_heads": 1,
        "head_dim": 12,
        "global_head_dim": 16,
        "hidden_size_per_layer_input": 6,
        "vocab_size_per_layer_input": TEXT["vocab_size"],
        # The last two read keys and values of the third and of the second, and have MLPs twice as wide.
        "num_kv_shared_layers": 2,
        "use_double_wide_mlp": True,
        "layer_types": [
            "sliding_attention",
            "full_attention",
            "sliding_attention",
            "sliding_attention",
            "full_attention",
        ],
        "sliding_window": 5,
        "final_logit_softcapping": 3.0,
    },
    "tie_word_embeddings": True,
    "image_token_id": IMAGE,
    "video_token_id": VIDEO,
    "audio_token_id": SOUND,
}
"""Embeddings for single layers, layers that read keys and values of others, an encoder of sounds."""
CLIP = 1.5
"""What clipped maps read and give, at most."""
POOL, BINS = 2, 8
PATCHES = {"image": 96, "video": 32}
"""Patches of each picture with its padding, and of each frame."""
FRAMES = 64
"""Mel frames of each sound with its padding."""
SMALL_STEPS = [
    [
        [("sound", 41), ("sound", 30), ("image", 8, 12), ("image", 4, 4)],
        [],
        [("video", 3, 8, 4), ("sound", 16)],
        [("image", 2, 4), ("video", 2, 4, 8)],
    ],
    # A sound of one feature, of as many frames as there are; pictures here, sounds there.
    [[("sound", 3), ("sound", 64)], [("image", 8, 6), ("video", 2, 4, 4)], [], []],
    [[], [("sound", 9)], [], []],
    [[], [], [], []],
]
"""Media by step and rank."""
STEPS = [[[one for one in media if one[0] != "sound"] for media in ranks] for ranks in SMALL_STEPS]
STEPS[2][1] = [("image", 4, 6)]


def prepare(model):
    """Makes what is not drawn matter: the limits of clipped maps; and scores small, which no width scales down."""
    for name, buffer in model.named_buffers():
        if name.endswith(("put_min", "put_max")):
            buffer.fill_(-CLIP if name.endswith("min") else CLIP)
    if model.config.model_type == "gemma4":
        for name, parameter in model.named_parameters():
            if name.endswith(("q_norm.weight", "k_norm.weight")):
                parameter.fill_(0.5)


def _pictures(sizes, most, generator):
    """Patches and positions as the processor gives them, padding behind."""
    pixels = torch.zeros(len(sizes), most, 3 * 4 * 4)
    positions = torch.full((len(sizes), most, 2), -1)
    for index, (rows, columns) in enumerate(sizes):
        own = torch.cartesian_prod(torch.arange(rows), torch.arange(columns)).flip(1)
        positions[index, : len(own)] = own
        pixels[index, : len(own)] = torch.rand(len(own), 3 * 4 * 4, generator=generator)
    return pixels, positions


def media_arguments(media, generator):
    """Arguments of the whole model but for text, the ids of the media's places, and their types."""
    arguments, ids, types = {}, [], []
    images = [size for kind, *size in media if kind == "image"]
    videos = [size for kind, *size in media if kind == "video"]
    sounds = [size for kind, size, *_ in media if kind == "sound"]
    for token, type_, count in [
        *((IMAGE, 1, rows * columns // POOL**2) for rows, columns in images),
        *((VIDEO, 2, rows * columns // POOL**2) for n, rows, columns in videos for _ in range(n)),
        *((SOUND, 3, -(-frames // 4)) for frames in sounds),
    ]:
        # Pictures that stood side by side would be one.
        ids += [BEGIN, *[token] * count]
        types += [0, *[type_] * count]
    if images:
        pixels, positions = _pictures(images, PATCHES["image"], generator)
        arguments.update(pixel_values=pixels, image_position_ids=positions)
    if videos:
        frames = [(rows, columns) for count, rows, columns in videos for _ in range(count)]
        pixels, positions = _pictures(frames, PATCHES["video"], generator)
        arguments.update(pixel_values_videos=pixels, video_position_ids=positions)
        arguments["num_frames_per_video"] = torch.tensor([count for count, *_ in videos])
    if sounds:
        mask = torch.arange(FRAMES)[None] < torch.tensor(sounds)[:, None]
        found = torch.randn(len(sounds), FRAMES, BINS, generator=generator) * mask[..., None]
        arguments.update(input_features=found, input_features_mask=mask)
    return arguments, ids, types
