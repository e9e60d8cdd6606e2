"""Which ranks decode media ahead: those whose stages read inputs, and no others."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
from conformance import write_model
from toy_run import write_plan

from dflop.runtime.ahead import begin


@pytest.mark.parametrize(
    ("family", "decoding"),
    [("llava_onevision", [True, False, False]), ("qwen2_audio", [True, True, False])],
)
def test_workers_and_arenas_are_where_inputs_are_read(family, decoding, tmp_path):
    """An encoder of two stages before an LLM of one. Each layer of Qwen2-Audio must know where silence is."""
    plan = write_plan(tmp_path / "plan.json", 1, 1, 1, 2, encoder_pp=2)
    model_dir = write_model(tmp_path, family)
    options = SimpleNamespace(ahead_bytes=1 << 20, evaluation=None, workers=1, model_dir=model_dir)
    for rank, decodes in enumerate(decoding):
        ahead = begin(options, plan, {"RANK": str(rank)})
        try:
            assert (ahead.workers is not None, ahead.arena is not None) == (decodes, decodes), rank
        finally:
            ahead.close()
