"""What a layer with linear attention or a short convolution keeps, in the analytic model as in PyTorch."""

import functools
import json

import pytest
import torch
from flop_configs import CONFIGS
from flop_modules import build, llm_layer
from kept_bytes import has_linear_attention, has_short_convolution, kept_bytes
from transformers.models.lfm2 import modeling_lfm2

from dflop._native import testing
from dflop.models.delta_rule import CONVOLUTION, keep_samples_apart


@pytest.fixture(scope="module", autouse=True)
def _one_thread():
    torch.set_num_threads(1)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", [name for name in CONFIGS if has_linear_attention(name)])
def test_a_layer_with_linear_attention_keeps_what_the_rule_says(name, dtype, monkeypatch):
    """All but the recurrence, whose fused kernels need a GPU: here a stand-in that keeps nothing."""
    ran = llm_layer(name, is_other=True)
    layer, text = ran.parts[0], CONFIGS[name]["text_config"]
    keys, values = (text[f"linear_num_{kind}_heads"] for kind in ("key", "value"))
    widths = keys * text["linear_key_head_dim"], values * text["linear_value_head_dim"]

    class Nothing(torch.autograd.Function):
        @staticmethod
        def forward(ctx, query, key, value, g, beta):
            return torch.empty_like(value, memory_format=torch.contiguous_format)

        @staticmethod
        def backward(ctx, gradient):
            raise NotImplementedError

    def rule(query, key, value, g, beta, **_):
        return Nothing.apply(query, key, value, g, beta), None

    modeling = __import__(type(layer).__module__, fromlist=["rule"])
    monkeypatch.setattr(modeling, "torch_chunk_gated_delta_rule", rule)
    build(name).config.text_config._experts_implementation = "grouped_mm"
    ours = testing.module_activation_bytes(
        json.dumps(CONFIGS[name]), "llm_linear_layer", ran.segments, value_bytes=dtype.itemsize
    )
    of_rule = (4 * widths[0] + widths[1] + 65 * values) * dtype.itemsize + 4 * (values + 2 * keys)
    try:
        layer.to(dtype)
        # Rows of the convolution behind the last token; one more than the weight of two norms; the rates.
        padding = 2 * (text["linear_conv_kernel_dim"] - 1) * (2 * widths[0] + widths[1]) * dtype.itemsize
        besides = padding + 4 * 2 * text["hidden_size"] + 2 * 4 * values
        assert kept_bytes(ran, dtype) == ours - sum(ran.segments) * of_rule + besides
    finally:
        layer.to(torch.float32)
        build(name).config.text_config._experts_implementation = "eager"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", [name for name in CONFIGS if has_short_convolution(name)])
def test_a_layer_with_a_short_convolution_keeps_what_the_rule_says(name, dtype):
    """In a pack, as in training: what the samples' convolutions gave is put side by side."""
    keep_samples_apart(modeling_lfm2, (CONVOLUTION,))
    ran = llm_layer(name, tokens=14, copies=1, is_other=True)
    layer, sizes = ran.parts[0], [3, 1, 10]
    ran.run = functools.partial(ran.run, segment_tokens=sizes)
    ours = testing.module_activation_bytes(
        json.dumps(CONFIGS[name]), "llm_conv_layer", sizes, value_bytes=dtype.itemsize
    )
    try:
        layer.to(dtype)
        assert kept_bytes(ran, dtype) == ours
    finally:
        layer.to(torch.float32)
