"""The README's blocks run as they stand."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import warm

ROOT = Path(__file__).parent.parent.parent


def blocks(language: str) -> list[str]:
    """The README's code blocks of a language, in order."""
    return re.findall(rf"```{language}\n(.*?)```", (ROOT / "README.md").read_text(), flags=re.S)


def test_every_python_block_runs() -> None:
    found = blocks("python")
    assert found
    for block in found:
        warm.run(["-c", block], check=True, cwd=ROOT)


def test_importing_and_balancing_needs_no_torch() -> None:
    code = (
        "import sys, dflop\n"
        "answer = dflop.balance([3, 0, 7, 2], [4, 5, 1, 2], 2)\n"
        "assert sorted(set(answer.assignment)) == [0, 1], answer\n"
        "sampler = dflop.BalancedBatchSampler([(3, 4), (0, 5), (7, 1), (2, 2)], batch_size=2)\n"
        "assert sorted(i for batch in sampler for i in batch) == [0, 1, 2, 3]\n"
        "assert 'torch' not in sys.modules and 'numpy' not in sys.modules\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, cwd=ROOT, timeout=300)


def test_the_two_commands_are_make_targets() -> None:
    commands = re.findall(r"^\s*(make [a-z]+)", "\n".join(blocks("console") + blocks("sh")), flags=re.M)
    assert {"make demo", "make test"} <= set(commands)
    makefile = (ROOT / "Makefile").read_text()
    for command in commands:
        assert re.search(rf"^{command.split()[1]}:", makefile, flags=re.M), command
