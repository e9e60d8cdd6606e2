"""Costs of the rows that a trainer holds: by their tokens, or by a profile of their chats and media."""

from __future__ import annotations

import copy
import json
import re
from pathlib import Path
from types import SimpleNamespace

import datasets
import pytest
import torch
from conformance_settings import SETTINGS
from PIL import Image
from processor_dirs import write
from tiny_families import TINY
from transformers import AutoConfig, AutoModelForImageTextToText, LlamaConfig, LlamaForCausalLM

import dflop
from dflop._native import ProfileError, testing
from dflop.integrations import cost_of_parameters, costs_of_rows
from dflop.integrations.row_costs import _merged_of
from dflop.integrations.transformers import balance

_MEDIA = {
    "image": {"height": 600, "width": 800},
    "video": {"height": 300, "width": 400, "num_frames": 8, "fps": 2.0},
    "audio": {"duration_s": 1.0},
}
IMAGE = 7


def text_model():
    sizes = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 2}
    return LlamaForCausalLM(LlamaConfig(**sizes, vocab_size=60))


def qwen_model(**changes):
    config = AutoConfig.for_model(
        "qwen2_5_vl", **copy.deepcopy(TINY["qwen2_5_vl"]), image_token_id=IMAGE, **changes
    )
    with torch.device("meta"):
        return AutoModelForImageTextToText.from_config(config)


@pytest.mark.parametrize("name", SETTINGS)
def test_encoder_tokens_of_a_feature_are_those_of_the_shape_rule(name):
    """Class tokens, and the margins of tiles, are more than features say: up to a quarter."""
    fields, processor, video, contents = copy.deepcopy(SETTINGS[name])
    family = name.split("-")[0]
    config = AutoConfig.for_model(family, **copy.deepcopy(fields))
    config = getattr(config, "thinker_config", config)
    kinds = {medium[0] for media in contents.values() for medium in media}
    assert kinds
    for kind in kinds:
        asked = dict(_MEDIA[kind])
        if kind == "audio":
            asked["sample_rate"] = processor.get("sampling_rate", 16_000)
        files = json.dumps({"model_type": family, **fields}), json.dumps(processor), json.dumps(video or {})
        shape = testing.media_shape(*files, kind, **asked)
        tokens = sum(count * length for count, length in shape.segments)
        assert 0.8 <= tokens / shape.feature_tokens / _merged_of(config, kind) <= 1.25, kind


def test_rows_of_tokens_cost_what_their_tokens_cost():
    """A feature of Qwen2.5-VL is four patches."""
    model = qwen_model()
    rows = [[1, 2, 3], [1, *[IMAGE] * 5, 2], [IMAGE], list(range(8, 30))]
    given = [{"input_ids": ids, "labels": ids} for ids in rows]
    cost = cost_of_parameters(model)
    expected = dflop.costs([cost((4 * ids.count(IMAGE), len(ids))) for ids in rows])
    # Pictures that stand beside the tokens are not opened.
    table = datasets.Dataset.from_list(
        [{**row, "images": [{"path": "/nowhere.png", "bytes": None}]} for row in given],
        features=datasets.Features(
            input_ids=datasets.List(datasets.Value("int64")),
            labels=datasets.List(datasets.Value("int64")),
            images=datasets.List(datasets.Image()),
        ),
    )
    for found in (costs_of_rows(given, model), costs_of_rows(table, model)):
        assert list(found.encoder_ns) == list(expected.encoder_ns)
        assert list(found.llm_ns) == list(expected.llm_ns)
        assert list(found.tokens) == list(map(len, rows))
        assert found.positions is None


def test_media_tokens_that_the_collation_multiplies_are_not_counted():
    """One token a picture is no count of what the encoder reads."""
    rows = [
        {"input_ids": [1, IMAGE, 2], "images": ["a.png"]},
        {"input_ids": [1, IMAGE, IMAGE], "images": ["b.png", "c.png"]},
    ]
    with pytest.raises(
        ValueError, match="the rows have 3 media and 3 tokens for them: the collation makes more"
    ):
        costs_of_rows(datasets.Dataset.from_list(rows), qwen_model())
    grown = [{"input_ids": [1, *[IMAGE] * 4, 2], "image": "a.png"}, {"input_ids": [1, 2, 3], "image": None}]
    assert len(costs_of_rows(datasets.Dataset.from_list(grown), qwen_model())) == 2


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            lambda config: vars(config).update(image_token_id=None, video_token_id=None),
            "has no `image_token_id`",
        ),
        (lambda config: setattr(config.text_config, "cross_attention_layers", [1]), "attend to the encoder"),
    ],
    ids=["unnamed", "cross"],
)
def test_media_that_no_token_stands_for_are_not_counted(change, message):
    """Text alone is, in the same model."""
    model = qwen_model()
    change(model.config)
    ids = [[1, 2, 3], [4, 5]]
    assert (
        len(costs_of_rows(datasets.Dataset.from_dict({"input_ids": ids, "images": [None, []]}), model)) == 2
    )
    for column, values in (("images", [["a.png"], []]), ("pixel_values", [[0.5], []])):
        with pytest.raises(ValueError, match=f"{message}.*give `costs`"):
            costs_of_rows(datasets.Dataset.from_dict({"input_ids": ids, column: values}), model)


@pytest.mark.parametrize("given", [{"length": [3, 9]}, {"lengths": [[3], [9]]}])
def test_of_text_alone_a_length_is_enough(given):
    model = text_model()
    cost = cost_of_parameters(model)
    found = costs_of_rows(datasets.Dataset.from_dict({**given, "messages": ["", ""]}), model)
    assert list(found.llm_ns) == list(dflop.costs([cost((0, 3)), cost((0, 9))]).llm_ns)
    assert list(found.tokens) == [3, 9]


def test_what_is_frozen_costs_less():
    rows = [{"input_ids": [1, *[IMAGE] * 9, 2]}]
    model = qwen_model()
    whole = costs_of_rows(rows, model)
    model.model.visual.requires_grad_(requires_grad=False)
    frozen = costs_of_rows(rows, model)
    assert whole.encoder_ns[0] / whole.llm_ns[0] == pytest.approx(
        3 * frozen.encoder_ns[0] / frozen.llm_ns[0], rel=1e-6
    )


@pytest.fixture(scope="module")
def llava(tmp_path_factory):
    """A tiny LLaVA with a whole processor; `processor`, `model`, its directory."""
    folder = tmp_path_factory.mktemp("llava")
    processor = write(
        folder,
        "llava",
        TINY["llava"],
        tokens=["<image>"],
        marks={"image": "<image>"},
        ids={"image_token_index": "<image>"},
        parts={"image_processor": {"size": {"shortest_edge": 56}, "crop_size": {"height": 56, "width": 56}}},
        patch_size=14,
        vision_feature_select_strategy="default",
        num_additional_image_tokens=1,
    )
    config = AutoConfig.from_pretrained(folder)
    return processor, AutoModelForImageTextToText.from_config(config), folder


def chats(num_images):
    rows = []
    for count in num_images:
        parts = [*[{"type": "image", "text": None}] * count, {"type": "text", "text": "what?"}]
        answer = [{"type": "text", "text": "a house " * (1 + count)}]
        messages = [{"role": "user", "content": parts}, {"role": "assistant", "content": answer}]
        rows.append({"messages": messages, "images": [Image.new("RGB", (70, 60))] * count})
    return datasets.Dataset.from_list(rows)


def test_rows_of_chats_cost_what_their_profile_says(llava):
    """By the processor that the trainer holds, or by the directory; the encoder reads more where more images are."""
    processor, model, folder = llava
    rows = chats([2, 0, 1])
    found = costs_of_rows(rows, model, processor)
    expected = dflop.costs(rows, model_dir=folder, cost=cost_of_parameters(model))
    assert list(found.encoder_ns) == list(expected.encoder_ns)
    assert list(found.llm_ns) == list(expected.llm_ns)
    assert list(found.tokens) == list(expected.tokens)
    assert found.encoder_ns[0] == 2 * found.encoder_ns[2] > found.encoder_ns[1] == 0
    assert list(costs_of_rows(rows, model, None, folder).tokens) == list(expected.tokens)


def test_chats_of_unequal_messages_are_read(llava):
    """`datasets` keeps them as texts of JSON (`datasets.Json`)."""
    processor, model, _ = llava
    rows = chats([2, 0, 1])
    listed = [{"messages": row["messages"], "images": row["images"]} for row in rows]
    features = datasets.Features(
        messages=datasets.List(datasets.Json()), images=datasets.List(datasets.Image())
    )
    as_json = datasets.Dataset.from_list(listed, features=features)
    assert list(costs_of_rows(as_json, model, processor).tokens) == list(
        costs_of_rows(rows, model, processor).tokens
    )


class ScriptOfQwen:
    """As the training scripts of Qwen-VL and LLaVA keep their records; a list is one sample of several."""

    def __init__(self, records, processor=None, image_folder=None):
        self.list_data_dict = records
        self.processor = processor
        self.data_args = SimpleNamespace(image_folder=image_folder)

    def __len__(self):
        return len(self.list_data_dict)

    def __getitem__(self, index):
        return self.list_data_dict[index]


def test_records_of_a_script_are_read_where_it_keeps_them(llava, tmp_path):
    processor, model, _ = llava
    (tmp_path / "in").mkdir()
    for name in "abc":
        Image.new("RGB", (70, 60)).save(tmp_path / f"in/{name}.png")

    def record(*names, **more):
        turns = [
            {"from": "human", "value": "<image>" * len(names) + "what?"},
            {"from": "gpt", "value": "a house " * (1 + len(names))},
        ]
        return {"conversations": turns, "image": list(names), **more}

    plain = [record("a.png", "b.png"), record(), record("c.png")]
    (tmp_path / "data.jsonl").write_text("".join(json.dumps(row) + "\n" for row in plain))
    expected = costs_of_rows(plain, model, processor, media_root=tmp_path / "in")
    assert expected.encoder_ns[0] == pytest.approx(2 * expected.encoder_ns[2], rel=1e-6)
    assert expected.encoder_ns[1] == 0 < min(expected.tokens)
    with_paths = [{**row, "data_path": str(tmp_path / "in")} for row in plain]
    of_qwen = costs_of_rows(ScriptOfQwen(with_paths, processor), model, processor.tokenizer)
    of_llava = costs_of_rows(ScriptOfQwen(plain, image_folder=str(tmp_path / "in")), model, processor)
    for found in (of_qwen, of_llava):
        assert list(found.llm_ns) == list(expected.llm_ns)
        assert list(found.encoder_ns) == list(expected.encoder_ns)
        assert list(found.tokens) == list(expected.tokens)
    # One row of two samples: all of their tokens, and none sees those of the other.
    packed = costs_of_rows(ScriptOfQwen([with_paths[:2], with_paths[2]], processor), model)
    assert list(packed.tokens) == [expected.tokens[0] + expected.tokens[1], expected.tokens[2]]
    ratio = (expected.llm_ns[0] + expected.llm_ns[1]) / expected.llm_ns[2]
    assert packed.llm_ns[0] / packed.llm_ns[1] == pytest.approx(ratio, rel=1e-6)
    with pytest.raises(ProfileError, match="c.png"):
        costs_of_rows(plain, model, processor, media_root=tmp_path)
    with pytest.raises(ValueError, match="the records hold what is no JSON .* must be paths or URLs"):
        costs_of_rows([record(Image.new("RGB", (7, 6)))], model, processor)


def test_tokens_that_are_cut_cost_nothing():
    model = text_model()
    cost = cost_of_parameters(model)
    found = costs_of_rows([{"input_ids": [1] * 9}, {"input_ids": [1] * 40}], model, max_length=12)
    assert list(found.llm_ns) == list(dflop.costs([cost((0, 9)), cost((0, 12))]).llm_ns)
    assert list(found.tokens) == [9, 12]


def test_pairs_cost_both_answers():
    """Each with the prompt; both are padded to the longer one."""
    model = text_model()
    cost = cost_of_parameters(model)
    rows = {"prompt_ids": [[1] * 5, [1]], "chosen_ids": [[1] * 3, [1] * 2], "rejected_ids": [[1] * 9, [1]]}
    expected = dflop.costs([(0, cost((0, 8))[1] + cost((0, 14))[1]), (0, cost((0, 3))[1] + cost((0, 2))[1])])
    found = costs_of_rows(datasets.Dataset.from_dict(rows), model)
    assert list(found.llm_ns) == list(expected.llm_ns)
    assert list(found.tokens) == [28, 6]
    whole = {name: rows[name] for name in ("chosen_ids", "rejected_ids")}
    assert list(costs_of_rows(datasets.Dataset.from_dict(whole), model).tokens) == [18, 4]


def test_the_line_needs_no_costs(llava, tmp_path):
    """The trainer's own processor, and batches of uneven counts that are even in work."""
    from transformers import Trainer, TrainingArguments

    processor, model, _ = llava
    rows = chats([3, 0, 0, 0, 1, 2])
    arguments = TrainingArguments(
        str(tmp_path), per_device_train_batch_size=3, remove_unused_columns=False, use_cpu=True
    )
    trainer = Trainer(model, arguments, data_collator=list, train_dataset=rows, processing_class=processor)
    read = [row for batch in balance(trainer).get_train_dataloader() for row in batch]
    assert sorted(len(row["images"]) for row in read) == [0, 0, 0, 1, 2, 3]
    with pytest.raises(ValueError, match="`model_dir` is for costs that are counted"):
        balance(trainer, [(1, 1)] * 6, model_dir=tmp_path)


def test_the_page_of_training_scripts(llava, tmp_path):
    """The block of docs/frameworks.md, where the trainer has a tokenizer alone and the dataset the processor."""
    from transformers import Trainer, TrainingArguments

    processor, model, _ = llava
    Image.new("RGB", (70, 60)).save(tmp_path / "a.png")
    turns = [{"from": "human", "value": "what?"}, {"from": "gpt", "value": "a house"}]
    rows = [{"conversations": turns, "data_path": str(tmp_path)} for _ in range(6)]
    rows[1] = {
        "conversations": [{"from": "human", "value": "<image>what?"}, turns[1]],
        "image": "a.png",
        "data_path": str(tmp_path),
    }
    arguments = TrainingArguments(
        str(tmp_path), per_device_train_batch_size=3, remove_unused_columns=False, use_cpu=True
    )
    data = ScriptOfQwen(rows, processor)
    trainer = Trainer(
        model, arguments, data_collator=list, train_dataset=data, processing_class=processor.tokenizer
    )
    page = (Path(__file__).resolve().parents[2] / "docs/frameworks.md").read_text()
    block = re.findall(r"^```python\n(.*?)^```", page.split("## Training scripts")[1], flags=re.M | re.S)[0]
    exec(block, {"trainer": trainer, "model": model})  # noqa: S102
    read = [row for batch in trainer.get_train_dataloader() for row in batch]
    assert sorted("image" in row for row in read) == [False] * 5 + [True]


def test_rows_that_say_nothing_are_refused(llava):
    processor, model, _ = llava

    class Rows:
        def __len__(self):
            return 2

        def __getitem__(self, index):
            return {"pixel_values": index}

    with pytest.raises(
        ValueError, match="`train_dataset` is a `Rows` whose rows say nothing of their size, give"
    ):
        costs_of_rows(Rows(), model, processor)
    # A tokenizer alone; the directory that the model was read from would do.
    nowhere = AutoModelForImageTextToText.from_config(
        AutoConfig.for_model("llava", **copy.deepcopy(TINY["llava"]))
    )
    with pytest.raises(ValueError, match="no `input_ids`, and the trainer holds no processor"):
        costs_of_rows(chats([1]), nowhere, processor.tokenizer)
    with pytest.raises(ProfileError, match="cannot be profiled"):
        costs_of_rows(datasets.Dataset.from_list([{"length": 3}]), model, processor)


def test_a_family_that_says_nothing_of_its_features_is_named():
    """Then a feature is taken for one encoder token, and a warning says so."""
    model = qwen_model()
    model.config.model_type, model.config.vision_config = "other_vl", None
    with pytest.warns(
        UserWarning, match="`other_vl` has no field that dflop knows of how many encoder tokens"
    ):
        found = costs_of_rows([{"input_ids": [IMAGE, 1]}], model)
    assert len(found) == 1
    assert list(costs_of_rows([{"input_ids": [1, 2]}], text_model()).encoder_ns) == [0]
