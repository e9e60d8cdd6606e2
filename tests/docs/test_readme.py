"""The README's blocks run as they stand."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

from test_integrations_page import BEFORE

import warm

ROOT = Path(__file__).parent.parent.parent
AFTER = """
assert asked == ["data_profile.parquet"], asked
assert sorted(i for bucket in loader.batch_sampler for i in bucket) == list(range(len(data)))
assert [model(**model_inputs(batch)).logits.shape[0] > 0 for batch in loader]
distributed.destroy_process_group()
"""


def blocks(language: str) -> list[str]:
    """The README's code blocks of a language, in order."""
    return re.findall(rf"```{language}\n(.*?)```", (ROOT / "README.md").read_text(), flags=re.S)


def test_every_python_block_runs() -> None:
    found = blocks("python")
    assert found
    for block in found:
        # The lines for a trainer stand for themselves only where there is a dataset and a model.
        is_of_trainer = "balance_encoder(model)" in block
        warm.run(["-c", BEFORE + block + AFTER if is_of_trainer else block], check=True, cwd=ROOT)


def test_the_numbers_of_the_first_screen_stand_in_the_table_of_all_numbers() -> None:
    """A gain that is measured anew, and changed in one of the two alone, is noticed."""
    table = re.search(r"^\| layout \| by .*?\n\n", (ROOT / "README.md").read_text(), flags=re.S | re.M)
    assert table
    all_numbers = (ROOT / "results/README.md").read_text()
    named = re.findall(r"\d\.\d+(?=x| to |\))|\d,\d{3}(?= ms)", table[0])
    assert len(named) > 12
    assert not [number for number in named if number not in all_numbers]


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
