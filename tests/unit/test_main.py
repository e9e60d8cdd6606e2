"""The command `dflop` where the Python side is not all there."""

from __future__ import annotations

import importlib.util

import pytest

from dflop import __main__ as command


@pytest.mark.parametrize("verb", ["profile_model", "train", "rehearse", "export"])
def test_without_torch_a_verb_says_what_to_install(verb, monkeypatch, capsys):
    """In a line, before any process is started: each of those would end in a traceback."""
    found = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "torch" else found(name))
    monkeypatch.setattr(command, "run_cli", lambda _: (0, {"verb": verb, "arguments": {}}))
    assert command.main() == 2
    shown = capsys.readouterr()
    assert shown.out == ""
    assert shown.err == "error: `torch` is not installed\n\nhint: pip install 'dflop[train]'\n"


def test_a_rehearsal_that_is_far_off_says_why():
    """What was asked to be slow, else how fast it was asked to be; nothing up to 10 %."""
    asked = {"speed": 1.0, "slow_ranks": [], "slow_shapes": None, "network_latency_ns": 0}
    found = {"error_median": 0.25, "ranks": 32}
    why = command._why_off
    assert why({**found, "error_median": 0.1}, asked) == ""
    late = "rehearsed steps are 25 % off simulated ones: the ranks were late, as this machine could not wake 32 of them in time"
    assert why(found, asked) == late
    assert why(found, {**asked, "speed": 50.0}) == f"{late} at `--speed 50`; take a lower one"
    slowed = {**asked, "speed": 50.0, "slow_ranks": [{"rank": 3}], "network_latency_ns": 5}
    known = (
        "rehearsed steps are 25 % off simulated ones, which know nothing of --slow-rank and --network-latency"
    )
    assert why(found, slowed) == known
