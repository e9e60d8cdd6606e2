"""Tiny Hugging Face models of each family with an encoder, and microbatches of media for them."""

from __future__ import annotations

import tiny_families
import tiny_gemma4
import tiny_llava
import torch
from tiny_backbone import TEXT

from dflop._native import families

MEDIA_TOKEN, VIDEO_TOKEN, VOCABULARY = 298, 299, 300
VISION_START, AUDIO_START, MEDIUM_END, SOUND_TOKEN = 7, 8, 9, 297
OMNI_TOKENS = {
    name: {
        f"image_token_{field}": MEDIA_TOKEN,
        f"video_token_{field}": VIDEO_TOKEN,
        f"audio_token_{field}": SOUND_TOKEN,
        "vision_start_token_id": VISION_START,
        "audio_start_token_id": AUDIO_START,
    }
    for name, field in (("qwen2_5_omni", "index"), ("qwen3_omni_moe", "id"))
}
SHARED_ALONE = {
    "aya_vision": {
        "vision_config": {
            **tiny_families.TINY["gemma3"]["vision_config"],
            "model_type": "siglip_vision_model",
        },
        "text_config": {**TEXT, "model_type": "cohere2", "head_dim": 12},
        "downsample_factor": 2,
        "vision_feature_layer": -1,
        "adapter_layer_norm_eps": 1e-6,
        "alignment_intermediate_size": 64,
        "image_token_index": MEDIA_TOKEN,
        "tie_word_embeddings": False,
    },
    "cohere2_vision": {
        "vision_config": {
            **tiny_families.TINY["gemma3"]["vision_config"],
            "model_type": "siglip_vision_model",
        },
        "text_config": {**TEXT, "model_type": "cohere2", "head_dim": 12},
        "downsample_factor": 2,
        "alignment_intermediate_size": 64,
        "image_token_id": MEDIA_TOKEN,
        "tie_word_embeddings": False,
    },
    "gemma4-e2b": tiny_gemma4.SMALL,
    "llama4": {
        "vision_config": {
            "hidden_size": 32,
            "num_hidden_layers": 3,
            "num_attention_heads": 4,
            "intermediate_size": 128,
            "vision_output_dim": 32,
            "projector_input_dim": 32,
            "projector_output_dim": 32,
            "image_size": 56,
            "patch_size": 7,
        },
        # Dense and with experts in turn; of three layers one sees everything without positions.
        "text_config": {
            **TEXT,
            "head_dim": 12,
            "intermediate_size_mlp": 64,
            "num_local_experts": 2,
            "interleave_moe_layer_step": 2,
            "no_rope_layer_interval": 3,
            "pad_token_id": 0,
        },
        "image_token_index": MEDIA_TOKEN,
        "tie_word_embeddings": False,
    },
    "paligemma": {
        "vision_config": {
            **tiny_families.TINY["gemma3"]["vision_config"],
            "model_type": "siglip_vision_model",
        },
        "text_config": {**TEXT, "model_type": "gemma", "head_dim": 12},
        "projection_dim": TEXT["hidden_size"],
        "image_token_index": MEDIA_TOKEN,
        "tie_word_embeddings": False,
    },
}
"""Families whose encoder is shared out, and that dflop has no rule for: what their configurations say."""
ROUNDED = {"gemma4": 2, "gemma4-e2b": 2}
"""How much larger rounding is: scores of the tiny model are not scaled down. Gradients of the towers alone
are equal to 1e-5 (test_gemma4_towers.py), those of the model in float64 to 1e-13 (once, by hand)."""
FAMILIES = (*(name for name, can in families().items() if can["share"]), *SHARED_ALONE)


def make_model(name, folder):
    """A model of this family with parameters of seed 0, larger than usual so that every part matters."""
    torch.manual_seed(0)
    if name == "llava_onevision":
        directory = tiny_llava.write_model_dir(folder / name)
    elif name in SHARED_ALONE:
        directory = tiny_families.write_config(folder / name, name, SHARED_ALONE[name])
    else:
        tokens = {
            "gemma3": {"image_token_index": MEDIA_TOKEN},
            "internvl": {"image_token_id": MEDIA_TOKEN},
            "llava": {"image_token_index": MEDIA_TOKEN},
            "llava_next": {"image_token_index": MEDIA_TOKEN},
            "mistral3": {"image_token_index": MEDIA_TOKEN},
            "qwen2_audio": {"audio_token_index": MEDIA_TOKEN},
            "audioflamingo3": {"audio_token_id": MEDIA_TOKEN},
            "voxtral": {"audio_token_id": MEDIA_TOKEN},
        }.get(name, {"image_token_id": MEDIA_TOKEN, "video_token_id": VIDEO_TOKEN})
        content = {**tiny_families.TINY[name], **tokens}
        if name in OMNI_TOKENS:
            thinker = {**tiny_families.TINY[name]["thinker_config"], **OMNI_TOKENS[name]}
            content = {"thinker_config": thinker}
        directory = tiny_families.write_config(folder / name, name, content)
    model = tiny_families.hugging_face_model(directory)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                torch.nn.init.normal_(parameter, std=0.1)
        tiny_gemma4.prepare(model)
    model.train()
    return model


MASKS = {"qwen2_audio": "feature_attention_mask", "audioflamingo3": "input_features_mask"}
"""Families that read sound, and their argument for which mel frames are sound."""
SHUFFLED = {"idefics3": 4, "smolvlm": 1}
"""Families whose tiles stand by sample, and the features of a tile."""


def is_of_patches(name):
    """Whether a family's media are grids of patches: the vision models of Qwen, GLM and PaddleOCR-VL."""
    return name.startswith(("qwen", "glm", "paddle")) and name not in MASKS


def microbatch(name, media, seed, num_text=7):
    """Arguments of the whole model for one row: `media` by kind and size, then text; labels are of the text.

    Of LLaVA-OneVision (kind, height, width, frames), of LLaVA-NeXT and Mistral3 (height, width), of LLaVA, Gemma 3, InternVL, Idefics3, SmolVLM
    and of those that read sound the number of tiles or windows, of the vision models of Qwen and GLM grids (kind, t, h, w),
    of Qwen2.5-Omni and Qwen3-Omni ("sound", mel frames) too; of Gemma 4 the same with pictures (kind, h, w).
    """
    if name == "llava_onevision":
        sample = tiny_llava.Sample(media, num_text, seed)
        arguments = tiny_llava.hf_arguments(sample)
        return {**arguments, "labels": torch.tensor([sample.labels])}
    generator = torch.Generator().manual_seed(seed)
    ids, arguments, types = [], {}, []
    if name == "llava_next" and media:
        arguments["pixel_values"] = torch.randn(len(media), 5, 3, 56, 56, generator=generator)
        arguments["image_sizes"] = torch.tensor(media)
        ids = [MEDIA_TOKEN] * sum(_features_of_next(*size) for size in media)
    elif name == "llava" and media:
        arguments["pixel_values"] = torch.randn(media, 3, 56, 56, generator=generator)
        ids = [MEDIA_TOKEN] * (16 * media)
    elif name == "lfm2_vl" and media:
        # Rows and columns of patches of each tile, filled up to the largest that there may be.
        counts, most = [rows * columns for rows, columns in media], 40
        mask = (torch.arange(most)[None] < torch.tensor(counts)[:, None]).int()
        pixels = torch.randn(len(media), most, 3 * 14 * 14, generator=generator)
        arguments["pixel_values"] = pixels * mask[..., None]
        arguments["pixel_attention_mask"] = mask
        arguments["spatial_shapes"] = torch.tensor(media)
        ids = [MEDIA_TOKEN] * (sum(counts) // 4)
    elif name == "minicpmv4_6" and media:
        # Rows and columns of patches of each slice, all patches side by side.
        count = sum(rows * columns for rows, columns in media)
        arguments["pixel_values"] = torch.randn(1, 3, 14, 14 * count, generator=generator)
        arguments["target_sizes"] = torch.tensor(media, dtype=torch.int32)
        ids = [MEDIA_TOKEN] * (count // 16)
    elif name in ("mistral3", "lighton_ocr") and media:
        # Padded to the largest, as the processor gives pictures.
        height, width = (max(size[axis] for size in media) for axis in (0, 1))
        arguments["pixel_values"] = torch.randn(len(media), 3, height, width, generator=generator)
        arguments["image_sizes"] = torch.tensor(media)
        ids = [MEDIA_TOKEN] * sum((height // 28) * (width // 28) for height, width in media)
    elif name.startswith("gemma4"):
        arguments, ids, types = tiny_gemma4.media_arguments(media, generator)
    elif name in SHARED_ALONE and media:
        # Of a tile 8 x 8 patches; two of three families merge four.
        arguments["pixel_values"] = torch.randn(media, 3, 56, 56, generator=generator)
        ids = [MEDIA_TOKEN] * ((64 if name == "paligemma" else 16) * media)
    elif name == "internvl" and media:
        arguments["pixel_values"] = torch.randn(media, 3, 56, 56, generator=generator)
        ids = [MEDIA_TOKEN] * (4 * media)
    elif name == "gemma3" and media:
        arguments["pixel_values"] = torch.randn(media, 3, 56, 56, generator=generator)
        # Squares that stood side by side would be one picture.
        ids = [5, *[MEDIA_TOKEN] * 16] * media
    elif name in SHUFFLED and media:
        arguments["pixel_values"] = torch.randn(1, media, 3, 56, 56, generator=generator)
        ids = [MEDIA_TOKEN] * (SHUFFLED[name] * media)
    elif name in MASKS and media:
        lengths = torch.randint(12, 41, (media,), generator=generator)
        arguments["input_features"] = torch.randn(media, 8, 40, generator=generator)
        arguments[MASKS[name]] = (torch.arange(40)[None] < lengths[:, None]).long()
        for length in lengths.tolist():
            ids += [MEDIA_TOKEN] * ((((length - 1) // 2 + 1) - 2) // 2 + 1)
    elif name == "voxtral" and media:
        arguments["input_features"] = torch.randn(media, 8, 40, generator=generator)
        ids = [MEDIA_TOKEN] * (5 * media)
    elif is_of_patches(name) and media:
        # A video of GLM has the token of images.
        of_videos = MEDIA_TOKEN if name.startswith("glm") else VIDEO_TOKEN
        for kind, pixels, grid, token in [
            ("image", "pixel_values", "image_grid_thw", MEDIA_TOKEN),
            ("video", "pixel_values_videos", "video_grid_thw", of_videos),
        ]:
            grids = [size for what, *size in media if what == kind]
            if grids:
                count = sum(t * h * w for t, h, w in grids)
                # PaddleOCR-VL reads single pictures, and keeps their form.
                form = (3, 14, 14) if name == "paddleocr_vl" else (3 * 2 * 14 * 14,)
                arguments[pixels] = torch.randn(count, *form, generator=generator)
                arguments[grid] = torch.tensor(grids)
                for t, h, w in grids:
                    # Qwen3-VL and GLM have text between the frame pairs of a video.
                    apart = t if name.startswith(("qwen3", "glm")) and name not in OMNI_TOKENS else 1
                    # What stands beside another of its kind would be one medium.
                    end = [MEDIUM_END] if name in OMNI_TOKENS else []
                    ids += [VISION_START, *[token] * (t * h * w // 4 // apart), *end] * apart
                    types += [0, *[1 + (kind == "video")] * (t * h * w // 4 // apart)] * apart
    lengths = [size[0] for what, *size in media if what == "sound"] if name in OMNI_TOKENS else []
    if lengths:
        most = 448 if name == "qwen3_omni_moe" else 48
        arguments["input_features"] = torch.randn(len(lengths), 8, most, generator=generator)
        arguments["feature_attention_mask"] = (
            torch.arange(most)[None] < torch.tensor(lengths)[:, None]
        ).long()
        for length in lengths:
            features = (((length - 1) // 2 + 1) - 2) // 2 + 1
            if name == "qwen3_omni_moe":
                features = length // 100 * 13 + -(-(length % 100) // 8)
            ids += [AUDIO_START, *[SOUND_TOKEN] * features, MEDIUM_END]
    # Words that the model takes for no begin or end of a medium, nor for a place in one.
    words = torch.randint(MEDIUM_END + 1, SOUND_TOKEN, (num_text + 3,), generator=generator).tolist()
    labels = [-100] * (len(ids) + 3) + words[3:]
    ids = ids + words
    if name == "gemma3":
        arguments["token_type_ids"] = torch.tensor([[int(token == MEDIA_TOKEN) for token in ids]])
    if name == "paligemma":
        # The prompt is seen whole; what is learnt stands behind it.
        arguments["token_type_ids"] = torch.tensor([[int(label != -100) for label in labels]])
    if name in OMNI_TOKENS:
        arguments["video_second_per_grid"] = torch.ones(sum(what == "video" for what, *_ in media))
    elif is_of_patches(name) or name.startswith("gemma4"):
        arguments["mm_token_type_ids"] = torch.tensor([types + [0] * (len(ids) - len(types))])
    return {
        **arguments,
        "input_ids": torch.tensor([ids]),
        "attention_mask": torch.ones(1, len(ids), dtype=torch.int64),
        "labels": torch.tensor([labels]),
        "use_cache": False,
    }


def _features_of_next(height, width):
    """Features of a picture of the tiny LLaVA-NeXT: the base tile's 4 x 4, and the grid's rows with a newline each."""
    assert (height, width) in {(112, 112), (56, 112)}, "no part of these is padding"
    return 16 + (height // 14) * (width // 14 + 1)


IMAGE = ("image", 240, 250, 1)
PLAIN = ("multi_image", 126, 126, 1)
VIDEO = ("video", 126, 126, 3)
# By step and rank. A rank of text alone; media of one kind here and of the other there; fewer media than ranks;
# text alone everywhere.
STEPS = {
    "llava_onevision": [
        [[IMAGE], [], [VIDEO], [PLAIN, PLAIN, VIDEO]],
        [[VIDEO], [IMAGE], [], []],
        [[], [("image", 120, 126, 1)], [], []],
        [[], [], [], []],
    ],
    "llava_next": [
        [[(112, 112), (56, 112)], [], [(56, 112)], [(112, 112)] * 2],
        [[], [(56, 112)], [], []],
        [[], [], [], []],
    ],
    "internvl": [[3, 0, 1, 6], [0, 1, 0, 0], [0, 0, 0, 0]],
    "qwen2_audio": [[3, 0, 1, 2], [0, 1, 0, 0], [0, 0, 0, 0]],
}
STEPS["audioflamingo3"] = STEPS["voxtral"] = STEPS["qwen2_audio"]
STEPS["llava"] = STEPS["gemma3"] = STEPS["internvl"]
STEPS.update(dict.fromkeys(SHARED_ALONE, STEPS["internvl"]))
STEPS["gemma4"], STEPS["gemma4-e2b"] = tiny_gemma4.STEPS, tiny_gemma4.SMALL_STEPS
STEPS["lighton_ocr"] = STEPS["mistral3"] = [
    [[(112, 84), (28, 56)], [], [(84, 28)], [(56, 56), (28, 28)]],
    [[], [(56, 112)], [], []],
    [[], [], [], []],
]
STEPS["lfm2_vl"] = [
    [[(4, 4), (4, 4), (6, 4)], [], [(6, 6)], [(4, 4), (2, 4)]],
    [[], [(4, 6)], [], []],
    [[], [], [], []],
]
STEPS["minicpmv4_6"] = [
    [[(8, 8), (4, 8), (4, 8)], [], [(8, 4)], [(4, 4), (8, 8)]],
    [[], [(4, 8)], [], []],
    [[], [], [], []],
]
STEPS["idefics3"] = STEPS["smolvlm"] = STEPS["internvl"]
STEPS["qwen3_5"] = STEPS["qwen3_5_moe"] = STEPS["qwen2_vl"] = STEPS["qwen2_5_vl"] = STEPS["qwen3_vl"] = STEPS[
    "qwen3_vl_moe"
] = [
    [
        [("image", 1, 16, 12), ("image", 1, 4, 4)],
        [],
        [("video", 3, 8, 6)],
        [("image", 1, 2, 4), ("video", 2, 4, 8)],
    ],
    [[("video", 2, 8, 8)], [("image", 1, 8, 6)], [], []],
    [[], [("image", 1, 4, 6)], [], []],
    [[], [], [], []],
]
# Sounds of one window and of several, of which the last may be a single token; a rank of sounds beside one of pictures.
STEPS["qwen2_5_omni"] = [
    [
        [("sound", 41), ("image", 1, 16, 12), ("image", 1, 4, 4)],
        [],
        [("video", 3, 8, 6), ("sound", 16)],
        [("image", 1, 2, 4), ("video", 2, 4, 8)],
    ],
    [[("sound", 33), ("sound", 12)], [("image", 1, 8, 6), ("video", 2, 8, 8)], [], []],
    [[], [("sound", 3)], [], []],
    [[], [], [], []],
]
# The same with sounds of seconds: of several windows, of one, with a last chunk that is not whole.
STEPS["qwen3_omni_moe"] = [
    [
        [("sound", 441), ("image", 1, 16, 12), ("image", 1, 4, 4)],
        [],
        [("video", 3, 8, 6), ("sound", 116)],
        [("image", 1, 2, 4), ("video", 2, 4, 8)],
    ],
    [[("sound", 233), ("sound", 12)], [("image", 1, 8, 6), ("video", 2, 8, 8)], [], []],
    [[], [("sound", 103)], [], []],
    [[], [], [], []],
]
STEPS["paddleocr_vl"] = [
    [
        [("image", 1, 8, 6), ("image", 1, 4, 4)],
        [],
        [("image", 1, 6, 4)],
        [("image", 1, 2, 4), ("image", 1, 4, 8)],
    ],
    [[], [("image", 1, 4, 6)], [], []],
    [[], [], [], []],
]
# GLM's model takes images or videos in one call.
STEPS["glm4v"] = STEPS["glm4v_moe"] = STEPS["glm46v"] = STEPS["glm_ocr"] = [
    [
        [("image", 1, 16, 12), ("image", 1, 4, 4)],
        [],
        [("video", 3, 8, 6)],
        [("video", 1, 2, 4), ("video", 2, 4, 8)],
    ],
    *STEPS["qwen2_vl"][1:],
]


def steps_of(name, num_ranks):
    """Microbatches of [step][rank]; a rank of the last ranks' share of the data is left out of fewer ranks."""
    return [
        [microbatch(name, media, seed=10 * step + rank) for rank, media in enumerate(ranks[:num_ranks])]
        for step, ranks in enumerate(STEPS[name])
    ]
