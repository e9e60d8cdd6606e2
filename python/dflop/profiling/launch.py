"""Starts the profiler in a new process, whose allocator and threads are set as in training."""

from __future__ import annotations

import json
import os
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dflop.child import run_child

if TYPE_CHECKING:
    from collections.abc import Mapping

_QUIET = {"TORCH_CPP_LOG_LEVEL": "ERROR"}
"""While bytes are counted on a CPU, PyTorch's allocator warns of every thousandth block that is freed then
and was there before. The count misses nothing by that: it is of what is allocated later."""


def launch(request: Mapping[str, Any]) -> int:
    """Measures as `request` says, in a child process: an allocator reads its settings only when it starts.

    Args:
        request: as the command line makes it; see `Request` of `profiling/model.py`. `environment` is set for
            the child where the user has not set it.

    Returns:
        The exit status: 0 done, 2 the model cannot be measured, 130 interrupted.
    """
    # Only the first rank keeps records. Another rank may come here when the first has begun to write them.
    is_first = os.environ.get("RANK", "0") == "0"
    if request.get("fresh") and is_first:
        Path(request["partial"]).unlink(missing_ok=True)
    environment = _QUIET | dict(request.get("environment") or {}) | dict(os.environ)
    with tempfile.NamedTemporaryFile("w", suffix=".json", encoding="utf-8") as file:
        json.dump(dict(request), file)
        file.flush()
        command = [sys.executable, "-m", "dflop.profiling.worker", file.name]
        status, caught = run_child(command, environment, "the process that measures")
    # If the signal came when the profile was complete, the child has ended with 0 and said what it wrote.
    if caught is not None and status != 0:
        # What the child has measured is kept on disk.
        if is_first:
            print("interrupted; the same command goes on from here", file=sys.stderr)
        return 128 + caught
    return 128 - status if status < 0 else status
