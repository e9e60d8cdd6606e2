"""The lines of docs/integrations.md, which `dflop advise` prints: loops run, and all import what is there."""

from __future__ import annotations

import importlib
import re
from pathlib import Path

import pytest

import warm

ROOT = Path(__file__).resolve().parents[2]

BEFORE = """
import sys, tempfile
sys.path.insert(0, "examples")
from tiny import Samples, collate, make_model, model_inputs
from torch import distributed
import dflop
store = distributed.FileStore(tempfile.mktemp(), 1)
distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
data, model, epoch, num_ranks = Samples(), make_model(), 1, 1
of_pairs, asked = dflop.costs, []
def costs(path):
    asked.append(path)
    return of_pairs(data.costs)
dflop.costs = costs
batch = collate([data[i] for i in range(3)])
logits = model(**model_inputs(batch)).logits
"""

AFTER = """
assert asked == ["data_profile.parquet"], asked
state = loader.batch_sampler.state_dict()
assert state["meets"] == MEETS, state
assert sorted(i for bucket in loader.batch_sampler for i in bucket) == list(range(len(data)))
assert int(tokens) == int((batch["labels"][:, 1:] != -100).sum())
loss.backward()
has_second_line = "balance_encoder" in globals()
assert (sum(memoryview(loader.batch_sampler._costs.column("encoder_ns")).cast("Q")) == 0) == has_second_line
distributed.destroy_process_group()
"""


def blocks() -> list[str]:
    """The blocks of Python that begin with the import of dflop: a trainer's lines."""
    text = (ROOT / "docs/integrations.md").read_text()
    found = re.findall(r"^```python\n(.*?)^```", text, flags=re.M | re.S)
    return [block for block in found if block.startswith("import dflop\n")]


def test_each_trainer_has_its_lines() -> None:
    """DDP, FSDP2, FSDP2 with both lines, transformers, TRL, accelerate, Lightning."""
    assert len(blocks()) == 7


@pytest.mark.parametrize("block", [block for block in blocks() if "balanced_loader(" in block])
def test_loops_run_as_they_stand(block: str) -> None:
    """On one rank: every sample once, by the objective that the line names; the loss has a gradient."""
    meets = "phase" if 'meets="phase"' in block else "step"
    code = BEFORE + block + f"MEETS = {meets!r}\n" + AFTER
    warm.run(["-c", code], check=True, cwd=ROOT)


@pytest.mark.parametrize("block", blocks())
def test_what_the_lines_import_is_there(block: str) -> None:
    """Each name of each import, and the call of it that the lines make."""
    compile(block, "block", "exec")
    imports = re.findall(r"^from (\S+) import (.*)$", block, flags=re.M)
    assert imports
    for module, names in imports:
        package = module.removeprefix("dflop.integrations").removeprefix(".")
        if package:
            pytest.importorskip(package)
        found = importlib.import_module(module)
        for name in names.split(", "):
            assert hasattr(found, name), f"{module}.{name}"
            assert f"{name}(" in block, name
