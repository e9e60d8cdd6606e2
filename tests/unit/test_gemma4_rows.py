"""Rows for a model like Gemma 4 E2B: `dflop profile data` reads its sounds as its processor does; what rows cost."""

from __future__ import annotations

import copy
import wave

import datasets
import numpy as np
import pytest
import tiny_gemma4
import torch
from PIL import Image
from processor_dirs import write
from transformers import AutoConfig, AutoModelForImageTextToText

import dflop
from dflop.integrations import cost_of_parameters, costs_of_rows

pytestmark = pytest.mark.usefixtures("quiet")
RATE = 16_000
NAMED = {f"{kind}_token": f"<|{kind}|>" for kind in ("image", "audio")} | {
    "boi_token": "<|image>", "eoi_token": "<image|>", "boa_token": "<|audio>", "eoa_token": "<audio|>",
}  # fmt: skip


@pytest.fixture(scope="module")
def small(tmp_path_factory):
    """A whole processor and its directory."""
    folder = tmp_path_factory.mktemp("gemma4")
    patches = {"patch_size": 4, "pooling_kernel_size": 2, "max_soft_tokens": 70}
    processor = write(
        folder,
        "gemma4",
        copy.deepcopy(tiny_gemma4.SMALL),
        tokens=["<|video|>"],
        named=NAMED,
        marks={"image": "<|image|>", "audio": "<|audio|>"},
        ids={"image_token_id": "<|image|>", "audio_token_id": "<|audio|>", "video_token_id": "<|video|>"},
        parts={
            "image_processor": patches,
            "video_processor": patches,
            "feature_extractor": {"feature_size": tiny_gemma4.BINS},
        },
    )
    return processor, folder


def sound(path, num_samples):
    with wave.open(str(path), "wb") as file:
        file.setnchannels(1)
        file.setsampwidth(2)
        file.setframerate(RATE)
        file.writeframes(np.zeros(num_samples, dtype=np.int16).tobytes())
    return str(path)


def test_a_profile_has_the_tokens_of_the_processor(small, tmp_path):
    """Of rows with text, a sound, several beside a picture; a cost by the parameters knows them too."""
    processor, folder = small
    media = [[], [5_000], [161, 40_000]]
    rows, expected = [], []
    for index, lengths in enumerate(media):
        paths = [sound(tmp_path / f"{index}-{k}.wav", length) for k, length in enumerate(lengths)]
        pictures = [Image.new("RGB", (70, 60))] * (len(lengths) // 2)
        parts = [{"type": "image", "text": None}] * len(pictures)
        parts += [*[{"type": "audio", "text": None}] * len(paths), {"type": "text", "text": "what?"}]
        answer = [{"type": "text", "text": "a house"}]
        messages = [{"role": "user", "content": parts}, {"role": "assistant", "content": answer}]
        rows.append({"messages": messages, "images": pictures, "audios": paths})
        text = processor.apply_chat_template(messages, tokenize=False)
        # As transformers' processor is called; a sound alone, so that none is padded to another.
        given = processor(
            text=text,
            images=pictures or None,
            audio=[np.zeros(length, dtype=np.float32) for length in lengths] or None,
        )
        expected.append(len(given["input_ids"][0]))
    features = datasets.Features(
        messages=[{"role": datasets.Value("string"), "content": [{"type": datasets.Value("string"), "text": datasets.Value("string")}]}],
        images=datasets.List(datasets.Image()),
        audios=datasets.List(datasets.Value("string")),
    )  # fmt: skip
    found = dflop.costs(
        datasets.Dataset.from_list(rows, features=features), model_dir=folder, cost=lambda sizes: sizes
    )
    assert found.num_bad == 0
    assert list(found.tokens) == expected


def test_rows_of_tokens_cost_what_each_encoder_does():
    """A feature of a picture is four patches of one encoder, a feature of a sound a token of the other."""
    config = AutoConfig.for_model("gemma4", **copy.deepcopy(tiny_gemma4.SMALL))
    with torch.device("meta"):
        model = AutoModelForImageTextToText.from_config(config)
    rows = [
        [1, 2, 3],
        [1, *[tiny_gemma4.IMAGE] * 6, 2],
        [*[tiny_gemma4.SOUND] * 5, 7],
        [tiny_gemma4.SOUND, tiny_gemma4.IMAGE],
    ]
    cost = cost_of_parameters(model)
    assert cost.sound_token not in (None, cost.encoder_token)
    expected = dflop.costs(
        [
            (
                4 * ids.count(tiny_gemma4.IMAGE) * cost.encoder_token
                + ids.count(tiny_gemma4.SOUND) * cost.sound_token,
                cost((0, len(ids)))[1],
            )
            for ids in rows
        ]
    )
    found = costs_of_rows([{"input_ids": ids} for ids in rows], model)
    assert list(found.encoder_ns) == pytest.approx(list(expected.encoder_ns), rel=1e-8)
    assert list(found.llm_ns) == list(expected.llm_ns)
