"""On a GPU: clocks, counted bytes, memory that runs out, and a whole profile of a tiny model."""

from __future__ import annotations

import pytest
import torch
from tiny_llava import write_model_dir

from dflop.models.parameters import squared_norm
from dflop.profiling import profile_model
from dflop.profiling.memory import watch_allocations
from dflop.profiling.timer import time_on_cuda
from dflop.profiling.workbench import is_out_of_memory

pytestmark = pytest.mark.gpu

DEVICE = torch.device("cuda")


def test_each_phase_has_its_own_time():
    """Work that was queued in one phase and runs in the next would count there."""
    timing = time_on_cuda([lambda _: torch.cuda._sleep(100_000_000), lambda _: None])
    assert timing.phases_ns[0] > 10_000_000
    assert timing.phases_ns[1] < 1_000_000


def test_bytes_are_those_of_the_allocator():
    """A peak inside, and what is left."""

    def work():
        left = torch.empty(1 << 20, dtype=torch.uint8, device=DEVICE)
        torch.empty(1 << 22, dtype=torch.uint8, device=DEVICE)
        return left

    left, phase = watch_allocations(work, DEVICE)
    assert (phase.peak_bytes, phase.end_bytes) == ((1 << 20) + (1 << 22), 1 << 20)
    del left


def test_a_norm_copies_a_piece_at_a_time():
    """Of all at once it would copy a gibibyte, here four times the gradients."""
    gradients = torch.full((1 << 27,), 0.5, dtype=torch.bfloat16, device=DEVICE)
    found, phase = watch_allocations(lambda: squared_norm(gradients), DEVICE)
    assert float(found) == pytest.approx(2.0**25, rel=1e-9)
    assert phase.peak_bytes < 300 << 20


def test_memory_that_runs_out_is_known_as_such():
    with pytest.raises(RuntimeError) as error:
        torch.empty(1 << 45, dtype=torch.uint8, device=DEVICE)
    assert is_out_of_memory(error.value)


def test_a_tiny_model_is_measured(tmp_path):
    """All modules in bfloat16, by the fused attention, with recomputation and the backward in two."""
    request = {
        "model_dir": str(write_model_dir(tmp_path)),
        "device": "cuda",
        "dtype": "bfloat16",
        "budget_s": 5.0,
        "max_encoder_tokens": 81 * 4,
        "max_encoder_segment_tokens": 81,
        "max_llm_tokens": 300,
        "max_segment_tokens": 200,
        "max_label_tokens": 40,
        "recompute": ["none", "selective", "full"],
    }
    profile = profile_model(request)
    device = profile["device"]
    assert (device["kind"], device["num_neighbours"], device["num_threads"]) == ("cuda", 0, 0)
    assert device["name"] == torch.cuda.get_device_name()
    assert device["driver"]
    # Kernels and libraries take hundreds of MiB; all of the device they do not.
    assert 100 << 20 < profile["memory"]["context_bytes"] < device["memory_bytes"] // 2
    for name, module in profile["modules"].items():
        assert module["linear"]["points"], name
        assert all(point["forward_ns"] > 1_000 for point in module["linear"]["points"]), name
    layer = profile["modules"]["llm_layer"]
    assert layer["attention"]["points"]
    assert all(point["activation_bytes"] > 0 for point in layer["linear"]["points"])
    assert set(layer["recompute"]) == {"selective", "full"}
    assert profile["optimizer_ns_per_million"] > 0
