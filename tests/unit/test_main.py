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
