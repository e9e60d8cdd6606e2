"""Runs of `dflop train` whose ranks deal out experts: what they export, and how they go on.

What is compared is that of `test_family_exports.py`: Hugging Face's model in a plain loop, with PyTorch's AdamW.
"""

from __future__ import annotations

import pytest
import torch.utils.tensorboard  # noqa: F401  (imported once, for all forked ranks)
from demo_run import lines, python, request, run_training
from family_run import LORA, SEED, FamilyRun, PlainLoop
from ranks import results
from test_expert_ranks import NAME, WITH_EXPERTS
from test_family_exports import BATCH, MICROBATCHES, check_steps, check_trained, plan_of, steady

import dflop.runtime.trainer  # noqa: F401
from dflop._native.testing import load_config

__all__ = ["steady"]


@pytest.mark.some(0, 1)
@pytest.mark.parametrize(
    ("name", "recipe", "layout", "recompute"),
    [
        (NAME, "full", (4, 3, 2, "experts"), "full"),
        (NAME, "lora", (2, 3, 2, "experts"), "selective"),
        ("gemma4-experts", "full", (2, 2, 2, "experts"), "none"),
        (NAME, "frozen-llm", (2, 0, 2, "experts"), "full"),
        (NAME, "lora", (2, 0, 2, "experts"), "full"),
        (NAME, "projector", (3, 1, 3, "experts"), "none"),
        *((name, "full", (4, 3, 2, "experts"), "selective") for name in WITH_EXPERTS),
        *((name, "lora", (2, 2, 2, "experts"), "full") for name in WITH_EXPERTS),
    ],
    ids=str,
)
def test_an_export_of_dealt_experts(name, recipe, layout, recompute, tmp_path):
    run = FamilyRun(name, tmp_path / "demo", BATCH, MICROBATCHES)
    check_trained(run, recipe, layout, recompute, tmp_path)


@pytest.mark.more
def test_a_run_goes_on_with_other_expert_groups_and_with_none(tmp_path):
    """A step on two groups of two, one on a group of three, one on ranks with all experts; each is evaluated."""
    run = FamilyRun(NAME, tmp_path / "demo", BATCH, MICROBATCHES)
    with (run.folder / "dflop.yaml").open("a") as file:
        file.write("evaluation: {mixture: mixture.yaml, every: 1}\n")
    python(["-m", "dflop", "profile", "data", "--evaluation"], run.folder)
    config = load_config(str(run.folder / "dflop.yaml"))
    config["train"] |= {"max_grad_norm": None, "seed": SEED, **LORA}
    config["checkpoint"] = {"every": 1, "keep": 10}
    out = tmp_path / "run"
    layouts = [(4, 3, 2, "experts"), (3, 0, 3, "experts"), (2, 2)]
    for step, layout in enumerate(layouts):
        asked = {"steps": step + 1, "config": config, **plan_of(run, layout, "full", "full")}
        asked |= {"evaluation_profile": str(run.folder / "evaluation_profile.parquet")}
        if step:
            asked |= {"resume": str(out / f"checkpoints/step-{step}")}
        ranks = run_training(request(run.folder, out, **asked), tmp_path / str(step))
        assert set(results(ranks)) == {0}, "\n".join(rank.stderr for rank in ranks)
    check_steps(run, "full", out, tmp_path)
    loop = PlainLoop(run, "full")
    samples = [loop.sample(index) for index in range(run.num_samples)]
    total = sum(sample.num_targets for sample in samples)
    turns, evaluations = (lines(out / f"{journal}.jsonl") for journal in ("schedules", "evaluations"))
    for turn, evaluation in zip(turns, evaluations, strict=True):
        loop.step(turn["samples"])
        expected = sum(float(loop.loss(sample).detach()) for sample in samples) / total
        assert evaluation["loss"] == pytest.approx(expected, rel=1e-5)
