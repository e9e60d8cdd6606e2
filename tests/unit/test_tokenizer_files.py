"""A tokenizer is made of several files: the same tokens as transformers makes of them, or an error that names the setting."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from published_templates import LLAVA_MARKS, QWEN2
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import AutoTokenizer

from dflop._native import ProfileError
from dflop._native.testing import encode_conversations

SAID = "<think>a <tool> b</think> [PAD] <extra>  <wide>  c"


@pytest.fixture
def folder(tmp_path) -> Path:
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={letter: k for k, letter in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<|im_start|>", "<|im_end|>", "<image>"])
    tokenizer.add_tokens([AddedToken("<tool>", normalized=False)])
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    write(tmp_path, "tokenizer_config.json", {"tokenizer_class": "PreTrainedTokenizerFast"})
    (tmp_path / "chat_template.jinja").write_text(QWEN2)
    write(tmp_path, "config.json", {})
    write(tmp_path, "preprocessor_config.json", {})
    return tmp_path


def write(folder: Path, name: str, document: dict) -> None:
    (folder / name).write_text(json.dumps(document))


def add(folder: Path, name: str, more: dict) -> None:
    path = folder / name
    write(folder, name, {**(json.loads(path.read_text()) if path.exists() else {}), **more})


def encode(folder: Path, said: str = SAID) -> list[int]:
    record = {"messages": [{"role": "user", "content": said}]}
    ((ids, _, _),) = encode_conversations(str(folder), LLAVA_MARKS, [(json.dumps(record), [])])
    return ids


def token(content: str, **flags: bool) -> dict:
    return {
        "content": content,
        "lstrip": False,
        "normalized": False,
        "rstrip": False,
        "single_word": False,
        **flags,
    }


FILES: dict[str, dict[str, dict]] = {
    "named": {
        "tokenizer_config.json": {"pad_token": "[PAD]", "extra_special_tokens": {"think_token": "<think>"}}
    },
    "listed": {"tokenizer_config.json": {"additional_special_tokens": ["<think>", "<extra>"]}},
    "decoder": {
        "tokenizer_config.json": {
            "pad_token": "[PAD]",
            "added_tokens_decoder": {
                "900": token("</think>"),
                "263": token("<think>", special=True),
                # The flags of the configuration go before those of `tokenizer.json`.
                "259": token("<tool>", rstrip=True, lstrip=True),
                "264": token("<wide>", rstrip=True, special=True),
            },
        }
    },
    "older": {
        "added_tokens.json": {"</think>": 261, "<think>": 260, "<tool>": 259},
        "special_tokens_map.json": {"pad_token": token("[PAD]", lstrip=True), "eos_token": "<think>"},
    },
}


@pytest.mark.parametrize("files", FILES)
def test_tokens_that_stand_beside_tokenizer_json(files, folder):
    plain = encode(folder)
    for name, more in FILES[files].items():
        add(folder, name, more)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    expected = tokenizer.apply_chat_template([{"role": "user", "content": SAID}], return_dict=False)
    assert encode(folder) == expected
    assert len(expected) < len(plain)


def test_a_token_without_an_embedding_is_refused_where_a_text_holds_it(folder):
    add(
        folder,
        "tokenizer_config.json",
        {"pad_token": "[PAD]", "extra_special_tokens": {"think_token": "<think>"}},
    )
    # `[PAD]` is token 260, the last one.
    write(folder, "config.json", {"vocab_size": 261})
    assert encode(folder, "[PAD] a")[-4:]
    with pytest.raises(ProfileError, match="its text holds `<think>`, a token that the model's files name"):
        encode(folder)


CUTS: dict[str, tuple[dict[str, dict], str]] = {
    "truncation": (
        {
            "tokenizer.json": {
                "truncation": {
                    "direction": "Right",
                    "max_length": 50,
                    "strategy": "LongestFirst",
                    "stride": 0,
                }
            }
        },
        "`truncation.max_length` of tokenizer.json",
    ),
    "max_length": ({"tokenizer_config.json": {"max_length": 50}}, "`max_length` of tokenizer_config.json"),
    "model_max_length": (
        {"tokenizer_config.json": {"truncation": True, "model_max_length": 50}},
        "`truncation` with `model_max_length` of tokenizer_config.json",
    ),
    "padding": (
        {
            "tokenizer.json": {
                "padding": {
                    "strategy": {"Fixed": 50},
                    "direction": "Right",
                    "pad_to_multiple_of": None,
                    "pad_id": 0,
                    "pad_type_id": 0,
                    "pad_token": "a",
                }
            }
        },
        "`padding.strategy.Fixed` of tokenizer.json",
    ),
}


@pytest.mark.parametrize("cut", CUTS)
def test_a_sample_that_the_processor_would_cut_is_refused(cut, folder):
    files, setting = CUTS[cut]
    whole = encode(folder)
    for name, more in files.items():
        add(folder, name, more)
    with pytest.raises(
        ProfileError, match=f"it has {len(whole)} tokens, and {setting} lets the processor cut it to 50"
    ):
        encode(folder)
    assert len(encode(folder, "a")) < 50


@pytest.mark.parametrize(
    "settings", [{"max_length": None}, {"max_length": 50, "truncation": False}, {"model_max_length": 20}]
)
def test_settings_that_cut_nothing(settings, folder):
    whole = encode(folder)
    add(folder, "tokenizer_config.json", settings)
    assert encode(folder) == whole


def test_special_tokens_that_would_be_split_are_refused(folder):
    add(folder, "tokenizer_config.json", {"split_special_tokens": True})
    with pytest.raises(ProfileError, match="`split_special_tokens` is true, must be false"):
        encode(folder)


@pytest.mark.parametrize("field", ["reasoning_content", "name"])
def test_a_field_of_a_turn_that_the_template_reads_is_written(field, folder):
    turn = {"role": "user", "content": "x", field: "thinks"}
    sample = (json.dumps({"messages": [turn]}), [])
    # A template that does not read it writes the same with and without it.
    ((ids, _, _),) = encode_conversations(str(folder), LLAVA_MARKS, [sample])
    assert ids == encode(folder, "x")
    (folder / "chat_template.jinja").write_text(QWEN2 + "{{ messages[0]." + field + " }}")
    ((more, _, _),) = encode_conversations(str(folder), LLAVA_MARKS, [sample])
    (folder / "chat_template.jinja").write_text(QWEN2 + "thinks")
    ((expected, _, _),) = encode_conversations(str(folder), LLAVA_MARKS, [sample])
    assert more == expected
    assert more != ids
