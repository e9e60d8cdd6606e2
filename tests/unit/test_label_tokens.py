"""A global batch without label tokens is refused before a rank starts: its loss would be divided by nothing."""

from __future__ import annotations

import json
import re

import pytest

from dflop._native import run_cli


def planned(folder, global_batch_size, answered):
    """A planned run of six samples, of which those `answered` have an answer; its configuration."""
    assert run_cli(["dflop", "demo-data", str(folder), "--samples", "8"]) == (0, None)
    turns = [[{"from": "human", "value": "Hi"}, {"from": "gpt", "value": "Ho"}][: 1 + a] for a in answered]
    lines = [json.dumps({"conversations": turn}) + "\n" for turn in turns]
    (folder / "data/rows.jsonl").write_text("".join(lines))
    path = folder / "dflop.yaml"
    text = path.read_text().replace("data/mixture.yaml", "data/rows.jsonl")
    for field, value in [("global_batch_size", global_batch_size), ("num_ranks", 1), ("num_microbatches", 1)]:
        text = re.sub(rf"{field}: \d+", f"{field}: {value}", text)
    path.write_text(text)
    for verb in (["profile", "data"], ["profile", "model", "--estimate", "--hardware", "h100"], ["plan"]):
        assert run_cli(["dflop", *verb, "-c", str(path)]) == (0, None)
    return str(path)


@pytest.mark.parametrize("answered", [[False] * 6, [True, *[False] * 5]])
def test_a_run_with_a_batch_that_teaches_nothing_does_not_start(answered, tmp_path, capfd):
    config = planned(tmp_path / "demo", 2, answered)
    capfd.readouterr()
    status, request = run_cli(["dflop", "train", "-c", config, "--other-device"])
    assert (status, request) == (2, None)
    said = capfd.readouterr().err
    count = 6 - sum(answered)
    assert re.search(rf"step \d would have no label token, .*: {count} of 6 samples have none", said), said
    assert "hint: take samples without an answer out of the mixture" in said


def test_samples_without_answers_are_trained_beside_others(tmp_path):
    config = planned(tmp_path / "demo", 6, [True, *[False] * 5])
    status, request = run_cli(["dflop", "train", "-c", config, "--other-device"])
    assert status == 0
    assert request is not None
    assert request["verb"] == "train"
