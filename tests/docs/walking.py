"""Walks a page: its blocks, run one after the other as a reader would, in one shell."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable


def walk(steps: Iterable[tuple[str, str]], folder: Path) -> None:
    """Runs blocks in `folder`: commands, Python, and YAML, which becomes `dflop.yaml`; fails where one of them does.

    Args:
        steps: Language (`sh`, `python` or `yaml`) and text of each.
        folder: Where they run.
    """
    lines = ["set -euo pipefail"]
    for language, text in steps:
        if language == "yaml":
            lines.append(f"cat > dflop.yaml <<'END_OF_BLOCK'\n{text}END_OF_BLOCK")
        elif language == "python":
            lines.append(f"'{sys.executable}' - <<'END_OF_BLOCK'\n{text}END_OF_BLOCK")
        else:
            lines.append(text)
    # The commands of this very environment, whatever else is installed.
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    walked = subprocess.run(
        ["bash", "-c", "\n".join(lines)],
        cwd=folder,
        env={**os.environ, "PATH": path, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=500,
    )
    assert walked.returncode == 0, f"{walked.stdout[-3000:]}\n{walked.stderr[-3000:]}"
