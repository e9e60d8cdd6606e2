"""The shape rule of Qwen2.5-Omni equals Hugging Face's processor and model, integer for integer."""

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
    Qwen2_5OmniProcessor,
    Qwen2_5OmniThinkerConfig,
    Qwen2_5OmniThinkerForConditionalGeneration,
    Qwen2VLImageProcessorPil,
    Qwen2VLVideoProcessor,
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
BOUNDS = {"image": "vision", "video": "vision", "audio": "audio"}
SPECIAL = {f"{kind}_token": f"<|{kind.upper()}|>" for kind in BOUNDS} | {
    f"{side}_{end}_token": f"<|{side}_{end}|>" for side in ("vision", "audio") for end in ("bos", "eos")
}
IDS = {token: number for number, token in enumerate(["<unk>", "<pad>", *SPECIAL.values()])}
# As the model publishes them, with few mel bins.
FILES = {
    "chunk_length": 300,
    "feature_size": 8,
    "hop_length": 160,
    "max_pixels": 12_845_056,
    "merge_size": 2,
    "min_pixels": 3136,
    "n_fft": 400,
    "padding_side": "right",
    "patch_size": 14,
    "return_attention_mask": True,
    "sampling_rate": 16_000,
    "temporal_patch_size": 2,
}
# (extractor's settings, half the mel frames of a window).
SOUNDS = {
    "real": ({}, 100),
    "short": ({"chunk_length": 3}, 4),
    "coarse": ({"chunk_length": 4, "hop_length": 320}, 10),
    "uneven": ({"chunk_length": 1, "hop_length": 159}, 2),
}


def processor(**extractor):
    words = Tokenizer(WordLevel(IDS, unk_token="<unk>"))
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=words, unk_token="<unk>", pad_token="<pad>", extra_special_tokens=SPECIAL
    )
    pixels = {key: FILES[key] for key in ("min_pixels", "max_pixels")}
    cheap = {"do_rescale": False, "do_normalize": False, "resample": 0}
    return Qwen2_5OmniProcessor(
        Qwen2VLImageProcessorPil(**pixels, **cheap),
        Qwen2VLVideoProcessor(**pixels, **cheap),
        WhisperFeatureExtractor(
            **{key: FILES[key] for key in ("feature_size", "chunk_length", "return_attention_mask")}
            | extractor
        ),
        tokenizer,
    )


def config(n_window=100):
    vision = {"depth": 1, "hidden_size": 8, "num_heads": 1, "intermediate_size": 8, "out_hidden_size": 8}
    audio = {"d_model": 8, "encoder_layers": 1, "encoder_attention_heads": 1, "encoder_ffn_dim": 8}
    audio |= {"num_mel_bins": 8, "n_window": n_window, "output_dim": 8}
    text = {"vocab_size": 16, "hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1}
    text |= {"num_attention_heads": 1, "num_key_value_heads": 1}
    text["rope_parameters"] = {"rope_type": "default", "rope_theta": 1e6, "mrope_section": [2, 1, 1]}
    made = Qwen2_5OmniThinkerConfig(
        audio_config=audio,
        vision_config=vision | {"fullatt_block_indexes": [0]},
        text_config=text,
        **{f"{kind}_token_index": IDS[f"<|{kind.upper()}|>"] for kind in BOUNDS},
        audio_start_token_id=IDS["<|audio_bos|>"],
        audio_end_token_id=IDS["<|audio_eos|>"],
    )
    # A field of the published file that the class does not declare.
    made.vision_start_token_id = IDS["<|vision_bos|>"]
    return made


def files(made, **extractor):
    """The contents of `config.json`, where the thinker is a section, and of `preprocessor_config.json`."""
    whole = {"model_type": "qwen2_5_omni", "thinker_config": json.loads(made.to_json_string(use_diff=False))}
    return json.dumps(whole), json.dumps(FILES | extractor)


def lengths(window, hop, each, count):
    """Numbers of samples: frames, tokens and windows about to begin, the longest, and draws."""
    rng = random.Random(SEED)
    frames = [2, 3, 4, 5, 6, 7, 8, *(2 * each * n + by for n in (1, 2, 3) for by in range(-2, 6))]
    edges = [hop * number + by for number in frames for by in (-1, 0, 1)] + [window, window - 1, window - hop]
    edges = [samples for samples in edges if 2 * hop < samples <= window]
    print(f"DFLOP_TEST_SEED={SEED}")
    return edges + [rng.randint(2 * hop + 1, window) for _ in range(count)]


@pytest.mark.parametrize("name", SOUNDS)
def test_sounds_through_extractor_and_tower(name):
    """The segments that a layer of Hugging Face's tower is given, and the features that it returns."""
    extractor, each = SOUNDS[name]
    made = WhisperFeatureExtractor(**{"feature_size": 8, "chunk_length": 300} | extractor)
    thinker = config(each)
    texts = files(thinker, **extractor)
    tower = Qwen2_5OmniThinkerForConditionalGeneration(thinker).eval()
    layer = next(m for name, m in tower.named_modules() if name.endswith("audio_tower.layers.0"))
    seen = []
    layer.register_forward_pre_hook(lambda *call: seen.append(call[2]["cu_seqlens"]), with_kwargs=True)
    for samples in lengths(made.n_samples, made.hop_length, each, 5 if name == "real" else 60):
        mask = torch.tensor(np.arange(made.n_samples) < samples)[:: made.hop_length]
        mask = mask[: made.nb_max_frames][None].long()
        with torch.no_grad():
            found = tower.get_audio_features(torch.zeros(1, 8, mask.shape[1]), mask, return_dict=True)
        features = found.last_hidden_state.shape[0]
        shape = testing.media_shape(*texts, "{}", "audio", duration_s=samples / 16_000, sample_rate=16_000)
        segments = [tokens for count, tokens in shape.segments for _ in range(count)]
        assert segments == seen.pop().diff().tolist(), samples
        assert (shape.num_tiles, shape.pieces) == (len(segments), [(None, features)]), samples
        assert sum(count * own for count, _, own in shape.parts) == features
        assert sum(count * own for count, own, _ in shape.parts) == len(segments)


def drawn_media(rng, size):
    """One medium a kind, in any order: (kind, its argument to the processor, arguments of our rule)."""
    height, width = size
    frames, samples = rng.randint(1, 7), rng.randint(321, 80_000)
    media = [
        ("image", np.zeros((height, width, 3), dtype=np.uint8), {"height": height, "width": width}),
        (
            "video",
            np.zeros((frames, height, width, 3), dtype=np.uint8),
            {"height": height, "width": width, "num_frames": frames, "fps": 24.0},
        ),
        (
            "audio",
            np.zeros(samples, dtype=np.float32),
            {"duration_s": samples / 16_000, "sample_rate": 16_000},
        ),
    ]
    rng.shuffle(media)
    return media


@pytest.mark.more
def test_all_kinds_of_media_in_one_text_through_the_whole_processor_and_the_whole_model():
    """Placeholders of each kind, grids of pictures, and a forward that compares both with the features."""
    made, thinker = processor(), config()
    model = Qwen2_5OmniThinkerForConditionalGeneration(thinker).eval()
    texts = files(thinker)
    rng = random.Random(SEED)
    sizes = [s for s in drawn_sizes(SEED, 60, 700) if max(s) / min(s) <= 200 and min(s) > 4]
    assert len(sizes) > 20
    for number, size in enumerate(sizes):
        media = drawn_media(rng, size)
        given = {kind: [value] for kind, value, _ in media}
        encoded = made(
            text="".join(
                f"<|{BOUNDS[kind]}_bos|><|{kind.upper()}|><|{BOUNDS[kind]}_eos|>" for kind, *_ in media
            ),
            images=given["image"],
            videos=given["video"],
            audio=given["audio"],
            images_kwargs={"input_data_format": "channels_last"},
            videos_kwargs={"input_data_format": "channels_last", "do_sample_frames": False},
            return_tensors="pt",
        )
        expected = []
        for kind, _, ours in media:
            shape = testing.media_shape(*texts, "{}", kind, **ours)
            expected += [
                IDS[f"<|{BOUNDS[kind]}_bos|>"],
                *[IDS[f"<|{kind.upper()}|>"]] * shape.feature_tokens,
                IDS[f"<|{BOUNDS[kind]}_eos|>"],
            ]
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
    sizes, grids = [(56, 84), (1_200, 1_600)], []
    made = processor()
    for size in sizes:
        encoded = made(
            text="<|VIDEO|>",
            videos=[np.zeros((2, *size, 3), dtype=np.uint8)],
            videos_kwargs={"input_data_format": "channels_last", "do_sample_frames": False},
            return_tensors="pt",
        )
        grids.append(encoded["video_grid_thw"][0].tolist())
        for own in ({}, {"size": {"shortest_edge": 1, "longest_edge": 9_999}}):
            shape = testing.media_shape(
                *files(config()),
                json.dumps(own),
                "video",
                height=size[0],
                width=size[1],
                num_frames=2,
                fps=24.0,
            )
            assert [shape.num_tiles, *shape.patches] == grids[-1]
    assert grids == [[1, 20, 28], [1, 48, 64]]


def test_what_would_be_cut_or_lost_is_refused():
    """The processor cuts at its window without a word, and writes nothing for 20 ms."""
    made, texts = processor(chunk_length=3), files(config(4), chunk_length=3)

    def placeholders(samples):
        encoded = made(text="<|AUDIO|>", audio=[np.zeros(samples, dtype=np.float32)])
        return np.sum(np.array(encoded["input_ids"]) == IDS["<|AUDIO|>"])

    def ours(samples):
        return testing.media_shape(*texts, "{}", "audio", duration_s=samples / 16_000, sample_rate=16_000)

    assert placeholders(48_000) == placeholders(96_000) == ours(48_000).feature_tokens == 75
    with pytest.raises(ProfileError, match="are more than `chunk_length`'s 48000; the processor would cut"):
        ours(48_001)
    assert (placeholders(320), placeholders(321)) == (0, 1)
    with pytest.raises(ProfileError, match="its 320 samples fill no token, at least 321 do"):
        ours(320)
