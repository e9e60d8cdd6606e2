"""Conversations with tools and thoughts become what transformers writes of them, template by template.

The templates are those that TRL ships, among them the published ones of Qwen3-VL, Qwen3.5, LFM2.5-VL and GLM. TRL marks
the answers in copies of some of them (`_training`): these are the oracle of the labels.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, cast

import pytest
import trl
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers.utils.chat_template_utils import render_jinja_template

from dflop._native import ProfileError
from dflop._native.testing import encode_conversations

FOLDER = Path(trl.__file__).parent / "chat_templates"
CALLING = ["qwen2_5", "qwen3", "qwen3_instruct_2507", "qwen3_vl", "qwen3_5_think", "qwen3_6", "glm4moe"]
CALLING += ["lfm2_v2", "lfm2_2_5", "lfm2_2_5_v2", "lfm2_2_5_vl", "llama3_1", "nemotron_3_nano", "gemma4_v2"]
THINKING = [*CALLING, "gemma4", "gemma4_v5", "deepseek_r1_distill", "qwen2_5_vl", "gemma3", "llama3"]
MARKED_ALIKE = {"qwen2_5", "qwen3_instruct_2507", "qwen3_vl", "lfm2_v2", "qwen2_5_vl", "gemma3", "llama3"}
"""TRL's copies write the same text as the published template, and mark all of an answer."""
SPECIAL = [
    "<s>",
    "</s>",
    "<unk>",
    "<|im_start|>",
    "<|im_end|>",
    "<|eot_id|>",
    "<end_of_turn>",
    "<|image_pad|>",
]
SPECIAL += ["<|start|>", "<|call|>", "<|return|>", "<|end|>"]
SPECIAL += ["<|vision_start|>", "<|vision_end|>", "<turn|>", "<|user|>", "<|assistant|>", "<|observation|>"]
TOOL = {
    "type": "function",
    "function": {
        "name": "look",
        "description": "zooms in",
        "parameters": {
            "type": "object",
            "properties": {"at": {"type": "array", "description": "where"}},
            "required": ["at"],
        },
    },
}
SPECIAL_TOKENS: dict[str, Any] = {"bos_token": "<s>", "eos_token": "</s>"}


def call(arguments: dict[str, Any]) -> dict[str, Any]:
    return {"id": "abcdefghi", "type": "function", "function": {"name": "look", "arguments": arguments}}


def answer(content: str, **more: Any) -> dict[str, Any]:
    return {"role": "assistant", "content": content, **more}


def said_by_tool(content: Any) -> dict[str, Any]:
    return {"role": "tool", "tool_call_id": "abcdefghi", "name": "look", "content": content}


ASKED = {"role": "user", "content": "where is it?"}
ASKED_AGAIN = {"role": "user", "content": "and now?"}
CALLS = [
    {"role": "system", "content": "be calm"},
    ASKED,
    answer("I look", tool_calls=[call({"at": [3, "\u00e9 x", 1e-5]})]),
    said_by_tool("a box"),
    answer("it is there"),
    ASKED_AGAIN,
    answer("", tool_calls=[call({"at": [4]})]),
    said_by_tool("nothing"),
    answer("it is gone"),
]
THOUGHTS = [
    ASKED,
    answer("there", reasoning_content="old thought"),
    ASKED_AGAIN,
    answer("gone", reasoning_content=" new thought\n"),
]
BOTH = [
    *THOUGHTS[:3],
    answer("", reasoning_content="so I look", tool_calls=[call({"at": [4]})]),
    said_by_tool("a box"),
    THOUGHTS[3],
]
INLINE = [
    ASKED,
    answer("<think>\nold thought\n</think>\n\nthere"),
    ASKED_AGAIN,
    answer("<think>\nnew thought\n</think>\n\ngone"),
]
RECORDS: dict[str, dict[str, Any]] = {
    "calls": {"messages": CALLS, "tools": [TOOL]},
    "both": {"messages": BOTH, "tools": [TOOL]},
    "thoughts": {"messages": THOUGHTS},
    "inline": {"messages": INLINE},
}


def template(name: str) -> str:
    return (FOLDER / f"{name}.jinja").read_text()


def rendered(name: str, record: dict[str, Any], *, marks: bool = False) -> tuple[str, list[str]]:
    """What transformers writes, and what the template marks as answers."""
    texts, spans = cast("Any", render_jinja_template)(
        [record["messages"]],
        tools=record.get("tools"),
        chat_template=template(name),
        return_assistant_tokens_mask=marks,
        **SPECIAL_TOKENS,
    )
    return texts[0], [texts[0][start:end] for start, end in spans[0]] if marks else []


class Model:
    """A model directory with a template, and its tokenizer."""

    def __init__(self, folder: Path, source: str) -> None:
        self.folder = folder
        self.tokenizer = Tokenizer(models.BPE())
        self.tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        self.tokenizer.decoder = decoders.ByteLevel()
        alphabet = pre_tokenizers.ByteLevel.alphabet()
        size = len(alphabet) + len(SPECIAL)
        trainer = trainers.BpeTrainer(
            vocab_size=size, special_tokens=SPECIAL, initial_alphabet=alphabet, show_progress=False
        )
        self.tokenizer.train_from_iterator([], trainer)
        self.tokenizer.save(str(folder / "tokenizer.json"))
        settings = {"tokenizer_class": "PreTrainedTokenizerFast", **SPECIAL_TOKENS}
        (folder / "tokenizer_config.json").write_text(json.dumps(settings))
        (folder / "chat_template.jinja").write_text(source)
        for name in ("config.json", "preprocessor_config.json"):
            (folder / name).write_text("{}")

    def encoded(
        self,
        record: dict[str, Any],
        marks: list[tuple[str, str, str]] | None = None,
        shapes: list[Any] | None = None,
    ) -> tuple[str, list[str]]:
        """The text that dflop makes of a record, and the pieces of it that carry loss."""
        samples = [(json.dumps(record), shapes or [])]
        ((ids, _, labels),) = encode_conversations(str(self.folder), marks or [], samples)
        pieces, piece = [], []
        for token, label in [*zip(ids, labels, strict=True), (0, -100)]:
            if label != -100:
                piece.append(token)
            elif piece:
                pieces.append(self.tokenizer.decode(piece, skip_special_tokens=False))
                piece = []
        return self.tokenizer.decode(ids, skip_special_tokens=False), pieces


CASES = [(name, kind) for kind in ("calls", "both") for name in CALLING]
CASES += [(name, kind) for kind in ("thoughts", "inline") for name in THINKING]


@pytest.mark.parametrize(("name", "kind"), CASES)
def test_the_text_is_transformers_and_answers_alone_carry_loss(name, kind, tmp_path):
    record = RECORDS[kind]
    text, found = Model(tmp_path, template(name)).encoded(record)
    expected, _ = rendered(name, record)
    assert text == expected
    learnt = "".join(found)
    for turn in record["messages"]:
        content = turn["content"]
        if turn["role"] == "assistant":
            # A thought within the content is written with it, or taken out of earlier answers. Llama 3.1 leaves out what is
            # said beside a call.
            words = content.split("</think>")[-1].strip()
            assert words in learnt or words not in expected
            for one in turn.get("tool_calls", []):
                assert one["function"]["name"] in learnt
        else:
            assert content not in learnt
    if "new thought" in expected:
        assert "new thought" in learnt
    assert ("old thought" in learnt) == ("old thought" in expected)


@pytest.mark.parametrize(("name", "kind"), [case for case in CASES if case[0] in MARKED_ALIKE])
def test_labels_are_where_trl_marks_answers(name, kind, tmp_path):
    record = RECORDS[kind]
    _, found = Model(tmp_path, template(name)).encoded(record)
    text, marked = rendered(f"{name}_training", record, marks=True)
    assert text == rendered(name, record)[0]
    # TRL also marks the line breaks before and behind an answer of some.
    assert [piece.strip("\n") for piece in found] == [piece.strip("\n") for piece in marked]


@pytest.mark.parametrize("name", ["qwen3_vl", "qwen3_instruct_2507", "qwen2_5", "lfm2_v2"])
@pytest.mark.parametrize("content", ["there\n", "\n\nthere \n", "<think>\nhm\n</think>\n\nthere\n\n"])
def test_spaces_at_the_ends_of_an_answer_keep_its_end(name, content, tmp_path):
    record = {"messages": [ASKED, answer(content), ASKED_AGAIN, answer(content, reasoning_content="so")]}
    text, found = Model(tmp_path, template(name)).encoded(record)
    expected, marked = rendered(f"{name}_training", record, marks=True)
    assert text == expected
    assert [piece.strip("\n") for piece in found] == [piece.strip("\n") for piece in marked]
    assert all(piece.endswith("<|im_end|>") for piece in found)


def test_a_template_that_names_the_function_where_the_tool_speaks(tmp_path):
    """gpt-oss: the tool's turn carries no loss, the arguments of the call do."""
    dated = template("gptoss").replace('strftime_now("%Y-%m-%d")', '"2026-11-30"')
    (tmp_path / "marked").mkdir()
    training = (FOLDER / "gptoss_training.jinja").read_text()
    training = training.replace('strftime_now("%Y-%m-%d")', '"2026-11-30"')
    for end in (3, 4, 5):
        messages = [ASKED, answer("", tool_calls=[call({"at": [1]})]), said_by_tool("a box"), answer("there")]
        record = {"messages": [*messages, ASKED_AGAIN][:end], "tools": [TOOL]}
        if end == 3:
            record["messages"][2]["content"] = ""
        text, found = Model(tmp_path, dated).encoded(record)
        texts, spans = cast("Any", render_jinja_template)(
            [record["messages"]],
            tools=record["tools"],
            chat_template=training,
            return_assistant_tokens_mask=True,
            **SPECIAL_TOKENS,
        )
        assert text == texts[0]
        marked = [texts[0][start:stop] for start, stop in spans[0]]
        # TRL's copy marks the header too.
        assert found[0] == marked[0].removeprefix("<|start|>assistant")
        assert len(found) == len(marked)


def test_a_tool_may_show_a_picture(tmp_path):
    """Qwen3-VL's template writes it between the tags of the response."""
    model = Model(tmp_path, template("qwen3_vl"))
    shown = [{"type": "text", "text": "closer: "}, {"type": "image"}]
    record = {"messages": [ASKED, *CALLS[2:3], said_by_tool(shown), CALLS[4]], "tools": [TOOL]}
    marks = [("image", "<|image_pad|>", "<|image_pad|>")]
    text, found = model.encoded({**record, "images": ["a.png"]}, marks, [[(None, 3)]])
    assert text == rendered("qwen3_vl", record)[0].replace("<|image_pad|>", "<|image_pad|>" * 3)
    assert [piece.split("\n")[0] for piece in found] == ["I look", "it is there<|im_end|>"]


def test_other_names_of_thoughts_are_transformers(tmp_path):
    """`AutoTokenizer` gives `reasoning` and `thinking` to templates under the names that they read."""
    model = Model(tmp_path, template("qwen3"))
    for name in ("reasoning_content", "thinking", "reasoning"):
        record = {"messages": [ASKED, answer("there", **{name: "so"})]}
        text, found = model.encoded(record)
        assert text == rendered("qwen3", record)[0]
        assert found == ["<think>\nso\n</think>\n\nthere<|im_end|>"]


def test_datasets_of_llama_factory_are_those_of_openai(tmp_path):
    model = Model(tmp_path, template("qwen3_vl"))
    arguments = {"at": [3, 4.0]}
    openai = {
        "tools": [TOOL],
        "messages": [ASKED, answer("", tool_calls=[call(arguments)]), said_by_tool("a box"), answer("there")],
    }
    sharegpt = {
        "tools": json.dumps([TOOL["function"]]),
        "conversations": [
            {"from": "human", "value": ASKED["content"]},
            {"from": "function_call", "value": json.dumps({"name": "look", "arguments": arguments})},
            {"from": "observation", "value": "a box"},
            {"from": "gpt", "value": "there"},
        ],
    }
    assert model.encoded(sharegpt) == model.encoded(openai)


def test_a_template_of_tools_beside_the_default_is_refused(tmp_path):
    """`AutoTokenizer` takes it where there are tools; dflop does not."""
    model = Model(tmp_path, template("qwen3"))
    (tmp_path / "additional_chat_templates").mkdir()
    (tmp_path / "additional_chat_templates" / "tool_use.jinja").write_text("{{ tools }}")
    model.encoded(RECORDS["thoughts"])
    with pytest.raises(ProfileError, match="a chat template of its own for these \\(`tool_use`\\)"):
        model.encoded(RECORDS["calls"])


@pytest.mark.parametrize("name", ["gemma4", "gemma4_v4", "gemma4_v5"])
def test_gemma_4_goes_on_in_the_same_turn_after_a_tools_response(name, tmp_path):
    """The response carries no loss; that the model asks for it, as the end of its call, does."""
    text, found = Model(tmp_path, template(name)).encoded(RECORDS["both"])
    assert text == rendered(name, RECORDS["both"])[0]
    calling, gone = found[1:]
    assert calling.endswith("<|tool_call>call:look{at:[4]}<tool_call|><|tool_response>")
    assert ("so I look" in calling) == ("so I look" in text)
    assert gone.endswith("gone<turn|>")
    assert ("new thought" in gone) == ("new thought" in text)


def test_what_is_said_behind_a_tools_response_is_refused(tmp_path):
    """Gemma 4's template writes the content of a turn behind the response to its call."""
    with pytest.raises(ProfileError, match="the answer of turn 2 is not found"):
        Model(tmp_path, template("gemma4")).encoded(RECORDS["calls"])
