"""What a run is doing before its first step, for people: starting takes longer than many steps."""

from __future__ import annotations

import os
import sys


def say(text: str, verb: str = "train") -> None:
    """A line on stderr, from the process that starts the ranks and from the first of them.

    Args:
        text: What begins now, as in "building the model".
        verb: The command's name, which begins the line.
    """
    if os.environ.get("RANK", "0") == "0":
        sys.stderr.write(f"{verb}: {text}\n")
        sys.stderr.flush()
