"""The shape rule of Audio Flamingo 3 equals Hugging Face's processor and model, integer for integer."""

import json
import os
import random
import wave

import numpy as np
import pytest
import torch
from shape_oracle import TINY_QWEN2, processor_of_sounds
from tiny_families import TINY, write_config
from transformers import AudioFlamingo3Config, AudioFlamingo3ForConditionalGeneration

from dflop import ProfileError
from dflop._native import testing
from dflop.models import load_adapter
from dflop.models.adapter import MediaGrid
from dflop.models.processor_files import settings_of_processor

pytestmark = pytest.mark.usefixtures("quiet")
SEED = int(os.environ.get("DFLOP_TEST_SEED", "20261127"))
# (extractor's settings, positions of the encoder, seconds of a sound at most): mel frames are twice the positions.
SETTINGS = {
    "real": ({"feature_size": 8}, 1_500, 600),
    "short": ({"feature_size": 8, "chunk_length": 1}, 50, 7),
    "coarse": ({"feature_size": 8, "chunk_length": 4, "hop_length": 320}, 100, 30),
    "uneven": ({"feature_size": 8, "chunk_length": 1, "hop_length": 159}, 50, 20),
}


def config(positions):
    return AudioFlamingo3Config(
        audio_config={
            "model_type": "audioflamingo3_encoder",
            "num_mel_bins": 8,
            "max_source_positions": positions,
            "hidden_size": 8,
            "num_hidden_layers": 1,
            "num_attention_heads": 1,
            "intermediate_size": 8,
        },
        text_config=TINY_QWEN2,
        audio_token_id=2,
    )


def ours(name, samples, rate=16_000):
    """(windows, LLM tokens) of a sound of so many samples, whose parts are checked."""
    extractor, positions, seconds = SETTINGS[name]
    files = {"feature_extractor": extractor, "max_audio_len": seconds}
    config_json = json.dumps(config(positions).to_dict())
    shape = testing.media_shape(
        config_json, json.dumps(files), "{}", "audio", duration_s=samples / rate, sample_rate=rate
    )
    assert shape.pieces == [(None, shape.feature_tokens)]
    ((count, tokens),) = shape.segments
    assert (shape.num_tiles, tokens) == (count, positions)
    assert sum(number * windows for number, windows, _ in shape.parts) == count
    assert sum(number * features for number, _, features in shape.parts) == shape.feature_tokens
    return count, shape.feature_tokens


def lengths(name, count):
    """Numbers of samples: frames and tokens about to begin, windows about to be full, and draws."""
    extractor, _, seconds = SETTINGS[name]
    hop, chunk = extractor.get("hop_length", 160), extractor.get("chunk_length", 30)
    window, rng = chunk * 16_000, random.Random(SEED)
    print(f"DFLOP_TEST_SEED={SEED}")
    edges = [hop * frames + by for frames in (2, 3, 4, 5, 6, 7, 100) for by in (-1, 0, 1)]
    whole = [k * window for k in (1, 2, seconds // chunk - 1)]
    edges += [start + by for start in whole for by in (-hop, -1, 0, 1, hop, 2 * hop, 2 * hop + 1)]
    most = seconds // chunk * window
    found = edges + [most, most - 1] + [rng.randint(1, most) for _ in range(count)]
    return [samples for samples in found if samples > 2 * hop]


@pytest.mark.parametrize("name", ["short", "coarse", "uneven"])
def test_sounds_through_the_processor(name):
    """Windows that it cuts, and placeholders that it writes, for arrays of samples."""
    extractor, positions, seconds = SETTINGS[name]
    made = processor_of_sounds(extractor, seconds)
    model = AudioFlamingo3ForConditionalGeneration(config(positions)).model.audio_tower
    for samples in lengths(name, 40):
        encoded = made(text="<sound>", audio=[np.zeros(samples, dtype=np.float32)], sampling_rate=16_000)
        windows, bins, frames = encoded["input_features"].shape
        assert (bins, frames) == (8, 2 * positions)
        features = (encoded["input_ids"] == 2).sum().item()
        by_window = model._get_feat_extract_output_lengths(encoded["input_features_mask"].sum(-1))[1]
        assert by_window.sum() == features
        assert ours(name, samples) == (windows, features), samples


@pytest.mark.more
def test_sounds_of_minutes_by_the_mask():
    """Eight hundred lengths up to ten minutes, by the extractor's padding alone."""
    model = AudioFlamingo3ForConditionalGeneration(config(1_500)).model.audio_tower
    count = processor_of_sounds(SETTINGS["real"][0], 600)._get_audio_token_length
    for samples in lengths("real", 800):
        windows = -(-samples // 480_000)
        last = samples - (windows - 1) * 480_000
        frames = torch.tensor([3_000] * (windows - 1) + [-(-last // 160)])
        features = model._get_feat_extract_output_lengths(frames)[1].sum().item()
        assert count(frames.sum()).item() == features
        assert ours("real", samples) == (windows, features), samples


@pytest.mark.parametrize("samples", [321, 16_000, 16_001, 16_320, 16_321, 39_999, 112_000])
def test_the_whole_model_takes_them(samples):
    """A forward that compares placeholders with features, and a tower that reads as many tokens."""
    extractor, positions, seconds = SETTINGS["short"]
    encoded = processor_of_sounds(extractor, seconds)(
        text="<sound>", audio=[np.zeros(samples, dtype=np.float32)], sampling_rate=16_000
    )
    model = AudioFlamingo3ForConditionalGeneration(config(positions)).eval()
    seen = []
    model.model.audio_tower.layers[0].register_forward_hook(lambda *call: seen.append(call[2].shape[:2]))
    with torch.no_grad():
        logits = model(**encoded, use_cache=False).logits
    windows, features = ours("short", samples)
    assert (seen, logits.shape[1]) == ([(windows, positions)], features)


def test_what_would_be_cut_or_lost_is_refused():
    """The processor cuts at its limit with a warning, and writes nothing for 20 ms."""
    made = processor_of_sounds(*SETTINGS["short"][::2])

    def placeholders(samples):
        sound = np.zeros(samples, dtype=np.float32)
        return (made(text="<sound>", audio=[sound], sampling_rate=16_000)["input_ids"] == 2).sum()

    assert placeholders(112_000) == placeholders(112_001) == placeholders(200_000) == 175
    with pytest.raises(ProfileError, match="its 112001 samples .* than `max_audio_len`'s 112000"):
        ours("short", 112_001)
    assert (placeholders(320), placeholders(321)) == (0, 1)
    with pytest.raises(ProfileError, match="its 320 samples fill no token, at least 321 do"):
        ours("short", 320)


def test_the_limit_is_found_where_transformers_has_it(tmp_path):
    """In the file of the processor, which may hold the extractor too; beside a file of the extractor alone."""
    own, nested = {"max_audio_len": 90}, {"feature_extractor": {"feature_size": 8}, "max_audio_len": 60}
    (tmp_path / "processor_config.json").write_text(json.dumps(nested))
    assert settings_of_processor(tmp_path, "feature_extractor") == nested
    (tmp_path / "preprocessor_config.json").write_text(json.dumps({"feature_size": 8}))
    (tmp_path / "processor_config.json").write_text(json.dumps(own))
    assert settings_of_processor(tmp_path, "feature_extractor") == own
    (tmp_path / "processor_config.json").unlink()
    assert settings_of_processor(tmp_path, "feature_extractor") == {}


@pytest.mark.filterwarnings("ignore:At least one mel filter")
def test_a_file_that_is_not_as_profiled_is_refused(tmp_path):
    """Longer than the processor reads, or of another number of tokens; the error names it."""
    directory = write_config(tmp_path / "model", "audioflamingo3", TINY["audioflamingo3"])
    extractor = {"feature_size": 8, "chunk_length": 1, "sampling_rate": 4_000, "hop_length": 100}
    files = {"feature_extractor": extractor, "max_audio_len": 3}
    (directory / "processor_config.json").write_text(json.dumps(files))
    adapter = load_adapter(directory)

    def windows(samples, num_tiles, features):
        path = tmp_path / "a.wav"
        with wave.open(str(path), "wb") as file:
            file.setnchannels(1)
            file.setsampwidth(2)
            file.setframerate(4_000)
            file.writeframes(b"\1\0" * samples)
        grid = MediaGrid("audio", num_tiles, 0, 0, features)
        return adapter.pixels(path, "audio", (), grid).shape

    # A window has 40 frames, 20 positions, 10 tokens; of 20 frames 5 tokens.
    assert windows(10_000, 3, 25) == (3, 9, 40)
    assert windows(12_000, 3, 30) == (3, 9, 40)
    with pytest.raises(
        ProfileError, match="a.wav` has 12001 samples of sound.* at most 12000 samples are read"
    ):
        windows(12_001, 3, 30)
    with pytest.raises(ProfileError, match="a.wav` has 10000 samples of sound, 25 features, profiled as 24;"):
        windows(10_000, 3, 24)
