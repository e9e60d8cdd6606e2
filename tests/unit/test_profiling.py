"""What is measured, what is counted, and what an interruption leaves."""

import hashlib
import json
import os
import time
from pathlib import Path

import pytest
import torch
from tiny_llava import write_model_dir

import dflop
from dflop.models import load_adapter
from dflop.profiling import hash_config, profile_model, write_artifact
from dflop.profiling.artifact import hash_parts, to_text
from dflop.profiling.cases import Case, build_cases, build_modules, fill_grid, geometric_grid
from dflop.profiling.memory import activation_bytes
from dflop.profiling.model import MIN_REPEATS, Request, _warm_up
from dflop.profiling.records import Records, key_of
from dflop.profiling.timer import Timing, summarise, time_on_cpu

CPU = torch.device("cpu")
SIZES = {
    "max_encoder_tokens": 81 * 4,
    "max_llm_tokens": 300,
    "max_segment_tokens": 200,
    "max_label_tokens": 40,
}


@pytest.fixture(scope="module", autouse=True)
def _one_thread():
    torch.set_num_threads(1)


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory):
    return write_model_dir(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def profiled(model_dir, tmp_path_factory):
    """(request, profile, ratios shown) of one small profile beside one neighbour."""
    request = {
        "model_dir": str(model_dir),
        "dtype": "float32",
        "device": "cpu",
        "num_neighbours": 1,
        "budget_s": 0.2,
        "partial": str(tmp_path_factory.mktemp("partial") / "model_profile.jsonl"),
        **SIZES,
    }
    shown = []
    return request, profile_model(request, lambda ratio, label: shown.append((ratio, label))), shown


def test_a_profile_has_the_fields_of_the_artifact(profiled, model_dir):
    _, profile, shown = profiled
    assert list(profile) == [
        "made_from",
        "family",
        "device",
        "num_llm_layers",
        "num_encoder_layers",
        "hidden_bytes",
        "network",
        "modules",
        "optimizer_ns_per_million",
    ]
    assert profile["made_from"] == {"model_config": hash_config(model_dir)}
    assert (profile["family"], profile["num_llm_layers"], profile["num_encoder_layers"]) == (
        "llava_onevision",
        4,
        2,
    )
    assert profile["hidden_bytes"] == 48 * 4
    device = dict(profile["device"])
    assert device.pop("name")
    assert device == {
        "kind": "cpu",
        "num_threads": 1,
        "num_neighbours": 1,
        "dtype": "float32",
        "torch": torch.__version__,
    }
    assert profile["network"]["latency_ns"] > 0
    assert profile["network"]["bandwidth_bytes_per_s"] > 0
    assert profile["optimizer_ns_per_million"] > 0
    assert sorted(profile["modules"]) == ["encoder", "llm_embedding", "llm_head", "llm_layer"]
    ratios = [ratio for ratio, _ in shown]
    assert ratios == sorted(ratios)
    assert ratios[-1] == 1.0


def test_curves_ascend_and_reach_the_largest_size(profiled):
    _, profile, _ = profiled
    last = {}
    for name, module in profile["modules"].items():
        for part in ("linear", "attention"):
            points = module[part]["points"]
            sizes = [point["size"] for point in points]
            assert all(a < b for a, b in zip(sizes, sizes[1:], strict=False))
            for point in points:
                assert set(point) == {
                    "size",
                    "forward_ns",
                    "backward_ns",
                    "spread_ns",
                    "activation_bytes",
                    "repeats",
                }
                assert point["forward_ns"] > 0
                assert point["backward_ns"] > 0
                assert point["repeats"] >= MIN_REPEATS - 2
            last[name, part] = sizes[-1] if sizes else None
    assert last == {
        ("encoder", "linear"): 81 * 4,
        ("encoder", "attention"): None,
        ("llm_embedding", "linear"): 384,
        ("llm_embedding", "attention"): None,
        ("llm_layer", "linear"): 384,
        ("llm_layer", "attention"): 200,
        ("llm_head", "linear"): 40,
        ("llm_head", "attention"): None,
    }


def test_parameters_of_the_modules_are_those_of_the_model(profiled, model_dir):
    _, profile, _ = profiled
    modules = profile["modules"]
    total = sum(modules[name]["num_parameters"] for name in ("encoder", "llm_embedding", "llm_head"))
    total += 4 * modules["llm_layer"]["num_parameters"]
    assert total == sum(p.numel() for p in load_adapter(model_dir).reference_model(0).parameters())
    for module in modules.values():
        assert module["parameter_bytes"] == 4 * module["num_parameters"]


def test_a_second_profile_measures_nothing_again(profiled):
    request, profile, _ = profiled
    partial = Path(request["partial"])
    before = partial.read_text()
    assert profile_model(request) == profile
    assert partial.read_text() == before


def test_an_interrupted_profile_goes_on(model_dir, tmp_path):
    partial = tmp_path / "deep" / "partial.jsonl"
    request = {"model_dir": str(model_dir), "budget_s": 0.1, "partial": str(partial), **SIZES}
    calls = []

    def interrupt(ratio, label):
        calls.append(label)
        if len(calls) == 9:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        profile_model(request, interrupt)
    first = partial.read_text()
    assert sum("forward_ns" in line for line in first.splitlines()) >= 9
    # The interruption may also cut a line short.
    partial.write_text(first + '{"key": "cut sh')
    profile_model(request)
    assert partial.read_text().startswith(first)


def test_records_of_another_key_and_broken_lines_are_left_out(tmp_path):
    path = tmp_path / "records.jsonl"
    ours = Records(path, key_of({"threads": 1}))
    ours.add_timing("a", Timing(5, 7))
    ours.add_number("b", 3)
    Records(path, key_of({"threads": 2})).add_timing("a", Timing(100, 100))
    with path.open("a") as file:
        file.write('[1]\n{"key": "x"}\nnonsense')
    again = Records(path, key_of({"threads": 1}))
    assert dict(again.timings) == {"a": [Timing(5, 7)]}
    assert again.numbers == {"b": 3}
    assert again.spent_ns == 12
    again.add_timing("a", Timing(6, 6))
    assert Records(path, key_of({"threads": 1})).timings["a"] == [Timing(5, 7), Timing(6, 6)]


def test_linear_and_attention_bytes_add_up_to_the_pack(profiled, model_dir):
    _, profile, _ = profiled
    layer = profile["modules"]["llm_layer"]
    linear = {p["size"]: p["activation_bytes"] for p in layer["linear"]["points"]}
    attention = {p["size"]: p["activation_bytes"] for p in layer["attention"]["points"]}
    adapter = load_adapter(model_dir)
    modules = build_modules(adapter, CPU, torch.float32)
    curves = build_cases(adapter, modules, CPU, torch.float32, **SIZES)
    packs = next(curve for curve in curves if curve[0].module == "llm_layer" and curve[0].part == "linear")
    for case in packs:
        counted = activation_bytes(case.forward, modules.parameters(), case.inputs)
        predicted = modules.num_layers * (linear[case.size] + sum(attention[s] for s in case.segments))
        assert predicted == pytest.approx(counted, abs=modules.num_layers * (1 + len(case.segments)))


def test_activation_bytes_are_those_kept_for_the_backward():
    """By hand: `exp` keeps its result, a product both factors, a view no more than what it is a view of."""
    buffer = torch.ones(1000)
    weight = torch.nn.Parameter(torch.ones(100))

    def forward():
        leaf = buffer[:100].detach().requires_grad_()
        return (leaf * weight).exp().view(10, 10)

    assert activation_bytes(forward, [weight], [buffer]) == 4 * (100 + 100)
    assert activation_bytes(forward, [weight]) == 4 * (1000 + 100)
    assert activation_bytes(forward, [], [buffer]) == 4 * (100 + 100 + 100)


def test_a_curve_ends_where_memory_does(model_dir, tmp_path, caplog):
    modules = build_modules(load_adapter(model_dir), CPU, torch.float32)

    def case(module, size, largest):
        def forward():
            if size > largest:
                message = "DefaultCPUAllocator: can't allocate memory"
                raise RuntimeError(message)
            return torch.ones(size, requires_grad=True).sum()

        return Case(module, "linear", size, 1, forward, torch.autograd.backward)

    records = Records(tmp_path / "records.jsonl", "key")
    kept = _warm_up([[case("llm_head", size, 4) for size in (2, 4, 8, 16)]], modules, records)
    assert [c.size for c in kept[0]] == [2, 4]
    assert records.numbers["llm_head linear 8 x1 out_of_memory"] == 1
    assert "llm_head linear: out of memory at size 8" in caplog.text
    with pytest.raises(dflop.ProfileError, match="`encoder` does not fit the device even at size 3"):
        _warm_up([[case("encoder", 3, 0)]], modules, records)


def test_summary_is_of_medians_and_quartiles():
    timings = [Timing(10, 20), Timing(11, 19), Timing(12, 22), Timing(9, 21), Timing(9000, 9000)]
    summary = summarise(timings)
    assert (summary.forward_ns, summary.backward_ns, summary.repeats) == (11, 21, 5)
    # Totals 30, 30, 30, 34, 18000: the quartiles are 30 and 34.
    assert summary.spread_ns == 4
    assert summarise(timings[:1]).spread_ns == 0


def test_the_clock_counts_work_and_not_waiting():
    def spin():
        end = time.thread_time_ns() + 5_000_000
        while time.thread_time_ns() < end:
            pass

    timing = time_on_cpu(spin, lambda _: time.sleep(0.05))
    assert 4_000_000 < timing.forward_ns < 50_000_000
    assert timing.backward_ns < 20_000_000


@pytest.mark.parametrize(("first", "last", "ratio"), [(1, 60, 1.6), (8, 3000, 2.0), (1, 2, 1.1), (5, 5, 2.0)])
def test_a_grid_holds_its_ends_and_no_wide_gap(first, last, ratio):
    sizes = geometric_grid(first, last, ratio)
    assert (sizes[0], sizes[-1]) == (first, last)
    assert all(a < b for a, b in zip(sizes, sizes[1:], strict=False))
    assert all(b <= max(a * ratio + 1, a + 1) for a, b in zip(sizes, sizes[1:], strict=False))


def test_a_grid_keeps_the_sizes_it_is_given():
    sizes = fill_grid([1, 191, 192, 1000], 1.6)
    assert {1, 191, 192, 1000} <= set(sizes)
    assert geometric_grid(8, 0, 2.0) == [1]


def test_a_request_is_checked():
    with pytest.raises(ValueError, match="`model_dir` is missing"):
        Request.parse({"max_llm_tokens": 5})
    with pytest.raises(ValueError, match="`dtype` is int8, must be one of float32"):
        Request.parse({"model_dir": "x", "max_llm_tokens": 5, "dtype": "int8"})
    request = Request.parse({"model_dir": "x", "max_llm_tokens": 5})
    assert (request.max_segment_tokens, request.max_label_tokens, request.num_neighbours) == (5, 5, 0)


def test_hashes_are_over_length_prefixed_parts(tmp_path):
    expected = hashlib.sha256(b"\x02\0\0\0\0\0\0\0ab" + b"\x01\0\0\0\0\0\0\0c").hexdigest()
    assert hash_parts([b"ab", b"c"]) == f"sha256:{expected}"
    (tmp_path / "config.json").write_bytes(b"ab")
    assert hash_config(tmp_path) == hash_parts([b"ab"])


def test_the_text_is_laid_out_as_rust_does():
    text = to_text({"made_from": {"model_config": "sha256:0"}, "family": "f", "num_llm_layers": 4})
    assert text == (
        '{\n"dflop": "model_profile",\n"format_version": 1,\n"made_from": {"model_config":"sha256:0"},\n'
        '"family": "f",\n"num_llm_layers": 4\n}\n'
    )


def test_a_failed_write_leaves_the_old_file_whole(tmp_path, monkeypatch):
    path = tmp_path / "new" / "profile.json"
    write_artifact(path, {"family": "old"})
    old = path.read_text()
    assert json.loads(old) == {"dflop": "model_profile", "format_version": 1, "family": "old"}

    def full(_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(dflop.ArtifactError, match=r"cannot write `.*profile\.json`: No space left"):
        write_artifact(path, {"family": "new"})
    assert path.read_text() == old
    assert [p.name for p in path.parent.iterdir()] == ["profile.json"]
    with pytest.raises(dflop.ArtifactError, match="cannot write"):
        write_artifact(path / "below.json", {})
