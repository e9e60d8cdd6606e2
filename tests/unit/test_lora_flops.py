"""Adapters in the analytic model: operations, parameters and kept bytes are those of peft on Hugging Face's layers."""

import copy
import functools
import json

import pytest
import torch
from flop_configs import CONFIGS
from flop_modules import Ran, build, llm_layer
from kept_bytes import kept_besides, kept_bytes
from test_flops import operations
from torch import nn
from torch.utils.checkpoint import checkpoint

from dflop._native import testing
from dflop.models.adapters import add_adapters, is_adapter
from dflop.profiling.families.lora import add_adapters as add_measured

RANK = 3
LAYERS = ("llm_layer", "llm_linear_layer", "llm_sliding_layer", "llm_conv_layer", "llm_dense_layer")
FAMILIES = [name for name in CONFIGS if " " not in name]


@pytest.fixture(scope="module", autouse=True)
def _one_thread():
    torch.set_num_threads(1)


def adapted_layer(name) -> Ran:
    """A layer of the LLM as training has it under the recipe `lora`: only the adapters train."""
    ran = llm_layer(name)
    whole = torch.nn.ModuleDict(
        {
            "language_model": torch.nn.ModuleDict(
                {"layers": torch.nn.ModuleList([copy.deepcopy(ran.parts[0])])}
            )
        }
    )
    add_adapters(whole, RANK, 2.0 * RANK, seed=0)
    for path, parameter in whole.named_parameters():
        parameter.requires_grad_(is_adapter(path))
    layer = whole["language_model"]["layers"][0]
    run = functools.partial(layer, **ran.run.keywords)
    return Ran(run, ran.leaf, True, ran.segments, [layer], ran.constants)


@pytest.mark.some(11)
@pytest.mark.parametrize("name", FAMILIES)
def test_operations_are_those_of_the_counter(name):
    ran = adapted_layer(name)
    ours = testing.module_flops(json.dumps(CONFIGS[name]), "llm_layer", ran.segments, lora_rank=RANK)
    forward, backward = operations(ran)
    assert (ours["forward"], ours["input"] + ours["weight"]) == (forward, backward)
    again = operations(ran, lambda leaf: checkpoint(ran.run, leaf, use_reentrant=False))
    assert again == (forward, backward + ours["recomputed"])
    # W is of the adapters alone.
    for part in ran.parts:
        part.requires_grad_(False)
    assert operations(ran) == (forward, ours["input"])


@pytest.mark.parametrize("name", FAMILIES)
def test_parameters_are_those_of_peft_and_of_what_is_measured(name):
    counted, _ = testing.model_modules(json.dumps(CONFIGS[name]), lora_rank=RANK)
    without, _ = testing.model_modules(json.dumps(CONFIGS[name]))
    (layer,) = adapted_layer(name).parts
    assert counted["llm_layer"][1] == sum(p.numel() for p in layer.parameters())
    trained = sum(p.numel() for p in layer.parameters() if p.requires_grad)
    assert counted["llm_layer"][1] - without["llm_layer"][1] == trained
    measured = copy.deepcopy(llm_layer(name).parts[0])
    add_measured(measured, RANK)
    assert trained == sum(p.numel() for p in measured.parameters() if p.requires_grad)
    assert all(counted[module] == without[module] for module in counted if module not in LAYERS)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", FAMILIES)
def test_a_layer_keeps_what_the_rule_says(name, dtype):
    text = build(name).config.text_config
    text._experts_implementation = "grouped_mm"
    try:
        ran = adapted_layer(name)
        angles = tuple(tensor.to(dtype) for tensor in ran.constants)
        ran.run = functools.partial(ran.run.func, **{**ran.run.keywords, "position_embeddings": angles})
        ran.constants = angles
        ran.parts[0].to(dtype)
        ours = testing.module_activation_bytes(
            json.dumps(CONFIGS[name]), "llm_layer", ran.segments, value_bytes=dtype.itemsize, lora_rank=RANK
        )
        assert kept_bytes(ran, dtype) == ours + kept_besides(name, ran, dtype)
    finally:
        text._experts_implementation = "eager"


def test_adapters_add_a_map_of_low_rank():
    layer = nn.Sequential(nn.Linear(5, 4), nn.ReLU())
    states = torch.randn(3, 5)
    before = layer(states)
    add_measured(layer, 2)
    down, up = layer[0].lora_A.weight, layer[0].lora_B.weight
    wanted = torch.relu(layer[0].weight @ states.T + layer[0].bias[:, None] + 2.0 * up @ down @ states.T).T
    torch.testing.assert_close(layer(states), wanted)
    nn.init.zeros_(up)
    assert torch.equal(layer(states), before)
