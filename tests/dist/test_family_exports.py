"""Three steps of every family, exported: what a plain loop of Hugging Face's model and PyTorch's AdamW gives.

From a model directory with weights, over the samples that `schedules.jsonl` names, text alone among them; global batches
leave microbatches empty. `make test` has each family once, each with another recipe, layout and recompute mode;
`make test-layouts` has every recipe of every family.
"""

from __future__ import annotations

import functools

import pytest
import torch
import torch.utils.tensorboard  # noqa: F401  (imported once, for all forked ranks)
from conformance import SETTINGS
from demo_run import lines, request, run_training
from family_run import LORA, SEED, FamilyRun, PlainLoop, trains
from ranks import results
from tiny_families import CONDITION
from toy_run import write_colocated, write_plan

import dflop.runtime.trainer  # noqa: F401
from dflop._native.testing import load_config
from dflop.models.parameters import kept_buffers
from dflop.runtime.export import export

BATCH, MICROBATCHES = 5, 3
TOLERANCE = 1e-5
"""Of each parameter's change, in its norm: the order of sums differs, nothing else."""
RECIPES = ("full", "projector", "frozen-encoder", "frozen-llm", "lora")
MODES = ("none", "selective", "full")
TENSOR = (
    *((1, 1, 1, 2, 2), (2, 1, 2, "colocated"), (1, 1, 2, 1, 2), (2, 3, 2, "colocated")),
    *((1, 1, 1, 4, 4), (1, 0, 4, "colocated"), (2, 1, 2, "whole encoders")),
)
"""Layouts whose ranks share layers."""
LAYOUTS = ((2, 1, 2), (1, 1, 1), (2, 3), (2, 0))
IN_SUITE = [
    ("llava", "full", (1, 2, 1), "none"),
    ("llava-siglip", "lora", (2, 1, 2), "full"),
    ("llava_next", "lora", (2, 1, 2), "none"),
    ("idefics3", "lora", (2, 1, 2), "full"),
    ("smolvlm", "full", (2, 3, 2, "colocated"), "none"),
    ("lighton_ocr", "full", (1, 1, 1, 2, 2), "none"),
    # Parts of one picture on several ranks, convolutions by their columns.
    ("lfm2_vl", "lora", (2, 1, 2), "none"),
    ("lfm2_vl", "full", (2, 3, 2, "colocated"), "selective"),
    # The merger between layers is cut off with the layer before it.
    ("minicpmv4_6", "lora", (2, 1, 2), "none"),
    ("minicpmv4_6", "full", (2, 3, 2, "colocated"), "selective"),
    ("mistral3", "projector", (2, 1, 2), "full"),
    ("mistral3-ministral3", "full", (1, 1, 1, 2, 2), "selective"),
    ("internvl", "frozen-encoder", (1, 1, 1), "full"),
    ("internvl-qwen3", "full", (2, 3, 2, "colocated"), "selective"),
    ("internvl-qwen3_moe", "full", (2, 1, 2), "none"),
    ("qwen2_vl", "full", (2, 3), "selective"),
    ("qwen2_5_vl", "projector", (2, 1, 2), "none"),
    ("qwen3_vl", "full", (2, 1, 2), "none"),
    ("qwen3_vl_moe", "full", (2, 3), "selective"),
    ("qwen3_vl_moe", "lora", (2, 1, 2), "full"),
    ("qwen3_5", "full", (2, 1, 2), "selective"),
    ("qwen3_5", "lora", (2, 3), "full"),
    ("qwen3_5_moe", "full", (2, 0), "none"),
    ("glm4v", "projector", (2, 1, 2), "selective"),
    ("glm46v", "lora", (2, 3), "none"),
    ("glm4v_moe", "full", (2, 1, 2), "full"),
    ("glm_ocr", "full", (1, 1, 1, 2, 2), "none"),
    ("paddleocr_vl", "lora", (2, 1, 2), "none"),
    ("paddleocr_vl", "full", (2, 3, 2, "colocated"), "full"),
    ("gemma3", "full", (2, 1, 2), "selective"),
    ("gemma3", "lora", (2, 3), "full"),
    ("gemma4", "full", (2, 1, 2), "full"),
    ("gemma4", "lora", (2, 3), "selective"),
    ("gemma4-experts", "full", (2, 3), "full"),
    ("gemma4-experts", "lora", (2, 1, 2), "none"),
    ("qwen2_audio", "frozen-llm", (2, 0), "full"),
    ("audioflamingo3", "full", (2, 1, 2), "selective"),
    ("voxtral", "full", (2, 3, 2, "colocated"), "full"),
    ("voxtral", "lora", (2, 1, 2), "none"),
    # Two encoders: pictures or sounds alone on a rank where ranks meet in each layer, and layers cut.
    ("qwen2_5_omni", "full", (2, 3), "selective"),
    ("qwen2_5_omni", "lora", (2, 1, 2), "full"),
    ("qwen3_omni_moe", "full", (2, 3), "selective"),
    ("qwen3_omni_moe", "lora", (2, 1, 2), "full"),
    # Layers cut over two ranks.
    ("internvl", "full", (1, 1, 1, 2, 2), "none"),
    ("glm4v", "full", (1, 1, 2, 1, 2), "full"),
    ("qwen2_vl", "lora", (2, 3, 2, "colocated"), "selective"),
    ("qwen2_5_omni", "full", (1, 1, 1, 2, 2), "none"),
    # Experts by their width: alone, with one for all and a layer without them, beside an MLP.
    ("qwen3_vl_moe", "full", (1, 1, 1, 2, 2), "selective"),
    ("qwen3_vl_moe", "lora", (2, 3, 2, "colocated"), "full"),
    ("glm4v_moe", "full", (2, 3, 2, "colocated"), "selective"),
    ("gemma4-experts", "full", (1, 1, 2, 1, 2), "full"),
    ("gemma4-experts", "lora", (2, 0, 2, "colocated"), "selective"),
    # The LLM's layers cut over ranks that hold whole encoders: tiles, packed patches, sounds.
    ("llava_next", "full", (1, 1, 2, "whole encoders"), "none"),
    ("qwen2_vl", "full", (2, 3, 2, "whole encoders"), "selective"),
    ("internvl", "frozen-encoder", (2, 0, 2, "whole encoders"), "full"),
    ("qwen2_5_vl", "lora", (1, 3, 2, "whole encoders"), "none"),
    ("voxtral", "frozen-llm", (2, 1, 2, "whole encoders"), "full"),
    # Linear attention by its heads.
    ("qwen3_5", "full", (1, 1, 1, 4, 4), "selective"),
    ("qwen3_5", "lora", (2, 1, 2, "colocated"), "none"),
    ("qwen3_5_moe", "full", (2, 3, 2, "colocated"), "full"),
    ("qwen3_5_moe", "lora", (1, 1, 2, 1, 2), "selective"),
]
"""LLaVA-OneVision stands in `test_weights.py`."""


def others():
    """All that `make test` leaves out: every family with every recipe, layouts and modes in turn."""
    for row, name in enumerate(SETTINGS):
        for column, recipe in enumerate(RECIPES):
            turn = row + column
            case = (name, recipe, LAYOUTS[turn % len(LAYOUTS)], MODES[(turn + row) % len(MODES)])
            if case not in IN_SUITE:
                yield pytest.param(*case, marks=pytest.mark.layouts)
            # That tower has a norm over all heads: it is not cut.
            shared = TENSOR[2] if name == "internvl-llama" else TENSOR[turn % len(TENSOR)]
            case = (name, recipe, shared, MODES[(turn + row + 1) % len(MODES)])
            if case not in IN_SUITE:
                yield pytest.param(*case, marks=pytest.mark.layouts)


def plan_of(run, layout, recompute, recipe):
    """The changes of a request that trains on a layout.

    (encoder dp, LLM dp, LLM pp), or with tensor degrees of both behind them; colocated on (replicas, zero), or
    (replicas, zero, tensor degree, "colocated"); of the LLM alone with "whole encoders"; (replicas, zero, ranks of
    an expert group, "experts").
    """
    path = run.folder / "plan.json"
    sizes = {"global_batch_size": BATCH, "recompute": recompute}
    if len(layout) in (2, 4):
        dp, zero, tensor = (*layout, 1)[:3]
        degrees = {"encoder_tp": 1 if layout[-1] == "whole encoders" else tensor, "llm_tp": tensor}
        if layout[-1] == "experts":
            degrees = {"expert_parallel_degree": tensor}
        plan = write_colocated(path, dp, MICROBATCHES, zero=zero, **degrees, **sizes)
    else:
        encoder_tp, llm_tp = layout[3:] or (1, 1)
        degrees = {"encoder_tp": encoder_tp, "llm_tp": llm_tp}
        plan = write_plan(path, *layout[:3], MICROBATCHES, **degrees, **sizes)
    trains(path, recipe)
    return {"num_ranks": plan.num_ranks, "plan": str(path)}


@pytest.fixture(autouse=True)
def steady(monkeypatch):
    """An epsilon beside which a gradient that is nothing but rounding changes no weight, in the run and in the loop.

    With PyTorch's 1e-8 such a weight makes a step of any size up to the learning rate, and moves all others.
    """
    monkeypatch.setattr(torch.optim, "AdamW", functools.partial(torch.optim.AdamW, eps=1e-3))


@pytest.mark.some(1, 8)
@pytest.mark.parametrize(("name", "recipe", "layout", "recompute"), [*IN_SUITE, *others()], ids=str)
def test_an_export_is_that_of_a_plain_loop(name, recipe, layout, recompute, tmp_path):
    check_trained(
        FamilyRun(name, tmp_path / "demo", BATCH, MICROBATCHES), recipe, layout, recompute, tmp_path
    )


def check_trained(run, recipe, layout, recompute, tmp_path, **train):
    """Three steps, and the export."""
    config = load_config(str(run.folder / "dflop.yaml"))
    config["train"] |= {"recipe": recipe, "max_grad_norm": None, "seed": SEED, **LORA, **train}
    out = tmp_path / "run"
    asked = request(run.folder, out, config=config, **plan_of(run, layout, recompute, recipe))
    ranks = run_training(asked, tmp_path)
    assert set(results(ranks)) == {0}, "\n".join(rank.stderr for rank in ranks)
    check_steps(run, recipe, out, tmp_path)


def check_steps(run, recipe, out, tmp_path):
    """The losses of the three steps of a run, and its export, are those of a plain loop."""
    metrics, turns = (lines(out / f"{journal}.jsonl") for journal in ("metrics", "schedules"))
    assert len(turns) == 3
    # The other recipes start from the same model.
    assert recipe != "full" or run.is_that_of_transformers()
    loop = PlainLoop(run, recipe)
    for turn, m in zip(turns, metrics, strict=True):
        assert loop.step(turn["samples"]) == pytest.approx(m["loss"], rel=1e-5)
    export(
        {"run": str(out), "out": str(tmp_path / "out"), "step": None, "dtype": None, "adapter": False}
        | {"shard_bytes_max": 1 << 30}
    )
    exported = run.adapter.model_class.from_pretrained(tmp_path / "out", dtype=torch.float32)
    expected = loop.exported()
    found = {key: p.detach() for key, p in exported.named_parameters()}
    assert set(found) == set(expected)
    num_told = num_trained = 0
    for key, wanted in expected.items():
        owner, _, kind = key.rpartition(".")
        value, before = found[key], loop.before.get(key, loop.before.get(f"{owner}.base_layer.{kind}"))
        if recipe == "lora" and key not in loop.before and kind == "weight":
            # Merged into what is frozen.
            torch.testing.assert_close(value, wanted, rtol=1e-5, atol=1e-6, msg=key)
            num_told += 1
            num_trained += 1
        elif key not in loop.trained:
            assert torch.equal(value, before), f"{key} is frozen"
        else:
            is_told = ~loop.noise[key]
            num_told += int(is_told.sum())
            num_trained += value.numel()
            way = float((wanted - before)[is_told].norm())
            error = float((value - wanted)[is_told].norm())
            # A float32 near 1 has no finer grain than this.
            grain = torch.finfo(torch.float32).eps * float(wanted[is_told].norm())
            assert error <= max(TOLERANCE * CONDITION.get(run.name, 1) * way, grain), key
    assert num_told > 0.9 * num_trained > 0
    # What no gradient reaches is as it was, and decided where tokens went.
    of_loop = kept_buffers(loop.model)
    buffers = {key.replace(".base_layer", ""): value for key, value in of_loop.items()}
    assert buffers.keys() == kept_buffers(exported).keys()
    for key, value in kept_buffers(exported).items():
        assert torch.equal(value, buffers[key]), key
        assert value.any(), key
