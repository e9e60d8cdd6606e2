"""Tiny Qwen3-VL (with experts too) and Qwen2.5-Omni with their processors, and chats with pictures, videos and sounds.

A video is a list of its frames, some with a sound, so that nothing has to decode one.
"""

from __future__ import annotations

import io
import random

import numpy as np
import tiny_vision
import torch

KINDS = ("image", "video", "audio")
OMNI_SPECIAL = (
    *("<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|vision_bos|>", "<|vision_eos|>", "<|audio_bos|>"),
    *("<|audio_eos|>", "<|IMAGE|>", "<|VIDEO|>", "<|AUDIO|>", "user", "assistant"),
)
OMNI_TEMPLATE = """{% for message in messages %}<|im_start|>{{ message['role'] }}
{% for part in message['content'] %}\
{% if part['type'] == 'image' %}<|vision_bos|><|IMAGE|><|vision_eos|>\
{% elif part['type'] == 'video' %}<|vision_bos|><|VIDEO|><|vision_eos|>\
{% elif part['type'] == 'audio' %}<|audio_bos|><|AUDIO|><|audio_eos|>{% else %}{{ part['text'] }}\
{% endif %}{% endfor %}<|im_end|>
{% endfor %}"""
PIXELS = {"size": {"shortest_edge": 28 * 28, "longest_edge": 28 * 28 * 16}}
TEXT = {
    "hidden_size": 24,
    "intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "max_position_embeddings": 1024,
}
VISION = {"patch_size": 14, "spatial_merge_size": 2, "temporal_patch_size": 2, "num_heads": 2, "depth": 2}
VISION |= {"hidden_size": 16, "out_hidden_size": 24, "intermediate_size": 32}
WINDOWS = {"window_size": 56, "fullatt_block_indexes": [1]}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 20}
MROPE = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [2, 2, 2]}


def _save(model, directory, seed):
    """Weights that are drawn, large enough that each of them matters."""
    from safetensors.torch import save_file

    torch.manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                torch.nn.init.normal_(parameter, std=0.1)
    model.save_pretrained(directory)
    # By the names of today's module: of older ones VeOmni draws others, and says so in its log alone.
    weights = {name: value.contiguous() for name, value in model.state_dict().items()}
    save_file(weights, directory / "model.safetensors", metadata={"format": "pt"})


def write_qwen3_vl(directory, *, has_experts=False):
    """Configuration, weights in float32 and processor."""
    import transformers

    name = "Qwen3VLMoe" if has_experts else "Qwen3VL"
    tokenizer = tiny_vision.tokenizer_of_bytes()
    ids = dict(
        zip(tiny_vision.SPECIAL, tokenizer.convert_tokens_to_ids(list(tiny_vision.SPECIAL)), strict=True)
    )
    tokenizer.image_token, tokenizer.video_token = "<|image_pad|>", "<|video_pad|>"
    tokenizer.vision_start_token, tokenizer.vision_end_token = "<|vision_start|>", "<|vision_end|>"
    settings = {**PIXELS, "patch_size": 14}
    processor = transformers.Qwen3VLProcessor(
        transformers.Qwen2VLImageProcessor(**settings),
        tokenizer,
        transformers.Qwen3VLVideoProcessor(**settings),
        chat_template=tiny_vision.CHAT_TEMPLATE,
    )
    config = getattr(transformers, f"{name}Config")(
        vision_config={**VISION, "num_position_embeddings": 36, "deepstack_visual_indexes": [0]},
        text_config={
            **TEXT,
            **(EXPERTS if has_experts else {}),
            "vocab_size": len(tokenizer),
            "head_dim": 12,
            "rope_parameters": {**MROPE, "mrope_interleaved": True},
            "eos_token_id": ids["<|im_end|>"],
            "pad_token_id": ids["<|endoftext|>"],
            "bos_token_id": None,
        },
        image_token_id=ids["<|image_pad|>"],
        video_token_id=ids["<|video_pad|>"],
        vision_start_token_id=ids["<|vision_start|>"],
        vision_end_token_id=ids["<|vision_end|>"],
        tie_word_embeddings=False,
    )
    _save(getattr(transformers, f"{name}ForConditionalGeneration")(config), directory, 0)
    processor.save_pretrained(directory)


def write_omni(directory):
    """A Qwen2.5-Omni of which the thinker alone has weights, as VeOmni trains it."""
    import transformers

    names = {f"{kind}_token": f"<|{kind.upper()}|>" for kind in KINDS} | {
        f"{side}_{end}_token": f"<|{side}_{end}|>" for side in ("vision", "audio") for end in ("bos", "eos")
    }
    tokenizer = transformers.PreTrainedTokenizerFast(
        tokenizer_object=tiny_vision.byte_tokens(),
        eos_token="<|im_end|>",
        pad_token="<|endoftext|>",
        extra_special_tokens=names,
    )
    tokenizer.add_tokens(list(OMNI_SPECIAL), special_tokens=True)
    ids = dict(zip(OMNI_SPECIAL, tokenizer.convert_tokens_to_ids(list(OMNI_SPECIAL)), strict=True))
    processor = transformers.Qwen2_5OmniProcessor(
        transformers.Qwen2VLImageProcessor(**PIXELS),
        transformers.Qwen2VLVideoProcessor(**PIXELS),
        transformers.WhisperFeatureExtractor(feature_size=8, chunk_length=4, return_attention_mask=True),
        tokenizer,
        chat_template=OMNI_TEMPLATE,
    )
    thinker = transformers.Qwen2_5OmniThinkerConfig(
        vision_config={**VISION, **WINDOWS},
        audio_config={
            "d_model": 16,
            "encoder_layers": 2,
            "encoder_attention_heads": 2,
            "encoder_ffn_dim": 64,
            "num_mel_bins": 8,
            "n_window": 20,
            "output_dim": 24,
        },
        text_config={**TEXT, "vocab_size": len(tokenizer), "rope_parameters": MROPE},
        **{f"{kind}_token_id": ids[f"<|{kind.upper()}|>"] for kind in KINDS},
        audio_start_token_id=ids["<|audio_bos|>"],
        audio_end_token_id=ids["<|audio_eos|>"],
        vision_start_token_id=ids["<|vision_bos|>"],
        vision_end_token_id=ids["<|vision_eos|>"],
        pad_token_id=ids["<|endoftext|>"],
        tie_word_embeddings=False,
    )
    config = transformers.Qwen2_5OmniConfig(thinker_config=thinker.to_dict(), enable_audio_output=False)
    config.architectures = ["Qwen2_5OmniForConditionalGeneration"]
    whole = torch.nn.Module()
    whole.thinker = transformers.Qwen2_5OmniThinkerForConditionalGeneration(thinker)
    whole.save_pretrained = config.save_pretrained
    _save(whole, directory, 0)
    processor.save_pretrained(directory)


def write_media(path, folder, kinds, count, seed=0):
    """Chats as a Parquet file: a quarter of text alone, the others with one medium or two of `kinds`."""
    import pyarrow
    import pyarrow.parquet

    draw = random.Random(seed)
    folder.mkdir(parents=True, exist_ok=True)
    makers = {"image": _image, "video": _video, "audio": _audio}
    rows = []
    for sample in range(count):
        chosen = [draw.choice(kinds) for _ in range(0 if sample % 4 == 3 else draw.randrange(1, 3))]
        row = {f"{kind}s": [] for kind in KINDS}
        for place, kind in enumerate(chosen):
            row[f"{kind}s"].append(makers[kind](draw, folder / f"{sample}_{place}"))
            if kind == "video" and "audio" in kinds and draw.randrange(2):
                medium = row["videos"][-1]
                medium["audio"] = _sound(draw, 8_000 * len(medium["frames"]))
        asked = {"role": "user", "text": tiny_vision.words(draw, 1, 8), "media": chosen}
        length = draw.choice([(1, 9), (1, 9), (25, 40)])
        given = {"role": "assistant", "text": tiny_vision.words(draw, *length), "media": []}
        rows.append({**row, "conversations": [asked, given]})
    text, many = pyarrow.string(), pyarrow.list_
    turn = pyarrow.struct([("role", text), ("text", text), ("media", many(text))])
    video = pyarrow.struct([("frames", many(pyarrow.binary())), ("audio", pyarrow.binary())])
    fields = [("images", many(text)), ("videos", many(video)), ("audios", many(text))]
    schema = pyarrow.schema([*fields, ("conversations", many(turn))])
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows, schema), path)


def _noise(draw, width, height):
    from PIL import Image

    return Image.effect_noise((width, height), draw.randrange(20, 90)).convert("RGB")


def _image(draw, path):
    path = path.with_suffix(".png")
    _noise(draw, draw.randrange(28, 150), draw.randrange(28, 150)).save(path)
    return str(path)


def _video(draw, _):
    """Two frames to eight of equal size, two a second."""
    width, height = draw.randrange(28, 90), draw.randrange(28, 90)
    frames = []
    for _ in range(2 * draw.randrange(1, 5)):
        file = io.BytesIO()
        _noise(draw, width, height).save(file, "PNG")
        frames.append(file.getvalue())
    return {"frames": frames, "audio": None}


def _audio(draw, path):
    """A fifth of a second to three."""
    path = path.with_suffix(".wav")
    path.write_bytes(_sound(draw, draw.randrange(3_200, 48_000)))
    return str(path)


def _sound(draw, count):
    """A WAV of so many samples, 16 000 a second."""
    import soundfile

    file = io.BytesIO()
    noise = np.random.default_rng(draw.randrange(10**6)).normal(0, 0.1, count)
    soundfile.write(file, noise, 16_000, format="WAV")
    return file.getvalue()
