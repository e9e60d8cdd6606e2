"""Each example runs as it stands, on two ranks where it trains on several."""

from __future__ import annotations

import runpy
import sys
from pathlib import Path

import pytest
import torch
from ranks import results, run_ranks
from test_trainers import as_launched, free_port

import warm

EXAMPLES = Path(__file__).parent.parent.parent / "examples"
TRAINS = (
    "train_ddp",
    "train_fsdp2",
    "train_transformers",
    "train_trl",
    "train_accelerate",
    "train_lightning",
)
ALONE = ("load_torchtitan", "pack_energon")


def test_no_example_is_left_out():
    """What stands in the folder is run."""
    scripts = {path.stem for path in EXAMPLES.glob("*.py")}
    assert scripts == {*TRAINS, *ALONE, "tiny"}


@pytest.mark.some(3)
@pytest.mark.parametrize("name", TRAINS)
def test_an_example_trains_on_two_ranks(name, tmp_path, quiet):
    """Without an error, and within a minute."""
    port = free_port()
    torch.manual_seed(0)

    def run(rank):
        as_launched(rank, port)
        sys.path.insert(0, str(EXAMPLES))
        # What ranks print is not pytest's.
        sys.stdout = sys.stderr
        runpy.run_path(str(EXAMPLES / f"{name}.py"), run_name="__main__")

    results(run_ranks(2, run, tmp_path / "ranks", timeout_s=280))


@pytest.mark.parametrize("name", ALONE)
def test_an_example_runs(name):
    """And says something."""
    done = warm.run([f"{name}.py"], cwd=EXAMPLES, check=True)
    assert done.stdout.strip()
