"""Voxtral: tokens equal mistral-common's, shapes and windows Hugging Face's processor and model."""

import json
import math
import os
import random
import re
import wave
from pathlib import Path

import numpy as np
import pytest
import torch
from tiny_families import TINY, write_config
from transformers import (
    VoxtralConfig,
    VoxtralForConditionalGeneration,
    VoxtralProcessor,
    WhisperFeatureExtractor,
)
from transformers.integrations.mistral import convert_tekken_tokenizer

from dflop import ProfileError
from dflop._native import testing
from dflop.models import load_adapter
from dflop.models.adapter import MediaGrid

pytestmark = pytest.mark.usefixtures("quiet")
TEXTS = Path(__file__).parents[2] / "fixtures" / "text"
RECORDED = json.loads((TEXTS / "voxtral.json").read_text())
SEED = int(os.environ.get("DFLOP_TEST_SEED", "20261127"))
MARKS = [("audio", "[AUDIO]", "[AUDIO]")]
CONFIG = json.dumps({"model_type": "voxtral"})
EXTRACTOR = json.dumps({"feature_size": 128})


@pytest.fixture(scope="module")
def tokenizer():
    """Of the recorded `tekken.json`, as the guide makes it."""
    found = convert_tekken_tokenizer(str(TEXTS / "voxtral_tekken.json"))
    assert found.convert_tokens_to_ids(["<s>", "[AUDIO]", "[BEGIN_AUDIO]", "[TRANSCRIBE]"]) == [1, 24, 25, 34]
    return found


@pytest.fixture
def model_dir(tmp_path, tokenizer):
    """The files of a model, without a chat template, as the hub has them."""
    tokenizer.save_pretrained(tmp_path)
    (tmp_path / "config.json").write_text(CONFIG)
    (tmp_path / "preprocessor_config.json").write_text(EXTRACTOR)
    return tmp_path


def sound_of(samples, rate=16_000):
    return testing.media_shape(CONFIG, EXTRACTOR, "{}", "audio", duration_s=samples / rate, sample_rate=rate)


def record_of(turns):
    """A sample in the form of messages, and the shapes of its sounds."""
    messages, shapes = [], []
    for turn in turns:
        content = []
        for part in turn["parts"]:
            if isinstance(part, str):
                content.append({"type": "text", "text": part})
            else:
                content.append({"type": "audio", "audio": f"{len(shapes)}.wav"})
                shapes.append([(text, count) for text, count in pieces_of(part)])
        messages.append({"role": turn["role"], "content": content})
    return json.dumps({"messages": messages}), shapes


def pieces_of(samples):
    return sound_of(samples).pieces


def expanded(runs):
    return [token for token, count in runs for _ in range(count)]


@pytest.mark.parametrize("template", ["none", "of mistral-common"])
def test_tokens_and_labels_equal_mistral_commons(model_dir, tokenizer, template):
    """By dflop's own template, which stands in for a missing one, and by that which mistral-common makes."""
    if template != "none":
        (model_dir / "chat_template.jinja").write_text((TEXTS / "voxtral_template.jinja").read_text())
    conversations = [
        own
        for own in RECORDED["conversations"]
        # mistral-common takes spaces off the end of an answer, its template does not.
        if template == "none"
        or not any(turn["parts"][0].endswith(" ") for turn in own["turns"] if turn["role"] == "assistant")
    ]
    found = testing.encode_conversations(
        str(model_dir), MARKS, [record_of(own["turns"]) for own in conversations]
    )
    num_sounds = 0
    for own, (ids, is_feature, labels) in zip(conversations, found, strict=True):
        wanted = expanded(own["ids"])
        assert ids == wanted, own["turns"]
        assert is_feature == [token == 24 for token in ids]
        # What stands between `[/INST]` and `</s>`, and that end.
        text = tokenizer.decode([label for label in labels if label != -100])
        answers = [turn["parts"][0].rstrip(" ") for turn in own["turns"] if turn["role"] == "assistant"]
        assert text == "".join(f"{answer}</s>" for answer in answers)
        num_sounds += ids.count(25)
    assert num_sounds > 40


def test_transcriptions_by_a_template_of_the_guide(model_dir):
    """A user's text is the language; `docs/families.md` has the template."""
    guide = (Path(__file__).parents[2] / "docs" / "families.md").read_text()
    (template,) = re.findall(r"```jinja\n(.*?)\n```", guide, re.DOTALL)
    (model_dir / "chat_template.jinja").write_text(template)
    samples = [
        record_of(
            [
                {"role": "user", "parts": [own["samples"], *([own["language"]] if own["language"] else [])]},
                {"role": "assistant", "parts": ["the red cup"]},
            ]
        )
        for own in RECORDED["transcriptions"]
    ]
    for own, (ids, _, labels) in zip(
        RECORDED["transcriptions"], testing.encode_conversations(str(model_dir), MARKS, samples), strict=True
    ):
        prompt = expanded(own["ids"])
        assert ids[: len(prompt)] == prompt
        assert labels == [-100] * len(prompt) + ids[len(prompt) :]
        assert ids[-1] == 2


def test_a_sound_beside_a_system_turn_is_refused(model_dir):
    """mistral-common's own words for its tokenizers before v15 are others."""
    turns = [
        {"role": "system", "parts": ["be brief"]},
        {"role": "user", "parts": [16_000]},
        {"role": "assistant", "parts": ["the cup"]},
    ]
    with pytest.raises(ProfileError, match="a sound beside a system turn"):
        testing.encode_conversations(str(model_dir), MARKS, [record_of(turns)])


def test_a_missing_tokenizer_is_an_error_that_tells_how_to_make_one(model_dir):
    """What it tells is run."""
    (model_dir / "tokenizer.json").unlink()
    (model_dir / "tekken.json").write_text((TEXTS / "voxtral_tekken.json").read_text())
    own = RECORDED["conversations"][0]
    samples = [record_of(own["turns"])]
    with pytest.raises(ProfileError, match=r"tekken.json`: there is no `tokenizer.json` beside it") as error:
        testing.encode_conversations(str(model_dir), MARKS, samples)
    (hint,) = error.value.__notes__
    exec(hint.split("`")[1], {})
    ((ids, _, _),) = testing.encode_conversations(str(model_dir), MARKS, samples)
    assert ids == expanded(own["ids"])


@pytest.mark.parametrize("rate", [8_000, 16_000, 44_100])
def test_every_window_begun_is_375_tokens(rate):
    """At the extractor's rate as recorded of mistral-common; at others by its count of samples after resampling."""
    rng = random.Random(SEED)
    print(f"DFLOP_TEST_SEED={SEED}")
    for _ in range(500):
        samples = rng.randint(1, 200 * rate)
        windows = math.ceil(math.ceil(samples * 16_000 / rate) / 480_000)
        shape = sound_of(samples, rate)
        assert shape.pieces == [("[BEGIN_AUDIO]", 0), (None, 375 * windows)]
        assert (shape.num_tiles, shape.segments) == (windows, [(windows, 1_500)])
        assert shape.parts == [(windows, 1, 375)]


@pytest.mark.filterwarnings("ignore:At least one mel filter")
@pytest.mark.parametrize("samples", [1, 15_999, 32_000, 32_001, 64_000, 100_000])
def test_windows_and_features_equal_the_processors_and_the_models(tmp_path, tokenizer, samples):
    """What the encoder reads, to the bit; how many features it makes of it; a model that takes so many places."""
    audio = {**TINY["voxtral"]["audio_config"], "max_source_positions": 100}
    content = {**TINY["voxtral"], "model_type": "voxtral", "audio_config": audio, "audio_token_id": 24}
    directory = write_config(tmp_path / "model", "voxtral", content)
    settings = {"feature_size": 8, "chunk_length": 2}
    (directory / "preprocessor_config.json").write_text(json.dumps(settings))
    values = np.random.default_rng(samples).integers(-9000, 9000, size=samples).astype(np.int16)
    # The end is quieter than the loudest frame allows.
    values[-samples // 3 :] //= 20_000
    with wave.open(str(tmp_path / "a.wav"), "wb") as file:
        file.setnchannels(1)
        file.setsampwidth(2)
        file.setframerate(16_000)
        file.writeframes(values.tobytes())
    processor = VoxtralProcessor(WhisperFeatureExtractor(**settings), tokenizer)
    options = {**VoxtralProcessor.audio_kwargs, "max_source_positions": 200, "pad_to_multiple_of": 32_000}
    wanted = processor._retrieve_input_features([values.astype(np.float32) / 32768], **options)
    shape = testing.media_shape(
        (directory / "config.json").read_text(), json.dumps(settings), "{}", "audio", duration_s=samples / 16_000,
        sample_rate=16_000,
    )  # fmt: skip
    grid = MediaGrid("audio", shape.num_tiles, 0, 0, shape.feature_tokens)
    adapter = load_adapter(directory)
    found = adapter.pixels(tmp_path / "a.wav", "audio", (), grid)
    assert torch.equal(found, wanted)
    assert shape.num_tiles == len(found)
    model = VoxtralForConditionalGeneration(VoxtralConfig.from_pretrained(directory)).eval()
    seen = []
    model.model.audio_tower.layers[0].register_forward_hook(lambda *call: seen.append(call[2].shape[:2]))
    ids = torch.tensor([[1, 25, *[24] * shape.feature_tokens]])
    with torch.no_grad():
        model(input_ids=ids, input_features=wanted, use_cache=False)
        with pytest.raises(ValueError, match="tokens do not match"):
            model(input_ids=ids[:, :-1], input_features=wanted, use_cache=False)
    assert seen[0] == (shape.num_tiles, 100)
    with pytest.raises(ProfileError, match=rf"{samples} samples of sound, .* features, profiled as 7"):
        adapter.pixels(tmp_path / "a.wav", "audio", (), MediaGrid("audio", 1, 0, 0, 7))


@pytest.mark.parametrize(
    ("field", "value", "rule"),
    [
        (
            "intermediate_size",
            100,
            "a multiple of `audio_config.hidden_size`, 32: so many tokens are a feature",
        ),
        ("max_source_positions", 22, "a multiple of 4, the tokens of a feature"),
        ("activation_dropout", 0.1, "0"),
    ],
)
def test_what_is_not_trained_is_named(tmp_path, field, value, rule):
    content = {**TINY["voxtral"], "audio_config": {**TINY["voxtral"]["audio_config"], field: value}}
    with pytest.raises(ProfileError, match=re.escape(f"`audio_config.{field}` is {value}, must be {rule}")):
        load_adapter(write_config(tmp_path, "voxtral", content))
