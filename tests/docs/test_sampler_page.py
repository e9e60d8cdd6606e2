"""The examples of docs/sampler.md run as they stand."""

from __future__ import annotations

import re
from pathlib import Path

import warm

ROOT = Path(__file__).resolve().parents[2]


def test_the_examples_run() -> None:
    """Each block alone, in a process of its own."""
    text = (ROOT / "docs/sampler.md").read_text()
    found = re.findall(r"^```python\n(.*?)^```", text, flags=re.M | re.S)
    assert found
    for block in found:
        warm.run(["-c", block], check=True, cwd=ROOT)
