"""`dflop check`: equal where dflop is right, and not equal where something is changed on purpose."""

from __future__ import annotations

import dataclasses
import json
import re
import shutil

import pytest
import torch
from conformance import SETTINGS, write_model

from dflop import Error
from dflop._native import run_cli
from dflop.checking import check as checking
from dflop.checking import pair as pairs
from dflop.checking.gradients import by_module, errors_of
from dflop.checking.tokens import difference
from dflop.models.layer_kinds import FULL, heads_of

pytestmark = pytest.mark.usefixtures("quiet")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A demo with its data profile."""
    folder = tmp_path_factory.mktemp("check") / "demo"
    assert run_cli(["dflop", "demo-data", str(folder), "--samples", "48"]) == (0, None)
    text = (folder / "dflop.yaml").read_text()
    (folder / "dflop.yaml").write_text(re.sub(r"video_max_frames: \d+", "video_max_frames: 3", text))
    assert run_cli(["dflop", "profile", "data", "-c", str(folder / "dflop.yaml")]) == (0, None)
    return folder


def run(folder, *arguments):
    """Exit status of `dflop check`."""
    status, request = run_cli(["dflop", "check", "-c", str(folder / "dflop.yaml"), *arguments])
    return checking.check(request["arguments"]) if request else status


def found_by(folder, capfd, *arguments):
    """(exit status, what `--json` prints)."""
    status = run(folder, "--json", *arguments)
    return status, json.loads(capfd.readouterr().out)


def test_samples_of_all_kinds_are_equal(folder, capfd):
    """The model with random weights, and the same weights saved and read."""
    status, found = found_by(folder, capfd)
    assert (status, found["equal"], found["weights"]) == (0, True, "random")
    assert [s["kind"] for s in found["samples"]] == ["text", "image", "multi_image", "video"]
    assert [s["tokens"] for s in found["samples"]] == ["equal", "equal", "equal", "-"]
    assert all(s["error"] < 1e-5 and s["expected_loss"] > 1 for s in found["samples"])
    assert len(found["modules"]) > 20
    assert all(module["error"] < 1e-5 for module in found["modules"])
    of_tokens, of_modules = found["notes"]
    assert "1 of 4 samples were not compared" in of_tokens
    # LLaVA reads the tower before its last norm.
    assert re.search("no gradient reaches 1 of .*vision_tower.post_layernorm", of_modules)


def test_weights_that_are_read(folder, tmp_path, capfd):
    """By dflop, and by `from_pretrained`."""
    copy = tmp_path / "demo"
    shutil.copytree(folder, copy)
    pairs.Pair(checking.load_adapter(copy / "model"), 5).model.save_pretrained(tmp_path / "saved")
    shutil.copy(tmp_path / "saved/model.safetensors", copy / "model")
    config = copy / "dflop.yaml"
    config.write_text(config.read_text().replace("init: random", "init: pretrained"))
    status, found = found_by(copy, capfd, "--samples", "1")
    assert (status, found["weights"], found["llm_layers"]) == (0, "read", 2)
    # Of some layers there are no weights.
    status, found = found_by(copy, capfd, "--samples", "1", "--layers", "1")
    assert (status, found["weights"], found["llm_layers"]) == (0, "random", 1)


def test_samples_that_see_each_other_are_found(folder, capfd, monkeypatch):
    """Packed without bounds between them, each is right alone, and their gradients are not."""
    apart = pairs.llm_input

    def together(samples):
        batch = apart(samples)
        return dataclasses.replace(
            batch, cu_seqlens=batch.cu_seqlens[[0, -1]], segment_tokens=(), num_features=-1
        )

    monkeypatch.setattr(pairs, "llm_input", together)
    assert run(folder, "--samples", "2") == 1
    said = capfd.readouterr().out
    assert "NOT equal within 0.0001" in said
    assert re.search(r"language_model\.layers\.\*\.self_attn\.v_proj .*<--", said)
    assert not re.search(r"demo_\d+ .*<--", said)


def test_a_picture_that_is_read_otherwise_is_found(folder, capfd, monkeypatch):
    """Its sample's loss differs already."""
    right = checking.inputs_of
    monkeypatch.setattr(checking, "inputs_of", lambda *given: 0.9 * right(*given))
    assert run(folder, "--samples", "2") == 1
    marked = re.findall(r"^demo_\d+ +(\w+) .*<--$", capfd.readouterr().out, re.MULTILINE)
    assert marked == ["image"]


def test_tokens_that_differ_are_found(folder, tmp_path, capfd):
    """The processor has another chat template than dflop profiled with."""
    copy = tmp_path / "demo"
    shutil.copytree(folder, copy)
    status, request = run_cli(["dflop", "check", "-c", str(copy / "dflop.yaml"), "--samples", "1"])
    assert status == 0
    template = tmp_path / "other.jinja"
    template.write_text(
        "{%- for m in messages -%}Sir, {{ m.content if m.content is string else m.content[0].text }}{%- endfor -%}"
    )
    assert checking.check(request["arguments"] | {"chat_template": str(template)}) == 1
    assert re.search(
        r"dflop has \d+ tokens, transformers has \d+; they part at token 0", capfd.readouterr().out
    )


CALLING = (
    "{% for t in tools or [] %}{{ t | tojson }}{% endfor %}{% for m in messages %}<|im_start|>{{ m.role }}\n"
    "{% if m.content is string %}{{ m.content }}{% else %}{% for p in m.content %}"
    "{{ '<image>' if p.type == 'image' else p.text }}{% endfor %}{% endif %}"
    "{% for c in m.tool_calls or [] %}<tool_call>{{ c.function | tojson }}</tool_call>{% endfor %}<|im_end|>\n"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def test_a_picture_that_a_tool_shows_is_equal(folder, tmp_path, capfd):
    """The sample with its tools is given to the processor of transformers."""
    copy = tmp_path / "demo"
    shutil.copytree(folder, copy)
    look = {"type": "function", "function": {"name": "look", "arguments": {"at": [1, 2.5]}}}
    turns = [
        {"role": "user", "content": "where?"},
        {"role": "assistant", "content": "I look", "tool_calls": [look]},
        {"role": "tool", "content": "here <image>"},
        {"role": "assistant", "content": "there"},
    ]
    picture = next((copy / "data" / "media").glob("*.jpg"))
    record = {"id": "tool", "images": [str(picture)], "tools": [{"name": "look"}], "messages": turns}
    (copy / "one.jsonl").write_text(json.dumps(record) + "\n")
    (copy / "calling.jinja").write_text(CALLING)
    text = (copy / "dflop.yaml").read_text()
    text = text.replace("mixture: data/mixture.yaml", "mixture: one.jsonl\n  chat_template: calling.jinja")
    (copy / "dflop.yaml").write_text(text)
    assert run_cli(["dflop", "profile", "data", "-c", str(copy / "dflop.yaml")]) == (0, None)
    capfd.readouterr()
    status, found = found_by(copy, capfd, "--samples", "1")
    assert (status, found["samples"][0]["tokens"]) == (0, "equal")
    # Calls and what is said carry loss; the tool's picture does not.
    assert 20 < found["samples"][0]["label_tokens"] < 80


def test_a_sample_is_asked_for_by_name(folder, capfd):
    """One that is not there is an error that names another."""
    status, found = found_by(folder, capfd, "--sample", "demo_0007", "--sample", "demo_0003")
    assert (status, [s["id"] for s in found["samples"]]) == (0, ["demo_0007", "demo_0003"])
    assert run(folder, "--sample", "nobody") == 2
    said = capfd.readouterr().err
    assert "has no sample `nobody`" in said
    assert "hint: its first sample is `demo_0000`" in said
    assert run(folder, "--tolerance", "0") == 2
    assert "`--tolerance` is 0, must be above 0" in capfd.readouterr().err


def test_too_little_memory_is_said_before_anything_is_built(folder, monkeypatch):
    """With how much there is, and what needs less."""
    read = pairs.Path.read_text

    def small(path, **options):
        return (
            "MemTotal: 9 kB\nMemAvailable: 4096 kB\n"
            if str(path) == "/proc/meminfo"
            else read(path, **options)
        )

    monkeypatch.setattr(pairs.Path, "read_text", small)
    with pytest.raises(
        Error, match=r"parameters in float32, with two gradients of each, are 0.0 GiB; 0.0 GiB are free"
    ):
        run(folder)


def test_errors_are_of_each_gradients_own_norm():
    """But for those that rounding alone makes; the layers of a stack are one row."""
    expected = {
        "model.layers.0.up.weight": torch.full((4,), 3.0),
        "model.layers.1.up.weight": torch.full((4,), 1.0),
        "model.layers.1.k_proj.bias": torch.zeros(2),
        "model.row": torch.ones(1),
    }
    found = {name: gradient * 1.01 for name, gradient in expected.items()}
    found["model.layers.1.k_proj.bias"] = torch.full((2,), 1e-9)
    errors = errors_of(found, expected)
    total = float(torch.cat(list(expected.values())).norm())
    assert errors["model.layers.0.up.weight"] == pytest.approx(0.01, rel=1e-4)
    assert errors["model.layers.1.k_proj.bias"] == pytest.approx(2**0.5 * 1e-9 / (1e-4 * total), rel=1e-4)
    rows = {row.module: row for row in by_module(errors, expected)}
    assert list(rows) == ["model.layers.*.up", "model.layers.*.k_proj", "model.row"]
    assert rows["model.layers.*.up"].num_parameters == 8
    assert rows["model.layers.*.up"].norm == pytest.approx(40**0.5)
    with pytest.raises(ValueError, match="`model.row` has a gradient in one of them only"):
        errors_of(found, {name: g for name, g in expected.items() if name != "model.row"})


def test_what_is_no_number_is_no_equality():
    """Not passed over by a maximum."""
    expected = {"layers.0.w.weight": torch.ones(2), "layers.1.w.weight": torch.ones(2)}
    found = dict(expected)
    found["layers.1.w.weight"] = torch.tensor([1.0, float("nan")])
    (row,) = by_module(errors_of(found, expected), expected)
    assert row.error == float("inf")


@pytest.mark.parametrize("num_layers", [1, 2])
@pytest.mark.parametrize("name", SETTINGS)
def test_every_family_has_first_layers(name, num_layers, tmp_path):
    """Its rules hold for fewer layers, too: kinds of layers, layers that features are added to."""
    directory = write_model(tmp_path, name)
    whole = checking.load_adapter(directory)
    with pairs.first_layers(directory, num_layers) as shortened:
        assert checking.load_adapter(shortened).num_llm_layers == num_layers
    with pairs.first_layers(directory, 1000) as all_layers:
        assert checking.load_adapter(all_layers).num_llm_layers == whole.num_llm_layers


def test_published_sizes_have_two_layers(tmp_path):
    """Gemma 3 and 4, of whose layers each sixth sees all; Qwen3-VL, whose encoder gives features of three layers."""
    for name, text, vision in (
        ("gemma3", {"num_hidden_layers": 34, "sliding_window": 1024}, {}),
        ("gemma4", {"num_hidden_layers": 60}, {}),
        # As transformers saves it.
        (
            "gemma4",
            {"num_hidden_layers": 12, "per_layer_config": {n: {"head_dim": 16} for n in ("5", "11")}},
            {},
        ),
        ("qwen3_vl", {"num_hidden_layers": 36}, {"deepstack_visual_indexes": [0, 1, 2], "depth": 4}),
    ):
        directory = write_model(tmp_path, name)
        config = json.loads((directory / "config.json").read_text())
        config["text_config"].pop("layer_types", None)
        config["text_config"] |= text
        config["vision_config"] |= vision
        (directory / "config.json").write_text(json.dumps(config))
        with pairs.first_layers(directory, 2) as shortened:
            adapter = checking.load_adapter(shortened)
            assert adapter.num_llm_layers == 2
            # Of the second layer of Gemma 4, which sees all, as the sixth of the model.
            assert name != "gemma4" or heads_of(adapter.text, FULL)[1] == 16


@pytest.mark.parametrize(
    ("found", "expected", "said"),
    [
        ([1, 2], [1, 2], None),
        ([1, 2], [1, 3], "2 tokens, transformers has 2; they part at token 1"),
        ([1], [1, 3], "1 tokens, transformers has 2; they part at token 1"),
    ],
)
def test_where_tokens_part(found, expected, said):
    """At the first that differs, or where one list ends."""
    assert difference(found, expected) == said
