"""The benchmark of the cost model: draws within what was measured, and numbers that are those of its rows."""

import importlib.util
from pathlib import Path

import pytest

PATH = Path(__file__).parents[2] / "benches" / "cost.py"
REQUEST = {
    "max_encoder_tokens": 810,
    "max_llm_tokens": 2_000,
    "max_segment_tokens": 700,
    "max_label_tokens": 300,
}


@pytest.fixture(scope="module")
def cost():
    spec = importlib.util.spec_from_file_location("bench_cost", PATH)
    module = importlib.util.module_from_spec(spec)
    import sys

    sys.modules["bench_cost"] = module
    spec.loader.exec_module(module)
    return module


def test_shapes_lie_within_the_measured_ranges(cost):
    shapes = cost.draw_shapes(REQUEST, 81, 4)
    assert {shape.module for shape in shapes} == {"encoder", "first", "middle", "last", "whole"}
    assert shapes == cost.draw_shapes(REQUEST, 81, 4), "equal seeds, equal shapes"
    for shape in shapes:
        assert shape.tiles * 81 <= 810
        assert sum(shape.lengths) <= 2_000
        assert all(2 <= length <= 700 for length in shape.lengths)
        assert shape.labels <= 300
        assert shape.features <= sum(shape.lengths)
    assert "middle" not in {shape.module for shape in cost.draw_shapes(REQUEST, 81, 2)}


def test_numbers_are_those_of_the_rows(cost):
    times = [
        {"module": "whole", "phase": phase, "error": error, "extrapolated": error > 0.5}
        for phase, error in (("forward", -0.1), ("forward", 0.02), ("backward", 0.6))
    ]
    memory = [{"error": error} for error in (0.05, -0.01, 0.08)]
    result = cost.summarise(times, memory)
    assert result["time_error_median"] == 0.1
    assert result["time_error_p95"] == 0.6
    assert result["memory_overprediction_max"] == 0.08
    assert result["memory_underpredicted"] == 1
    assert (result["points"], result["extrapolated"]) == (3, 1)
    assert result["by_module"]["whole forward"]["points"] == 2
