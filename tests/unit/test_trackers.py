"""What trackers get of each step; Weights & Biases without a network."""

from __future__ import annotations

import sys
import time

import pytest

from dflop import Error
from dflop.runtime.trackers import ID_FILE, Trackers, evaluation_values, values_of

METRICS = {
    "step": 0,
    "arm": "aware",
    "loss": 2.5,
    "grad_norm": None,
    "step_ns": 2_000_000,
    "predicted_ns": 1_000_000,
    "bubble_ratio": 0.25,
    "data_wait_ns": 500_000,
    "tokens": 100,
    "tokens_per_s": 10.0,
    "samples_per_s": 1.0,
    "mfu": None,
    "learning_rates": {"llm": 1e-4},
    "loss_by": {
        "kind": {"image": {"loss": 3.0, "label_tokens": 4, "samples": 1}},
        "source": {"a": {"loss": None, "label_tokens": 4, "samples": 1}},
    },
}


def test_what_is_not_known_is_no_curve_or_no_number():
    values = values_of(METRICS)
    assert "run/mfu" not in values
    assert values["run/tokens_per_s"] == 10.0
    assert values["step/ms"] == 2.0
    assert values["step/tokens_per_s"] == 50_000
    assert values["train/loss_by_kind/image"] == 3.0
    assert values["rates/llm"] == 1e-4
    for name in ("train/grad_norm", "train/loss_by_source/a"):
        assert values[name] != values[name], name
    assert evaluation_values({"loss": 1.0, "loss_by": METRICS["loss_by"]}) == pytest.approx(
        {
            "evaluation/loss": 1.0,
            "evaluation/loss_by_kind/image": 3.0,
            "evaluation/loss_by_source/a": float("nan"),
        },
        nan_ok=True,
    )


def test_tensorboard_has_a_run_an_arm(tmp_path):
    trackers = Trackers(tmp_path)
    trackers.step(METRICS)
    trackers.step({**METRICS, "arm": "blind"})
    trackers.step({**METRICS, "is_rehearsed": True})
    trackers.close()
    names = sorted(path.name for path in (tmp_path / "tensorboard").iterdir())
    assert names == ["aware", "aware-rehearsed", "blind"]
    assert not (tmp_path / ID_FILE).exists()


@pytest.mark.more
def test_wandb_keeps_all_steps_offline_and_goes_on_under_one_name(tmp_path, monkeypatch):
    pytest.importorskip("wandb")
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_SILENT", "true")
    out, later = tmp_path / "run", tmp_path / "later"
    out.mkdir()
    later.mkdir()
    first = Trackers(out, "a project")
    for step in range(2):
        first.step({**METRICS, "step": step})
    first.close()
    name = (out / ID_FILE).read_text()
    assert is_logged(b"aware/train/loss_by_kind/image", 2, out, name)
    # From a checkpoint after the first step: the second is trained again. In a directory of its own, since W&B
    # names those of two runs within a second alike.
    (later / ID_FILE).write_text(name)
    second = Trackers(later, "a project", first_step=1)
    second.step({**METRICS, "step": 1, "loss": 2.0})
    second.evaluation({"step": 2, "loss": 1.5}, "aware")
    second.close()
    assert is_logged(b"aware/evaluation/loss", 1, later, name)


def is_logged(text, times, out, name):
    """Whether W&B has written a text of the run of that name so often; it writes in a process of its own."""
    (log,) = out.glob("wandb/offline-run-*/*.wandb")
    assert log.stem == f"run-{name}"
    deadline = time.monotonic() + 120
    while log.read_bytes().count(text) < times and time.monotonic() < deadline:
        time.sleep(0.1)
    return log.read_bytes().count(text) >= times


def test_wandb_that_is_not_installed_is_said_at_the_start(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "wandb", None)
    with pytest.raises(Error, match="`train.wandb_project` is `p`, the package wandb is not installed"):
        Trackers(tmp_path, "p")
