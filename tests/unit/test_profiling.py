"""Profiling: what is measured, what is counted, and what is kept after an interruption."""

import time
from pathlib import Path

import pytest
import torch
from tiny_llava import write_model_dir

import dflop
from dflop.models import load_adapter
from dflop.profiling import hash_config, profile_model
from dflop.profiling.assemble import assemble
from dflop.profiling.cases import Gradients, find_layers
from dflop.profiling.curves import Built, build_curves
from dflop.profiling.families import load_pieces
from dflop.profiling.memory import saved_for_backward, watch_allocations
from dflop.profiling.pieces import PieceSettings, Prepared
from dflop.profiling.records import Records
from dflop.profiling.request import Request
from dflop.profiling.session import MIN_REPEATS_OTHER, Session
from dflop.profiling.timer import Timing, summarise, time_on_cpu
from dflop.profiling.workbench import is_out_of_memory

CPU = torch.device("cpu")
WHOLE = PieceSettings(CPU, torch.float32)
SIZES = {
    "max_encoder_tokens": 81 * 4,
    "max_encoder_segment_tokens": 81,
    "max_llm_tokens": 300,
    "max_segment_tokens": 200,
    "max_label_tokens": 40,
}
MODULES = ["encoder_embedding", "encoder_layer", "projector", "llm_embedding", "llm_layer", "llm_head"]


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
        "recompute": ["none", "selective", "full"],
        **SIZES,
    }
    shown = []
    return request, profile_model(request, lambda ratio, label: shown.append((ratio, label))), shown


def curves_of(model_dir, names=MODULES, **changes):
    """(curves of some modules, request) without points."""
    request = Request.parse({"model_dir": str(model_dir), **SIZES, **changes})
    built = [Built(piece, WHOLE, "") for piece in load_pieces(Path(model_dir)) if piece.name in names]
    return build_curves(built, request, Gradients()), request


def test_a_profile_has_the_fields_of_the_artifact(profiled, model_dir):
    _, profile, shown = profiled
    assert list(profile) == [
        "made_from",
        "family",
        "model",
        "is_estimated",
        "device",
        "hidden_bytes",
        "is_tied",
        "network",
        "modules",
        "variants",
        "optimizer_ns_per_million",
        "memory",
    ]
    assert profile["made_from"] == {"model_config": hash_config(model_dir)}
    assert (profile["family"], profile["model"]) == ("llava_onevision", model_dir.name)
    assert profile["is_estimated"] is False
    assert profile["hidden_bytes"] == 48 * 4
    device = dict(profile["device"])
    assert device.pop("name")
    assert device == {
        "kind": "cpu",
        "num_threads": 1,
        "num_neighbours": 1,
        "dtype": "float32",
        "torch": torch.__version__,
        "driver": "",
        "memory_bytes": 0,
    }
    assert profile["optimizer_ns_per_million"] > 0
    assert list(profile["modules"]) == MODULES
    counts = {name: module["count"] for name, module in profile["modules"].items()}
    assert counts == {**dict.fromkeys(MODULES, 1), "encoder_layer": 2, "llm_layer": 4}
    ratios = [ratio for ratio, _ in shown]
    assert ratios == sorted(ratios)
    assert ratios[-1] == 1.0
    assert any("llm_layer attention" in label and "error up to" in label for _, label in shown)


def test_curves_ascend_and_reach_the_largest_size(profiled):
    _, profile, _ = profiled
    last = {}
    for name, module in profile["modules"].items():
        for part in ("linear", "attention"):
            points = module[part]["points"]
            sizes = [point["size"] for point in points]
            assert all(a < b for a, b in zip(sizes, sizes[1:], strict=False))
            for point in points:
                assert point["forward_ns"] > 0
                assert point["backward_ns"] > 0
                assert point["repeats"] >= MIN_REPEATS_OTHER
                assert point["workspace_bytes"] >= 0
            last[name, part] = sizes[-1] if sizes else None
    assert last == {
        **{(name, "attention"): None for name in MODULES},
        ("encoder_embedding", "linear"): 81 * 4,
        ("encoder_layer", "linear"): 81 * 4,
        ("projector", "linear"): 81 * 4,
        ("llm_embedding", "linear"): 300,
        ("llm_layer", "linear"): 384,
        ("llm_layer", "attention"): 200,
        ("llm_head", "linear"): 40,
    }
    assert profile["modules"]["encoder_layer"]["segment_tokens"] == 81


def test_parameters_of_the_modules_are_those_of_the_model(profiled, model_dir):
    _, profile, _ = profiled
    modules = profile["modules"]
    total = sum(module["count"] * module["num_parameters"] for module in modules.values())
    assert total == sum(p.numel() for p in load_adapter(model_dir).reference_model(0).parameters())
    for module in modules.values():
        assert module["parameter_bytes"] == 4 * module["num_parameters"]


def test_input_and_weight_gradients_are_apart(profiled):
    """Pixels want no gradient, attention has no weights; other pieces have a time of each."""
    _, profile, _ = profiled
    for point in profile["modules"]["encoder_embedding"]["linear"]["points"]:
        assert (point["input_ns"], point["weight_ns"]) == (0, point["backward_ns"])
    for point in profile["modules"]["llm_layer"]["attention"]["points"]:
        assert (point["input_ns"], point["weight_ns"]) == (point["backward_ns"], 0)
    for name in ("encoder_layer", "llm_layer", "llm_head", "llm_embedding", "projector"):
        point = profile["modules"][name]["linear"]["points"][-1]
        assert point["input_ns"] > 0
        assert point["weight_ns"] > 0


def test_recomputation_keeps_less(profiled):
    _, profile, _ = profiled
    for name in ("encoder_layer", "llm_layer"):
        module = profile["modules"][name]
        kept = {point["size"]: point["activation_bytes"] for point in module["linear"]["points"]}
        attention = {point["size"]: point["activation_bytes"] for point in module["attention"]["points"]}
        modes = module["recompute"]
        assert list(modes) == ["selective", "full"]
        for selective, full in zip(modes["selective"], modes["full"], strict=True):
            size = full["size"]
            segments = [128] * (size // 128) if size >= 128 else [size]
            of_attention = sum(attention.get(segment, 0) for segment in segments)
            # Selective: attention keeps what it keeps anyway.
            whole, less = kept[size] + of_attention, selective["activation_bytes"] + of_attention
            width = 48 if name == "llm_layer" else 32
            # The input of the layer, and what layers share but each counts: cosines and sines.
            assert 4 * width * size <= full["activation_bytes"] <= 4 * (width + 24) * size
            assert full["activation_bytes"] < less < whole
            assert full["extra_ns"] >= 0
    assert all("recompute" not in profile["modules"][name] for name in ("projector", "llm_head"))


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
    assert sum("phases_ns" in line for line in first.splitlines()) >= 9
    # The interruption may also cut a line short.
    partial.write_text(first + '{"key": "cut sh')
    profile_model(request)
    assert partial.read_text().startswith(first)


def test_linear_and_attention_bytes_add_up_to_the_pack(profiled, model_dir):
    _, profile, _ = profiled
    layer = profile["modules"]["llm_layer"]
    linear = {p["size"]: p["activation_bytes"] for p in layer["linear"]["points"]}
    attention = {p["size"]: p["activation_bytes"] for p in layer["attention"]["points"]}
    curves, _ = curves_of(model_dir, ["llm_layer"])
    curve = next(curve for curve in curves if curve.part == "linear")
    for size, kept in linear.items():
        case = curve.case(size, with_recompute=False)
        parameters = list(curve.built.module.parameters())
        layers = find_layers(curve.built.module, case.copies)
        saved = saved_for_backward(case.forward, parameters, case.inputs, layers)
        counted = saved.total_bytes + saved.common_bytes
        predicted = case.copies * (kept + sum(attention[segment] for segment in case.segments))
        assert predicted == pytest.approx(counted, abs=case.copies * (1 + len(case.segments)))


def test_what_waits_for_the_weights_is_counted(profiled, model_dir):
    """In closed form for layers; and below what is assumed where nothing was counted."""
    _, profile, _ = profiled
    modules = profile["modules"]
    # Queries, keys and values have one input, gate and up too, and so have the layer norms' readers.
    first = {"llm_layer": {"q_proj", "o_proj", "gate_proj", "down_proj"}}
    first["encoder_layer"] = {"q_proj", "out_proj", "fc1", "fc2"}
    for name, readers in first.items():
        (curve,) = [c for c in curves_of(model_dir, [name])[0] if c.part == "linear"]
        layer = find_layers(curve.built.module, curve.built.piece.num_layers)[0]
        linear = {n.rpartition(".")[2]: m for n, m in layer.named_modules() if isinstance(m, torch.nn.Linear)}
        width = sum(m.out_features + m.in_features * (n in readers) for n, m in linear.items())
        for point in modules[name]["linear"]["points"]:
            assert point["split"]["queued_bytes"] == 4 * width * point["size"]
    for name, module in modules.items():
        attention = {point["size"]: point["activation_bytes"] for point in module["attention"]["points"]}
        curves, _ = curves_of(model_dir, [name])
        for point in module["linear"]["points"]:
            size, split = point["size"], point["split"]
            segments = curves[-1].segments(size) if attention else []
            kept = point["activation_bytes"] + sum(attention[segment] for segment in segments)
            result = 4 * size * (32 if name.startswith("encoder") else 48)
            assert 0 < split["queued_bytes"] <= 2 * kept + result, name
            assert split["input_workspace_bytes"] <= point["workspace_bytes"] + kept + result
            assert split["weight_workspace_bytes"] <= point["workspace_bytes"]
        for point in module["attention"]["points"]:
            assert "split" not in point


def test_allocations_are_counted_to_the_byte():
    """By hand: two tensors of 4,000 bytes, of which one is gone at the end; a view is free."""

    def work():
        first = torch.ones(1000)
        return first.exp().view(10, 100)

    result, allocated = watch_allocations(work, CPU)
    assert (allocated.end_bytes, allocated.peak_bytes) == (4000, 8000)
    _, in_place = watch_allocations(result.exp_, CPU)
    assert (in_place.end_bytes, in_place.peak_bytes) == (0, 0)


class FakePiece:
    """What fake pieces share."""

    name, count, num_layers, wants_input_gradient = "llm_head", 1, 1, True
    segment_tokens = max_segment_tokens = None

    def attention(self, settings):
        """No attention apart."""

    def unit(self):
        """Any size goes."""
        return 1


def test_workspace_is_the_peak_beyond_what_stays(model_dir):
    """A piece of one product: the backward holds the gradients of input and weight; the forward nothing."""

    class Product(FakePiece):
        name = "projector"

        def build(self, settings):
            return torch.nn.Linear(16, 16, bias=False)

        def prepare(self, module, segments, settings):
            rows = torch.ones(sum(segments), 16)
            return Prepared(lambda: module(rows.detach().requires_grad_()), (rows,))

    request = Request.parse(
        {"model_dir": str(model_dir), **SIZES, "budget_s": 0.01, "max_encoder_tokens": 100}
    )
    records = Records(None, "key")
    curves = build_curves([Built(Product(), WHOLE, "")], request, Gradients())
    session = Session(curves, request, 0.01, records, None, "")
    session.prepare()
    session.measure(0.0, 1.0)
    points = assemble(curves, records)["projector"]["linear"]["points"]
    assert [point["size"] for point in points][-1] == 100
    for point in points:
        assert point["activation_bytes"] == 4 * 16 * point["size"]
        assert point["workspace_bytes"] == 4 * 16 * point["size"] + 4 * 16 * 16


def test_activation_bytes_are_those_kept_for_the_backward():
    """By hand: `exp` keeps its result, a product both factors, a view no more than what it is a view of."""
    buffer = torch.ones(1000)
    weight = torch.nn.Parameter(torch.ones(100))

    def forward():
        leaf = buffer[:100].detach().requires_grad_()
        return (leaf * weight).exp().view(10, 10)

    assert saved_for_backward(forward, [weight], [buffer]).total_bytes == 4 * (100 + 100)
    assert saved_for_backward(forward, [weight]).total_bytes == 4 * (1000 + 100)
    assert saved_for_backward(forward, [], [buffer]).total_bytes == 4 * (100 + 100 + 100)


class Hungry(FakePiece):
    """A head that fits up to some number of label tokens."""

    def __init__(self, largest):
        self.largest, self.tried = largest, []

    def build(self, settings):
        """Its parameters."""
        return torch.nn.Linear(4, 4)

    def prepare(self, module, segments, settings):
        """A forward that runs out of memory above the largest size."""
        rows = torch.ones(sum(segments), 4)

        def forward():
            self.tried.append(len(rows))
            if len(rows) > self.largest:
                message = "DefaultCPUAllocator: can't allocate memory"
                raise RuntimeError(message)
            return module(rows.detach().requires_grad_()).sum()

        return Prepared(forward, (rows,))


def session_of(piece, model_dir, records):
    request = Request.parse({"model_dir": str(model_dir), **SIZES, "max_label_tokens": 1000})
    curves = build_curves([Built(piece, WHOLE, "")], request, Gradients())
    return curves, Session(curves, request, 0.01, records, None, "")


def test_a_curve_ends_where_memory_does(model_dir, tmp_path, caplog):
    path = tmp_path / "records.jsonl"
    piece = Hungry(100)
    curves, session = session_of(piece, model_dir, Records(path, "key"))
    session.prepare()
    session.measure(0.0, 1.0)
    # Between the largest that fits and the smallest that does not, a few more were tried.
    curve = curves[0]
    assert 56 <= max(curve.cases) <= 100 < curve.out_of_memory_at <= 178
    assert f"llm_head linear: out of memory at size {curve.out_of_memory_at}" in caplog.text
    module = assemble(curves, Records(path, "key"))["llm_head"]
    assert module["linear"]["out_of_memory_at"] == curve.out_of_memory_at
    assert module["linear"]["points"][-1]["size"] == max(curve.cases)
    # What did not fit is known, and not tried again.
    again = Hungry(100)
    curves, session = session_of(again, model_dir, Records(path, "key"))
    session.prepare()
    assert max(again.tried) <= 100
    assert curves[0].out_of_memory_at == curve.out_of_memory_at


def test_a_piece_that_fits_at_no_size_is_an_error(model_dir):
    _, session = session_of(Hungry(0), model_dir, Records(None, "key"))
    with pytest.raises(dflop.ProfileError, match="`llm_head` does not fit the device even at size 1"):
        session.prepare()


def test_other_errors_are_not_taken_for_memory(model_dir):
    piece = Hungry(100)
    piece.prepare = lambda *_: Prepared(lambda: torch.ones(2) @ torch.ones(3), ())
    _, session = session_of(piece, model_dir, Records(None, "key"))
    with pytest.raises(RuntimeError, match="size"):
        session.prepare()


def test_what_cannot_be_built_is_left_out_with_a_warning(model_dir, caplog):
    request = {"model_dir": str(model_dir), "budget_s": 0.05, "tensor_parallel_degrees": [1, 3], **SIZES}
    profile = profile_model({**request, "recompute": ["none"], "max_label_tokens": 2, "max_llm_tokens": 20})
    assert profile["variants"] == []
    assert "not measured: tensor parallel degree 3, LoRA rank 0" in caplog.text
    assert "recompute" not in profile["modules"]["llm_layer"]


def test_summary_is_of_medians_and_quartiles():
    runs = [(10, 20), (11, 19), (12, 22), (9, 21), (9000, 9000)]
    timings = [Timing(phases) for phases in runs]
    summary = summarise(timings)
    assert (summary.phases_ns, summary.total_ns, summary.repeats) == ((11, 21), 30, 5)
    # Totals 30, 30, 30, 34, 18000: the quartiles are 30 and 34.
    assert summary.spread_ns == 4
    assert summarise(timings[:1]).spread_ns == 0


def test_the_clock_counts_work_and_not_waiting():
    def spin(_):
        end = time.thread_time_ns() + 5_000_000
        while time.thread_time_ns() < end:
            pass

    working_ns, waiting_ns = time_on_cpu([spin, lambda _: time.sleep(0.05)]).phases_ns
    # What the thread itself was given, however long others had the core; a clock on the wall says 50 ms of the other.
    assert working_ns > 4_000_000
    assert waiting_ns < 50_000_000


def test_attention_is_also_measured_where_its_kernel_changes(model_dir):
    curves, _ = curves_of(model_dir, ["llm_layer"], max_llm_tokens=4000, max_segment_tokens=1000)
    attention, linear = curves
    assert {1, 128, 191, 192, 767, 768, 1000} <= set(attention.first_sizes(is_cpu=True))
    assert attention.first_sizes(is_cpu=False) == [1, 32, 62, 125, 128, 250, 500, 1000]
    # Packs are of whole segments, whose attention is known.
    assert linear.last == 4096
    assert [linear.segments(size) for size in (8, 100, 256)] == [[8], [100], [128, 128]]
    assert linear.allowed(1000) == 1024


@pytest.fixture(scope="module")
def variants(model_dir):
    """Profile of the layers' ends with two ranks' cut and LoRA of rank 4."""
    request = {"model_dir": str(model_dir), "budget_s": 0.05, **SIZES, "max_llm_tokens": 24}
    request |= {
        "max_segment_tokens": 12,
        "max_label_tokens": 2,
        "max_encoder_tokens": 81,
        "recompute": ["none"],
    }
    return profile_model({**request, "tensor_parallel_degrees": [2], "lora_rank": 4})


def test_variants_hold_what_they_change(variants):
    asked = [(v["tensor_parallel_degree"], v["lora_rank"]) for v in variants["variants"]]
    assert asked == [(2, 0), (1, 4), (2, 4)]
    cut, lora, both = variants["variants"]
    assert not any(variant["has_collectives"] for variant in variants["variants"])
    # Neither pixels nor projector are cut; LoRA leaves the encoder as it is.
    assert (
        {"encoder_layer", "llm_layer"} <= set(cut["modules"]) <= {"encoder_layer", "llm_layer", *MODULES[3:]}
    )
    assert set(lora["modules"]) == {"llm_embedding", "llm_layer", "llm_head"}
    whole = variants["modules"]["llm_layer"]
    assert 0.45 < cut["modules"]["llm_layer"]["num_parameters"] / whole["num_parameters"] < 0.55
    assert lora["modules"]["llm_layer"]["num_parameters"] > whole["num_parameters"]
    assert set(both["modules"]) >= {"encoder_layer", "llm_layer"}
    # A frozen head has no gradient of weights: all its backward is that of its input.
    for point in lora["modules"]["llm_head"]["linear"]["points"]:
        assert (point["weight_ns"], point["input_ns"]) == (0, point["backward_ns"])
    for point in lora["modules"]["llm_layer"]["linear"]["points"]:
        assert point["weight_ns"] > 0


@pytest.mark.parametrize(
    ("error", "is_one"),
    [
        (torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB"), True),
        (RuntimeError("CUDA error: out of memory\nCUDA kernel errors might be reported later"), True),
        (RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"), True),
        (RuntimeError("cuDNN error: CUDNN_STATUS_ALLOC_FAILED"), True),
        (RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory"), True),
        (MemoryError(), True),
        (RuntimeError("CUDA error: an illegal memory access was encountered"), False),
        (ValueError("out of memory"), False),
    ],
)
def test_what_says_that_memory_ran_out(error, is_one):
    """A curve ends there; any other error ends the measuring."""
    assert is_out_of_memory(error) == is_one


def test_no_gpu_is_an_error_before_anything_is_measured(model_dir, monkeypatch):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    with pytest.raises(dflop.Error, match="local rank 0 has no GPU, PyTorch finds none on this machine"):
        profile_model({"model_dir": str(model_dir), **SIZES, "device": "cuda"})
