"""Conversations become the tokens and labels that Hugging Face's processors make, template by template.

The templates are those of `published_templates.py`; the tokenizer is a small byte-level BPE, trained on the
spot. The oracle is `ProcessorMixin.apply_chat_template`, with replacements of our choosing.
"""

from __future__ import annotations

import json
import random
import re
from pathlib import Path
from typing import Any

import pytest
from published_templates import LLAVA_MARKS, QWEN2, TEMPLATES
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import PreTrainedTokenizerFast, ProcessorMixin
from transformers.models.smolvlm.processing_smolvlm import DEFAULT_CHAT_TEMPLATE

from dflop._native import ProfileError
from dflop._native.testing import encode_conversations

NUM_CONVERSATIONS = 40
WITHOUT_SYSTEM = {"mistral_1"}
ONE_A_TURN = {"audioflamingo3"}
"""Those that write one medium a turn, whatever its number."""
# fmt: off
WORDS = [
    "the", "red", "cup", "is", "on", "a", "table", "where", "two", "dogs", "sleep", "near", "an", "old",
    "door;", "what", "colour", "has", "it?", "na\u00efve", "\u732b", "\U0001f642", "3", "42",
]
# fmt: on
SPECIAL = [
    *(
        "<s>",
        "</s>",
        "<unk>",
        "<|im_start|>",
        "<|im_end|>",
        "<|endoftext|>",
        "<|begin_of_text|>",
        "<|eot_id|>",
    ),
    *("<|start_header_id|>", "<|end_header_id|>", "[INST]", "[/INST]", "<image>", "<video>", "<|AUDIO|>"),
    *(
        "<|vision_start|>",
        "<|vision_end|>",
        "<|image_pad|>",
        "<|video_pad|>",
        "<|audio_bos|>",
        "<|audio_eos|>",
    ),
    *("<|vision_bos|>", "<|vision_eos|>", "<|IMAGE|>", "<|VIDEO|>"),
    *("<sound>", "<img>", "</img>", "<IMG_CONTEXT>", "<end_of_utterance>"),
    *("[gMASK]", "<sop>", "<|system|>", "<|user|>", "<|assistant|>", "<|image|>", "<|video|>"),
    *("<start_of_turn>", "<end_of_turn>", "<start_of_image>", "<end_of_image>", "<image_soft_token>"),
    *("<|begin_of_image|>", "<|end_of_image|>", "<|begin_of_video|>", "<|end_of_video|>"),
]


@pytest.fixture(scope="module")
def trained() -> str:
    """A byte-level BPE of 700 tokens, as JSON."""
    rng = random.Random(1)
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=700,
        special_tokens=SPECIAL,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator((" ".join(rng.choices(WORDS, k=20)) for _ in range(400)), trainer)
    return tokenizer.to_str()


def write_model(folder: Path, trained: str, name: str) -> None:
    template, _, _, bos, eos, adds_bos = TEMPLATES[name]
    tokenizer = Tokenizer.from_str(trained)
    byte_level = processors.ByteLevel(trim_offsets=False)
    if adds_bos:
        single = processors.TemplateProcessing(
            single=f"{bos} $A", pair=f"{bos} $A {bos} $B", special_tokens=[(bos, tokenizer.token_to_id(bos))]
        )
        tokenizer.post_processor = processors.Sequence([byte_level, single])
    else:
        tokenizer.post_processor = byte_level
    folder.mkdir(exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": bos,
        "eos_token": eos,
        "unk_token": {"__type": "AddedToken", "content": "<unk>"},
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    (folder / "chat_template.jinja").write_text(template)
    (folder / "config.json").write_text("{}")
    (folder / "preprocessor_config.json").write_text("{}")


class _Processor(ProcessorMixin):
    """transformers' own way from messages to tokens and masks, with media replaced as a test says."""

    def __init__(self, folder: Path, marks: list[tuple[str, str, str]]) -> None:
        self.tokenizer = PreTrainedTokenizerFast.from_pretrained(folder)
        self.chat_template = (folder / "chat_template.jinja").read_text()
        for kind, placeholder, _ in marks:
            setattr(self, f"{kind}_token", placeholder)
        self.image_processor = self.video_processor = self.feature_extractor = object()
        self.replacements: dict[str, list[str]] = {}

    _audio_processor = property(lambda self: type("_Rate", (), {"sampling_rate": 16000})())
    unused_input_names = property(lambda self: [])

    def _multimodal_inputs_from_conversations(self, *_):
        """As many media as there are replacements, wherever the messages place them."""
        images, videos, audio = ([0] * len(self.replacements[kind]) for kind in ("image", "video", "audio"))
        return [images or [None]], [videos or [None]], audio, {}

    def prepare_inputs_layout(self, images=None, text=None, videos=None, audio=None, **_):
        return images, [text] if isinstance(text, str) else list(text), videos, audio

    def validate_inputs(self, **_):
        pass

    def _process_images(self, images, **_):
        return {}, self.replacements["image"]

    def _process_videos(self, videos, **_):
        return {}, self.replacements["video"]

    def _process_audio(self, audio, **_):
        return {}, self.replacements["audio"]

    def _check_special_mm_tokens(self, *_args, **_kwargs):
        pass

    def encode(
        self, messages: list[dict], replacements: dict[str, list[str]]
    ) -> tuple[list[int], list[int], str]:
        """Ids, mask of the assistant's tokens, and the rendered text."""
        self.replacements = replacements
        text = self.apply_chat_template([dict(m) for m in messages])
        out = self.apply_chat_template(
            [dict(m) for m in messages],
            tokenize=True,
            return_dict=True,
            return_assistant_tokens_mask=True,
            return_tensors=None,
        )
        ids, mask = out["input_ids"], out["assistant_masks"]
        return (
            ids[0] if isinstance(ids[0], list) else ids,
            mask[0] if isinstance(mask[0], list) else mask,
            text,
        )


def words(rng: random.Random, at_least: int) -> str:
    text = rng.choice([" ", " ", " ", "\n", "  "]).join(rng.choices(WORDS, k=rng.randint(at_least, 12)))
    return rng.choice(["", "", "", " ", "\n"]) + text + rng.choice(["", "", "", " ", "\n\n"])


def conversation(
    rng: random.Random, kinds: list[str], has_system: bool, most: int = 3
) -> list[dict[str, Any]]:
    """Turns of role and parts, a part a text or the kind of a medium."""
    turns: list[dict[str, Any]] = []
    if has_system and rng.random() < 0.4:
        turns.append({"role": "system", "parts": [words(rng, 1)]})
    kind_here = rng.choice(kinds) if kinds else None
    for turn in range(rng.randint(1, 4)):
        parts = [words(rng, 1)]
        for _ in range(min(most, rng.choice([0, 1, 1, 3])) if kind_here and turn < 2 else 0):
            parts.insert(
                rng.randrange(len(parts) + 1), kind_here if rng.random() < 0.8 else rng.choice(kinds)
            )
        turns.append({"role": "user", "parts": parts})
        turns.append({"role": "assistant", "parts": [words(rng, 0) if rng.random() < 0.85 else ""]})
    return turns


def as_record(turns: list[dict], kinds: list[str]) -> dict:
    names: dict[str, list[str]] = {kind: [] for kind in kinds}
    messages = []
    for turn in turns:
        text = ""
        for part in turn["parts"]:
            if part in names:
                names[part].append(f"{len(names[part])}.bin")
                text += f"<{part}>"
            else:
                text += part
        messages.append(
            {"from": {"user": "human", "assistant": "gpt"}.get(turn["role"], "system"), "value": text}
        )
    return {"conversations": messages, **{f"{kind}s": of_kind for kind, of_kind in names.items() if of_kind}}


def as_messages(turns: list[dict], content: str, marks: list[tuple[str, str, str]]) -> list[dict]:
    placeholder = {kind: text for kind, text, _ in marks}
    messages = []
    for turn in turns:
        if content == "text" or content == "list of users" and turn["role"] != "user":
            text = "".join(placeholder.get(part, part) for part in turn["parts"])
            messages.append({"role": turn["role"], "content": text})
        else:
            parts = [{"type": p} if p in placeholder else {"type": "text", "text": p} for p in turn["parts"]]
            messages.append({"role": turn["role"], "content": parts})
    return messages


def pieces(rng: random.Random, kind: str) -> list[tuple[str | None, int]]:
    if kind == "image":
        return rng.choice(
            [[(None, rng.randint(1, 9))], [("<img>", 0), (None, 2), ("\n", 0), (None, 3), ("</img>", 0)]]
        )
    if kind == "video":
        return [piece for n in range(2) for piece in [(f"Frame{n}: ", 0), (None, 2)]]
    return [(None, rng.randint(1, 5))]


def expected_labels(
    ids: list[int], turns: list[dict], tokenizer, encoded_text: str, *, trims: bool
) -> list[int]:
    """Labels where the template marks none: each answer, found in order, and the special token after it."""
    encoding = tokenizer(encoded_text, add_special_tokens=False, return_offsets_mapping=True)
    offset_of = encoding["offset_mapping"]
    shift = len(ids) - len(offset_of)
    assert ids[shift:] == encoding["input_ids"]
    labels, at = [-100] * len(ids), 0
    special = set(tokenizer.convert_tokens_to_ids(SPECIAL))
    for turn in turns:
        text = "".join(turn["parts"])
        text = text.strip() if trims else text
        if turn["role"] != "assistant":
            continue
        # Only templates that write contents as they are come here, and each answer ends at a special token.
        end = re.compile(
            re.escape(text)
            + r"(?=<\|im_end\|>|</s>|<\|eot_id\|>|<end_of_utterance>|<\|user\|>|<end_of_turn>|$)"
        )
        while True:
            found = end.search(encoded_text, at)
            assert found is not None
            header = encoded_text[: found.start()]
            if re.search(
                r"(assistant\n|assistant<\|end_header_id\|>\n\n|ASSISTANT: |Assistant: |\[/INST\] |<\|assistant\|>\n|<start_of_turn>model\n)$",
                header,
            ):
                break
            at = found.start() + 1
        for k, (start, stop) in enumerate(offset_of):
            is_end = start == found.end() and ids[shift + k] in special
            if (start < found.end() and stop > found.start()) or is_end:
                labels[shift + k] = ids[shift + k]
        at = found.end() + 1
    return labels


# What Qwen3 writes of an answer depends on the answers behind it: it has a test of its own.
@pytest.mark.parametrize("name", [name for name in TEMPLATES if name != "qwen3"])
def test_tokens_and_labels_equal_hugging_faces(name, trained, tmp_path):
    template, content, marks, *_ = TEMPLATES[name]
    write_model(tmp_path, trained, name)
    processor = _Processor(tmp_path, marks)
    kinds = [kind for kind, _, _ in marks]
    feature_of = {kind: token for kind, _, token in marks}
    rng = random.Random(name)
    samples, expected = [], []
    for _ in range(NUM_CONVERSATIONS):
        most = 1 if name in ONE_A_TURN else 3
        turns = conversation(rng, kinds, has_system=name not in WITHOUT_SYSTEM, most=most)
        media = [part for turn in turns for part in turn["parts"] if part in kinds]
        shapes = [pieces(rng, kind) for kind in media]
        replaced: dict[str, list[str]] = {kind: [] for kind in ("image", "video", "audio")}
        for kind, shape in zip(media, shapes, strict=True):
            replaced[kind].append("".join(text or feature_of[kind] * count for text, count in shape))
        samples.append((json.dumps(as_record(turns, kinds)), shapes))
        messages = as_messages(turns, content, marks)
        expected.append((turns, *processor.encode(messages, replaced), replaced))
    encoded = encode_conversations(str(tmp_path), marks, samples)
    tokenizer = processor.tokenizer
    features = set(tokenizer.convert_tokens_to_ids(list(feature_of.values())))
    num_labels = 0
    for (ids, feature_mask, labels), (turns, hf_ids, hf_mask, text, replaced) in zip(
        encoded, expected, strict=True
    ):
        assert tokenizer.decode(ids) == tokenizer.decode(hf_ids)
        assert ids == hf_ids
        assert feature_mask == [token in features for token in ids]
        if "endgeneration" in template:
            assert labels == [token if mask else -100 for token, mask in zip(hf_ids, hf_mask, strict=True)]
        else:
            full = processor.get_text_with_replacements(
                [text], *(replaced[kind] for kind in ("image", "video", "audio"))
            )[0][0]
            assert labels == expected_labels(ids, turns, tokenizer, full, trims="trim" in template)
        num_labels += sum(label != -100 for label in labels)
    assert num_labels > NUM_CONVERSATIONS


@pytest.mark.parametrize(
    "name", [name for name in TEMPLATES if "image" in [k for k, *_ in TEMPLATES[name][2]]]
)
def test_documents_are_tokens_of_their_text_to_the_end(name, trained, tmp_path):
    """Each image as the template writes it in a question; all else carries loss but the first token."""
    _, content, marks, *_ = TEMPLATES[name]
    write_model(tmp_path, trained, name)
    processor = _Processor(tmp_path, marks)
    tokenizer = processor.tokenizer
    (placeholder, feature) = next((text, token) for kind, text, token in marks if kind == "image")
    written = placeholder
    if content != "text":
        question = [{"type": "text", "text": "one"}, {"type": "image"}, {"type": "text", "text": "two"}]
        processor.replacements = {"image": [placeholder], "video": [], "audio": []}
        found = processor.apply_chat_template([{"role": "user", "content": question}])
        around = re.search("one(.*)two", found, re.DOTALL)
        written = around[1] if around and placeholder in around[1] else placeholder
    rng = random.Random(name)
    samples, expected = [], []
    for _ in range(NUM_CONVERSATIONS // 4):
        places = [words(rng, 1) if rng.random() < 0.6 else None for _ in range(rng.randint(1, 5))]
        places.append(words(rng, 1))
        shapes = [pieces(rng, "image") for text in places if text is None]
        record = {"texts": places, "images": [None if text else "a.bin" for text in places]}
        samples.append((json.dumps(record), shapes))
        given = iter(shapes)
        full, texts = "", []
        for text in places:
            if text is None:
                medium = "".join(piece or feature * count for piece, count in next(given))
                full += written.replace(placeholder, medium)
            else:
                texts.append((len(full), len(full) + len(text)))
                full += text
        expected.append((full, texts))
    for (ids, _, labels), (full, texts) in zip(
        encode_conversations(str(tmp_path), marks, samples), expected, strict=True
    ):
        encoding = tokenizer(full, return_offsets_mapping=True)
        assert ids == [*encoding["input_ids"], tokenizer.eos_token_id]
        carries = [
            any(start < end_of and end > begin for begin, end_of in texts)
            for start, end in encoding["offset_mapping"]
        ]
        carries[0] = False
        assert [label != -100 for label in labels] == [*carries, True]


def test_a_sound_that_the_template_does_not_write_is_refused(trained, tmp_path):
    """Audio Flamingo 3's writes one a turn."""
    write_model(tmp_path, trained, "audioflamingo3")
    turns = [{"from": "human", "value": "<audio><audio>who speaks?"}, {"from": "gpt", "value": "two dogs"}]
    sample = json.dumps({"conversations": turns, "audios": ["0.bin", "1.bin"]})
    marks = TEMPLATES["audioflamingo3"][2]
    with pytest.raises(ProfileError, match="writes 1 `<sound>`, but the sample has 2 under audio"):
        encode_conversations(str(tmp_path), marks, [(sample, [[(None, 2)], [(None, 3)]])])


def test_answers_of_a_template_that_trims(trained, tmp_path):
    write_model(tmp_path, trained, "llama3")
    turns = [{"from": "human", "value": " the cup \n"}, {"from": "gpt", "value": "\n is red  "}]
    ((ids, _, labels),) = encode_conversations(
        str(tmp_path), LLAVA_MARKS, [(json.dumps({"conversations": turns}), [])]
    )
    tokenizer = PreTrainedTokenizerFast.from_pretrained(tmp_path)
    assert tokenizer.decode([label for label in labels if label != -100]) == "is red<|eot_id|>"
    assert tokenizer.decode(ids).startswith(
        "<|begin_of_text|><|start_header_id|>user<|end_header_id|>\n\nthe cup<|eot"
    )
    assert ids.count(tokenizer.bos_token_id) == 1


def test_a_template_that_writes_thoughts_of_the_last_answer_alone(trained, tmp_path):
    """Earlier answers are found where they stand without their thoughts; what the template adds has no label."""
    write_model(tmp_path, trained, "qwen3")
    turns = [
        {"from": "human", "value": "what is red?"},
        {"from": "gpt", "value": "the cup"},
        {"from": "human", "value": "what sleeps?"},
        {"from": "gpt", "value": "two dogs"},
    ]
    ((ids, _, labels),) = encode_conversations(
        str(tmp_path), LLAVA_MARKS, [(json.dumps({"conversations": turns}), [])]
    )
    tokenizer = PreTrainedTokenizerFast.from_pretrained(tmp_path)
    assert tokenizer.decode(ids).endswith(
        "<|im_start|>assistant\n<think>\n\n</think>\n\ntwo dogs<|im_end|>\n"
    )
    assert (
        tokenizer.decode([label for label in labels if label != -100])
        == "the cup<|im_end|>two dogs<|im_end|>"
    )


def test_smolvlm_writes_videos_by_its_processors_template(trained, tmp_path):
    """Templates published before there were videos have none; `SmolVLMProcessor` takes its own then."""
    write_model(tmp_path, trained, "smolvlm")
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "smolvlm"}))
    template, _, marks, *_ = TEMPLATES["smolvlm"]
    branch = "{% elif part['type'] == 'video' %}{{ '<video>' }}"
    assert branch in template
    (tmp_path / "chat_template.jinja").write_text(template.replace(branch, ""))
    record = {
        "conversations": [
            {"from": "human", "value": "<video>what sleeps?"},
            {"from": "gpt", "value": "two dogs"},
            {"from": "human", "value": "where?"},
            {"from": "gpt", "value": "on the table"},
        ],
        "videos": ["0.mp4"],
    }
    frames = [("Frame", 0), (None, 3)]
    ((ids, is_feature, labels),) = encode_conversations(
        str(tmp_path), marks, [(json.dumps(record), [frames])]
    )
    tokenizer = PreTrainedTokenizerFast.from_pretrained(tmp_path)
    parts = [
        [{"type": "video"}, {"type": "text", "text": "what sleeps?"}],
        *([{"type": "text", "text": text}] for text in ("two dogs", "where?", "on the table")),
    ]
    messages = [
        {"role": role, "content": part} for role, part in zip(["user", "assistant"] * 2, parts, strict=True)
    ]
    text = tokenizer.apply_chat_template(messages, chat_template=DEFAULT_CHAT_TEMPLATE, tokenize=False)
    assert "<video>" in text
    assert ids == tokenizer(text.replace("<video>", "Frame" + 3 * "<image>"))["input_ids"]
    assert sum(is_feature) == 3
    answers = tokenizer.decode([label for label in labels if label != -100])
    # The space behind the colon is in one token with the word behind it.
    assert answers == " two dogs<end_of_utterance> on the table<end_of_utterance>"


def test_a_text_without_bos_gets_it(trained, tmp_path):
    """Vicuna's template writes none: the tokenizer adds it, and it carries no loss."""
    write_model(tmp_path, trained, "vicuna")
    turns = [{"from": "human", "value": "what"}, {"from": "gpt", "value": "a cup"}]
    ((ids, _, labels),) = encode_conversations(
        str(tmp_path), LLAVA_MARKS, [(json.dumps({"conversations": turns}), [])]
    )
    tokenizer = PreTrainedTokenizerFast.from_pretrained(tmp_path)
    assert tokenizer.decode(ids) == "<s>USER: what ASSISTANT: a cup</s>"
    assert labels[0] == -100


def test_no_template_is_an_error_with_a_hint(trained, tmp_path):
    write_model(tmp_path, trained, "qwen2")
    (tmp_path / "chat_template.jinja").unlink()
    with pytest.raises(ProfileError, match="has no chat template"):
        encode_conversations(str(tmp_path), LLAVA_MARKS, [])


@pytest.mark.parametrize("where", ["chat_template.json", "tokenizer_config.json", "list"])
def test_a_template_may_stand_in_several_files(where, trained, tmp_path):
    write_model(tmp_path, trained, "qwen2")
    sample = (json.dumps({"question": "what", "answer": "a cup"}), [])
    expected = encode_conversations(str(tmp_path), LLAVA_MARKS, [sample])
    (tmp_path / "chat_template.jinja").unlink()
    if where == "chat_template.json":
        (tmp_path / where).write_text(json.dumps({"chat_template": QWEN2}))
    else:
        settings = json.loads((tmp_path / "tokenizer_config.json").read_text())
        named = [{"name": "tool_use", "template": "x"}, {"name": "default", "template": QWEN2}]
        settings["chat_template"] = QWEN2 if where == "tokenizer_config.json" else named
        (tmp_path / "tokenizer_config.json").write_text(json.dumps(settings))
    assert encode_conversations(str(tmp_path), LLAVA_MARKS, [sample]) == expected
