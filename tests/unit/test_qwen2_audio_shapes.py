"""The shape rule of Qwen2-Audio equals Hugging Face's processor and model, integer for integer."""

import json
import os
import random

import numpy as np
import pytest
import torch
from shape_oracle import TINY_QWEN2
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from transformers import (
    PreTrainedTokenizerFast,
    Qwen2AudioConfig,
    Qwen2AudioForConditionalGeneration,
    Qwen2AudioProcessor,
    WhisperFeatureExtractor,
)

from dflop import ProfileError
from dflop._native import testing

pytestmark = pytest.mark.usefixtures("quiet")
SEED = int(os.environ.get("DFLOP_TEST_SEED", "20261123"))
# (extractor's settings, positions of the encoder): mel frames are twice the positions.
SETTINGS = {
    "real": ({"feature_size": 8}, 1_500),
    "short": ({"feature_size": 8, "chunk_length": 2}, 100),
    "coarse": ({"feature_size": 8, "chunk_length": 4, "hop_length": 320}, 100),
    "slow": ({"feature_size": 8, "chunk_length": 3, "sampling_rate": 8_000, "hop_length": 80}, 150),
    "uneven": ({"feature_size": 8, "chunk_length": 1, "hop_length": 159}, 50),
}


def config(positions):
    return Qwen2AudioConfig(
        audio_config={
            "model_type": "qwen2_audio_encoder",
            "num_mel_bins": 8,
            "max_source_positions": positions,
            "d_model": 8,
            "encoder_layers": 1,
            "encoder_attention_heads": 1,
            "encoder_ffn_dim": 8,
        },
        text_config=TINY_QWEN2,
        audio_token_index=2,
    )


def processor(extractor):
    tokens = ["<unk>", "<pad>", "<|AUDIO|>", "<|audio_bos|>", "<|audio_eos|>"]
    words = Tokenizer(WordLevel({token: id for id, token in enumerate(tokens)}, unk_token="<unk>"))
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=words, unk_token="<unk>", pad_token="<pad>", additional_special_tokens=tokens[2:]
    )
    return Qwen2AudioProcessor(WhisperFeatureExtractor(**extractor), tokenizer)


def ours(config_json, extractor, duration_s, sample_rate):
    """(encoder tokens, LLM tokens) of a sound."""
    shape = testing.media_shape(
        config_json, json.dumps(extractor), "{}", "audio", duration_s=duration_s, sample_rate=sample_rate
    )
    assert (shape.num_tiles, shape.pieces) == (1, [(None, shape.feature_tokens)])
    ((count, tokens),) = shape.segments
    return count * tokens, shape.feature_tokens


def lengths(window, hop, count):
    """Numbers of samples: frames and tokens about to begin, the whole window, and draws."""
    rng = random.Random(SEED)
    edges = [hop * frames + by for frames in (2, 3, 4, 5, 6, 7, 8, 100) for by in (-1, 0, 1)]
    edges = [samples for samples in edges if samples > 2 * hop] + [window, window - 1, window - hop]
    return edges + [rng.randint(2 * hop + 1, window) for _ in range(count)]


# Eight mel bins are few for 8 kHz; only their number of frames is looked at.
@pytest.mark.filterwarnings("ignore:At least one mel filter")
@pytest.mark.parametrize("name", SETTINGS)
def test_sounds_through_the_extractor(name):
    """Mel frames that the extractor counts and tokens by the model's formula, for arrays of samples."""
    extractor, positions = SETTINGS[name]
    made = WhisperFeatureExtractor(**extractor)
    config_json = json.dumps(config(positions).to_dict())
    print(f"DFLOP_TEST_SEED={SEED}")
    model = Qwen2AudioForConditionalGeneration(config(positions)).model.audio_tower
    for samples in lengths(made.n_samples, made.hop_length, 5 if name == "real" else 60):
        mel = made(
            np.zeros(samples, dtype=np.float32),
            sampling_rate=made.sampling_rate,
            return_attention_mask=True,
            return_tensors="pt",
        )
        assert mel["input_features"].shape[-1] == 2 * positions
        frames = mel["attention_mask"].sum(-1)
        expected = (positions, model._get_feat_extract_output_lengths(frames)[1].item())
        assert ours(config_json, extractor, samples / made.sampling_rate, made.sampling_rate) == expected, (
            samples
        )


def test_sounds_by_the_mask():
    """Eight hundred lengths, by the extractor's padding alone."""
    extractor, positions = SETTINGS["real"]
    config_json = json.dumps(config(positions).to_dict())
    model = Qwen2AudioForConditionalGeneration(config(positions)).model.audio_tower
    made = WhisperFeatureExtractor(**extractor)
    for samples in lengths(made.n_samples, made.hop_length, 800):
        mask = np.arange(made.n_samples) < samples
        frames = torch.tensor(int(mask[:: made.hop_length].sum()))
        expected = (positions, model._get_feat_extract_output_lengths(frames)[1].item())
        assert ours(config_json, extractor, samples / 16_000, 16_000) == expected, samples


def test_the_whole_processor_and_the_whole_model_take_them():
    """As many placeholders as the processor writes, and a forward that compares them with the features."""
    extractor, positions = SETTINGS["short"]
    made, model = processor(extractor), Qwen2AudioForConditionalGeneration(config(positions)).eval()
    config_json = json.dumps(config(positions).to_dict())
    for samples in [321, 500, 9_999, 16_000, 32_000]:
        encoded = made(
            text="<|audio_bos|><|AUDIO|><|audio_eos|>",
            audio=[np.zeros(samples, dtype=np.float32)],
            sampling_rate=16_000,
            return_tensors="pt",
        )
        encoder_tokens, features = ours(config_json, extractor, samples / 16_000, 16_000)
        assert encoded["input_ids"].tolist() == [[3] + [2] * features + [4]]
        hidden = model.model.audio_tower.layers[0].register_forward_hook(
            lambda *call, n=encoder_tokens: pytest.fail(f"{n}") if call[2].shape[1] != n else None
        )
        with torch.no_grad():
            logits = model(**encoded, use_cache=False).logits
        hidden.remove()
        assert logits.shape[1] == features + 2


def test_resampled_sounds_are_counted_as_librosa_counts():
    """`ceil(n * 16000 / rate)` in floats, the ratio first."""
    extractor, positions = SETTINGS["real"]
    config_json = json.dumps(config(positions).to_dict())
    rng = random.Random(SEED)
    for _ in range(2000):
        rate = rng.choice([8_000, 11_025, 22_050, 24_000, 32_000, 44_100, 48_000, 96_000])
        at_source = rng.randint(rate // 20, 29 * rate)
        samples = int(np.ceil(at_source * (float(16_000) / rate)))
        expected = ours(config_json, extractor, samples / 16_000, 16_000)
        assert ours(config_json, extractor, at_source / rate, rate) == expected


def test_what_would_be_cut_or_lost_is_refused():
    """The processor cuts at the window without a word, and writes nothing for 20 ms."""
    extractor, positions = SETTINGS["short"]
    config_json = json.dumps(config(positions).to_dict())
    made = processor(extractor)

    def placeholders(samples):
        encoded = made(text="<|AUDIO|>", audio=[np.zeros(samples, dtype=np.float32)], sampling_rate=16_000)
        return np.sum(np.array(encoded["input_ids"]) == 2)

    assert placeholders(32_000) == placeholders(64_000) == 50
    with pytest.raises(
        ProfileError, match="its 32001 samples at 16000 a second are more than the window's 32000"
    ):
        ours(config_json, extractor, 32_001 / 16_000, 16_000)
    assert (placeholders(320), placeholders(321)) == (0, 1)
    with pytest.raises(ProfileError, match="its 320 samples fill no token, at least 321 do"):
        ours(config_json, extractor, 0.02, 16_000)
    with pytest.raises(ProfileError, match="a window of 30 s has 3000 mel frames, the encoder reads 200"):
        ours(config_json, {"feature_size": 8}, 1.0, 16_000)
    with pytest.raises(ProfileError, match="the encoder reads 8 mel bins, the extractor would make 80"):
        ours(config_json, {}, 1.0, 16_000)
