"""The shape rule of Qwen3-Omni equals Hugging Face's processor and model, integer for integer."""

import json
import os
import random

import numpy as np
import pytest
import torch
from shape_oracle import drawn_sizes
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from transformers import (
    PreTrainedTokenizerFast,
    Qwen2VLImageProcessorPil,
    Qwen2VLVideoProcessor,
    Qwen3OmniMoeProcessor,
    Qwen3OmniMoeThinkerConfig,
    Qwen3OmniMoeThinkerForConditionalGeneration,
    WhisperFeatureExtractor,
)

from dflop import ProfileError
from dflop._native import testing

pytestmark = [
    pytest.mark.usefixtures("quiet"),
    # Eight mel bins are few for 8 kHz; only their number of frames is looked at.
    pytest.mark.filterwarnings("ignore:At least one mel filter"),
]
SEED = int(os.environ.get("DFLOP_TEST_SEED", "20261127"))
SIDES = {"image": "vision", "video": "vision", "audio": "audio"}
SPECIAL = {f"{kind}_token": f"<|{kind}_pad|>" for kind in SIDES} | {
    f"{side}_{name}_token": f"<|{side}_{end}|>"
    for side in ("vision", "audio")
    for name, end in (("bos", "start"), ("eos", "end"))
}
IDS = {token: number for number, token in enumerate(["<unk>", "<pad>", *SPECIAL.values()])}
# As the model publishes them, with few mel bins.
FILES = {
    "feature_size": 8,
    "hop_length": 160,
    "max_pixels": 12_845_056,
    "merge_size": 2,
    "min_pixels": 3136,
    "n_fft": 400,
    "padding_side": "right",
    "patch_size": 16,
    "return_attention_mask": True,
    "sampling_rate": 16_000,
    "temporal_patch_size": 2,
}


def processor():
    words = Tokenizer(WordLevel(IDS, unk_token="<unk>"))
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=words, unk_token="<unk>", pad_token="<pad>", extra_special_tokens=SPECIAL
    )
    pixels = {key: FILES[key] for key in ("min_pixels", "max_pixels", "patch_size")}
    cheap = {"do_rescale": False, "do_normalize": False, "resample": 0}
    return Qwen3OmniMoeProcessor(
        Qwen2VLImageProcessorPil(**pixels, **cheap),
        Qwen2VLVideoProcessor(**pixels, **cheap),
        WhisperFeatureExtractor(feature_size=8, return_attention_mask=True),
        tokenizer,
    )


def config(**audio):
    vision = {"depth": 1, "hidden_size": 8, "num_heads": 1, "intermediate_size": 8, "out_hidden_size": 8}
    vision |= {"num_position_embeddings": 4, "deepstack_visual_indexes": [0]}
    sounds = {"d_model": 8, "encoder_layers": 1, "encoder_attention_heads": 1, "encoder_ffn_dim": 8}
    sounds |= {"num_mel_bins": 8, "output_dim": 8, "downsample_hidden_size": 2}
    text = {"vocab_size": 16, "hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1, "head_dim": 8}
    text |= {"num_attention_heads": 1, "num_key_value_heads": 1, "num_experts": 2, "num_experts_per_tok": 1}
    text |= {"moe_intermediate_size": 4}
    text["rope_parameters"] = {"rope_type": "default", "rope_theta": 1e6, "mrope_section": [2, 1, 1]}
    made = Qwen3OmniMoeThinkerConfig(
        audio_config=sounds | audio,
        vision_config=vision,
        text_config=text,
        **{f"{kind}_token_id": IDS[f"<|{kind}_pad|>"] for kind in SIDES},
        audio_start_token_id=IDS["<|audio_start|>"],
        audio_end_token_id=IDS["<|audio_end|>"],
    )
    # A field of the published file that the class does not declare.
    made.vision_start_token_id = IDS["<|vision_start|>"]
    return made


def files(made):
    """The contents of `config.json`, where the thinker is a section, and of `preprocessor_config.json`."""
    whole = {
        "model_type": "qwen3_omni_moe",
        "thinker_config": json.loads(made.to_json_string(use_diff=False)),
    }
    return json.dumps(whole), json.dumps(FILES)


def ours(texts, samples):
    return testing.media_shape(*texts, "{}", "audio", duration_s=samples / 16_000, sample_rate=16_000)


@pytest.mark.some(1)
@pytest.mark.parametrize("window", [800, 100, 250])
def test_sounds_through_the_tower(window):
    """The segments that a layer of Hugging Face's tower is given, and the features that it returns."""
    thinker = config(n_window_infer=window)
    texts = files(thinker)
    tower = Qwen3OmniMoeThinkerForConditionalGeneration(thinker).eval()
    layer = next(m for name, m in tower.named_modules() if name.endswith("audio_tower.layers.0"))
    seen = []
    layer.register_forward_pre_hook(lambda *call: seen.append(call[1][1]), with_kwargs=True)
    rng = random.Random(SEED)
    print(f"DFLOP_TEST_SEED={SEED}")
    edges = [100 * n + by for n in (1, 2, 8, 9, 16) for by in (-1, 0, 1, 8, 9)]
    for frames in [*range(2, 19), *edges, *(rng.randint(2, 2_000) for _ in range(20))]:
        with torch.no_grad():
            mel, mask = torch.zeros(1, 8, frames), torch.ones(1, frames, dtype=torch.long)
            found = tower.get_audio_features(mel, mask, return_dict=True)
        features = found.last_hidden_state.shape[0]
        # Of the last frame any part may be missing.
        shape = ours(texts, 160 * frames + rng.randint(0, 159))
        segments = [tokens for count, tokens in shape.segments for _ in range(count)]
        assert segments == seen.pop().diff().tolist(), frames
        assert (shape.num_tiles, shape.pieces) == (len(segments), [(None, features)]), frames
        assert sum(count * own for count, _, own in shape.parts) == features
        assert sum(count * own for count, own, _ in shape.parts) == len(segments)


def test_sounds_through_the_processor():
    """One call a sound: the places that it writes, also for sounds that are longer than the extractor's 30 s."""
    made, texts = processor(), files(config())
    rng = random.Random(SEED)
    for samples in [
        201,
        319,
        320,
        15_999,
        16_000,
        16_159,
        16_160,
        500_000,
        *(rng.randint(201, 90_000) for _ in range(25)),
    ]:
        encoded = made(text="<|audio_pad|>", audio=[np.zeros(samples, dtype=np.float32)])
        places = int(np.sum(np.array(encoded["input_ids"]) == IDS["<|audio_pad|>"]))
        assert places == ours(texts, samples).feature_tokens, samples
    with pytest.raises(RuntimeError, match="Padding size should be less"):
        made(text="<|audio_pad|>", audio=[np.zeros(200, dtype=np.float32)])
    with pytest.raises(
        ProfileError, match="its 200 samples are too few for the transform, which reads 201 or"
    ):
        ours(texts, 200)


def drawn_media(rng, size):
    """One medium a kind, in any order: (kind, its argument to the processor, arguments of our rule)."""
    height, width = size
    frames, samples = rng.randint(1, 7), rng.randint(321, 80_000)
    pixels = np.zeros((frames, height, width, 3), dtype=np.uint8)
    sides = {"height": height, "width": width}
    media = [
        ("image", pixels[0], sides),
        ("video", pixels, {**sides, "num_frames": frames, "fps": 24.0}),
        (
            "audio",
            np.zeros(samples, dtype=np.float32),
            {"duration_s": samples / 16_000, "sample_rate": 16_000},
        ),
    ]
    rng.shuffle(media)
    return media


def test_all_kinds_of_media_in_one_text_through_the_whole_processor_and_the_whole_model():
    """Placeholders of each kind, grids of pictures, and a forward that compares both with the features."""
    made, thinker = processor(), config()
    model = Qwen3OmniMoeThinkerForConditionalGeneration(thinker).eval()
    texts = files(thinker)
    rng = random.Random(SEED)
    sizes = [s for s in drawn_sizes(SEED, 60, 700) if max(s) / min(s) <= 200 and min(s) > 4]
    assert len(sizes) > 20
    for number, size in enumerate(sizes):
        media = drawn_media(rng, size)
        given = {kind: [value] for kind, value, _ in media}
        around = [(kind, f"<|{SIDES[kind]}_start|>", f"<|{SIDES[kind]}_end|>") for kind, *_ in media]
        encoded = made(
            text="".join(f"{start}<|{kind}_pad|>{end}" for kind, start, end in around),
            images=given["image"],
            videos=given["video"],
            audio=given["audio"],
            images_kwargs={"input_data_format": "channels_last"},
            videos_kwargs={"input_data_format": "channels_last", "do_sample_frames": False},
            return_tensors="pt",
        )
        expected = []
        for (kind, _, asked), (_, start, end) in zip(media, around, strict=True):
            shape = testing.media_shape(*texts, "{}", kind, **asked)
            expected += [IDS[start], *[IDS[f"<|{kind}_pad|>"]] * shape.feature_tokens, IDS[end]]
            if kind != "audio":
                grid = encoded[f"{kind}_grid_thw"][0].tolist()
                assert (shape.num_tiles, *shape.patches) == tuple(grid), (kind, size)
                assert shape.segments == [(grid[0], grid[1] * grid[2])]
        assert encoded["input_ids"][0].tolist() == expected, size
        if number < 3:
            with torch.no_grad():
                assert model(**encoded, use_cache=False).logits.shape[1] == len(expected)


def test_pixels_of_videos_are_the_processors_own():
    """Whatever range the files name: the processor passes its own to the video processor."""
    grids = []
    made = processor()
    for size in [(56, 84), (1_200, 1_600)]:
        encoded = made(
            text="<|video_pad|>",
            videos=[np.zeros((2, *size, 3), dtype=np.uint8)],
            videos_kwargs={"input_data_format": "channels_last", "do_sample_frames": False},
            return_tensors="pt",
        )
        grids.append(encoded["video_grid_thw"][0].tolist())
        for own in ({}, {"patch_size": 16, "size": {"shortest_edge": 1, "longest_edge": 9_999}}):
            asked = {"height": size[0], "width": size[1], "num_frames": 2, "fps": 24.0}
            shape = testing.media_shape(*files(config()), json.dumps(own), "video", **asked)
            assert [shape.num_tiles, *shape.patches] == grids[-1]
    assert grids == [[1, 20, 28], [1, 48, 64]]
