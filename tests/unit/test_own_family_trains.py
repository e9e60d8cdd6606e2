"""`model.family` beside a `model_type` that dflop trains: both must give the same shapes, or no rank starts."""

from __future__ import annotations

import pytest

import dflop
from dflop._native import run_cli
from dflop.data.family import load
from dflop.runtime.launch import _check_own_shapes

SHAPES = """
def shape(kind, height, width, num_images, num_frames, fps, duration_s, sample_rate, max_frames, sample_fps):
    frames = [k * num_frames // 2 for k in range(2)] if kind == "video" else []
    return {"segments": [(2, 81)], "pieces": [162], "frame_indices": frames}


shape.marks = {"image": ("<image>", "<image>"), "video": ("<video>", "<video>")}
"""


def test_shapes_of_ones_own_that_the_family_does_not_have_are_refused_before_any_rank_starts(tmp_path):
    """Two tiles for every picture, where LLaVA-OneVision gives some other number."""
    folder = tmp_path / "demo"
    assert run_cli(["dflop", "demo-data", str(folder), "--samples", "24"]) == (0, None)
    (folder / "two_tiles.py").write_text(SHAPES)
    config = folder / "dflop.yaml"
    plain = config.read_text()
    config.write_text(plain.replace("model:\n", "model:\n  family: two_tiles:shape\n", 1))
    profile = ["dflop", "profile", "data", "-c", str(config)]
    assert run_cli(profile, load("two_tiles:shape", folder)) == (0, None)
    request = {
        "config": {"model": {"dir": str(folder / "model"), "family": "two_tiles:shape"}},
        "config_path": str(config),
        "data_profile": str(folder / "data_profile.parquet"),
    }
    with pytest.raises(
        dflop.ProfileError, match="`model_type` is `llava_onevision`, which is what trains"
    ) as caught:
        _check_own_shapes(request)
    assert "profiled as" in str(caught.value)
    assert "leave out `model.family`" in caught.value.__notes__[0]
    # Without a function of one's own there is nothing to compare: the profile is of the family's own rule.
    request["config"]["model"]["family"] = None
    _check_own_shapes(request)
