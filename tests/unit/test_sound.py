"""Sounds as the trainer decodes them: the samples of the file, its channels averaged, at the rate that is asked."""

from __future__ import annotations

import wave

import numpy as np
import pytest

import dflop
from dflop.models.media import MediaBytes
from dflop.models.sound import decode_sound


def write_wav(path, samples_CT, rate):
    """`samples_CT`: int16, a row a channel."""
    with wave.open(str(path), "wb") as file:
        file.setnchannels(samples_CT.shape[0])
        file.setsampwidth(2)
        file.setframerate(rate)
        file.writeframes(np.ascontiguousarray(samples_CT.T).tobytes())
    return path


def test_samples_at_their_own_rate_are_those_of_the_file(tmp_path):
    """To the bit, from a file and from bytes; two channels are averaged."""
    random = np.random.default_rng(1)
    two = random.integers(-30_000, 30_000, size=(2, 7_001)).astype(np.int16)
    path = write_wav(tmp_path / "two.wav", two, 16_000)
    expected = (two.astype(np.float32) / 32_768).mean(axis=0)
    assert np.array_equal(decode_sound(path, 16_000), expected)
    assert np.array_equal(decode_sound(MediaBytes("row 1", path.read_bytes()), 16_000), expected)
    one = write_wav(tmp_path / "one.wav", two[:1], 16_000)
    assert np.array_equal(decode_sound(one, 16_000), two[0].astype(np.float32) / 32_768)


@pytest.mark.parametrize(("rate", "count"), [(44_100, 44_100), (8_000, 4_001), (48_000, 12_345)])
def test_a_tone_at_another_rate_is_the_same_tone(tmp_path, rate, count):
    """As long as librosa and soxr count, and the same wave away from both ends."""
    seconds = np.arange(count) / rate
    tone = np.round(np.sin(2 * np.pi * 440 * seconds) * 20_000).astype(np.int16)
    found = decode_sound(write_wav(tmp_path / "tone.wav", tone[None], rate), 16_000)
    assert len(found) == -(-count * 16_000 // rate)
    expected = np.sin(2 * np.pi * 440 * np.arange(len(found)) / 16_000) * 20_000 / 32_768
    middle = slice(200, len(found) - 200)
    assert np.abs(found[middle] - expected[middle]).max() < 0.005


def test_what_holds_no_sound_is_named(tmp_path):
    path = tmp_path / "a.wav"
    path.write_bytes(b"RIFF not a sound")
    with pytest.raises(dflop.ProfileError, match=r"cannot decode `.*a\.wav`"):
        decode_sound(path, 16_000)
    with pytest.raises(FileNotFoundError):
        decode_sound(tmp_path / "missing.wav", 16_000)
