"""Operations, parameters and kept bytes of the analytic model are PyTorch's own, to the last one."""

import functools
import json

import pytest
import torch
from flop_configs import CONFIGS, QWEN2, TILES
from flop_modules import (
    CASES,
    MODULES,
    SOME,
    WITH_CLIP,
    build,
    class_of,
    encoder_layer,
    encoder_layers,
    encoder_tower,
    is_native,
    llm_layer,
)
from kept_bytes import has_short_convolution, kept_besides, kept_bytes
from torch.utils.checkpoint import checkpoint
from torch.utils.flop_counter import FlopCounterMode
from transformers import AutoConfig

import dflop.models.packing
from dflop._native import testing
from dflop.models.towers import backbone_of


@pytest.fixture(scope="module", autouse=True)
def _one_thread():
    torch.set_num_threads(1)


def operations(ran, run=None):
    """What the counter says of forward and backward."""
    leaf = ran.leaf.detach().requires_grad_(ran.wants_gradient)
    with FlopCounterMode(display=False) as forward:
        result = (run or ran.run)(leaf)
    result = result[0] if isinstance(result, tuple) else result
    if not result.requires_grad:
        return forward.get_total_flops(), 0
    with FlopCounterMode(display=False) as backward:
        result.sum().backward()
    return forward.get_total_flops(), backward.get_total_flops()


def convolution_flops(name, segments):
    """What the counter counts too much in the backward of a convolution along the tokens."""
    text = CONFIGS[name]["text_config"]
    if has_short_convolution(name):
        return _convolution_flops(text["hidden_size"], text["conv_L_cache"], segments)
    keys = text["linear_num_key_heads"] * text["linear_key_head_dim"]
    width = 2 * keys + text["linear_num_value_heads"] * text["linear_value_head_dim"]
    return _convolution_flops(width, text["linear_conv_kernel_dim"], segments)


def _convolution_flops(width, kernel, segments):
    return (width - 1) * sum(2 * (tokens + kernel - 1) * width * kernel for tokens in segments)


@pytest.fixture
def frozen():
    """Freezes parameters for the length of a test."""
    changed = []

    def freeze(parts):
        for part in parts:
            for parameter in part.parameters():
                if parameter.requires_grad:
                    changed.append(parameter.requires_grad_(False))

    yield freeze
    for parameter in changed:
        parameter.requires_grad_(True)


@pytest.mark.some(60, 30)
@pytest.mark.parametrize(("name", "module"), CASES)
def test_operations_are_those_of_the_counter(name, module, frozen):
    ran = MODULES[module](name)
    ours = testing.module_flops(json.dumps(CONFIGS[name]), module, ran.segments)
    forward, backward = operations(ran)
    # The counter takes the gradient of a convolution's weights for one of all columns with all.
    overcounted = (
        convolution_flops(name, ran.segments) if module in ("llm_linear_layer", "llm_conv_layer") else 0
    )
    backward -= overcounted
    assert (ours["forward"], ours["input"] + ours["weight"]) == (forward, backward)
    again = operations(ran, lambda leaf: checkpoint(ran.run, leaf, use_reentrant=False))
    assert again == (forward, backward + overcounted + (ours["recomputed"] if backward else 0))
    if ran.wants_gradient:
        frozen(ran.parts)
        assert operations(ran) == (forward, ours["input"])


@pytest.mark.parametrize(("name", "module"), CASES)
def test_parameters_are_those_of_the_module(name, module):
    counted, _ = testing.model_modules(json.dumps(CONFIGS[name]))
    parts = MODULES[module](name).parts
    assert counted[module][1] == sum(p.numel() for part in parts for p in part.parameters())


@pytest.mark.parametrize("name", CONFIGS)
def test_the_whole_has_the_parameters_of_the_model(name):
    counted, total = testing.model_modules(json.dumps(CONFIGS[name]))
    model = build(name)
    assert total == sum(p.numel() for p in model.parameters())
    layers = len(encoder_layers(name, encoder_tower(model))) - (name in WITH_CLIP)
    others = sum(counted.get(f"encoder_{kind}_layer", (0, 0))[0] for kind in ("window", "merged"))
    assert counted["encoder_layer"][0] + others == layers
    others = sum(
        counted.get(f"llm_{kind}_layer", (0, 0))[0] for kind in ("linear", "sliding", "conv", "dense")
    )
    assert counted["llm_layer"][0] + others == len(backbone_of(model).layers)


@pytest.mark.parametrize("place", ["neither", "whole", "text"])
@pytest.mark.parametrize("name", [name for name in CONFIGS if " " not in name])
def test_embedding_and_head_are_tied_where_hugging_face_ties_them(name, place):
    config = {**CONFIGS[name], "text_config": dict(CONFIGS[name]["text_config"])}
    config.pop("tie_word_embeddings", None)
    if place != "neither":
        (config if place == "whole" else config["text_config"])["tie_word_embeddings"] = True
    with torch.device("meta"):
        model = class_of(name)(AutoConfig.for_model(**config))
    _, total = testing.model_modules(json.dumps(config))
    # A matrix that is shared comes once.
    assert total == sum(p.numel() for p in model.parameters())


@pytest.mark.parametrize("tokens", [[14], [3, 40, 1, 17]])
def test_packed_attention_counts_alike(tokens):
    """The path of the training: segments of several sizes in one sequence."""
    ran = llm_layer("llava_onevision", sum(tokens), 1)
    config = build("llava_onevision").config.text_config
    bounds = torch.tensor([0, *tokens]).cumsum(0).to(torch.int32)
    before = config._attn_implementation
    config._attn_implementation = dflop.models.packing.PACKED
    try:
        found = operations(ran, functools.partial(ran.run, cu_seq_lens_q=bounds, segment_tokens=tokens))
    finally:
        config._attn_implementation = before
    ours = testing.module_flops(json.dumps(CONFIGS["llava_onevision"]), "llm_layer", tokens)
    assert found == (ours["forward"], ours["input"] + ours["weight"])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", CONFIGS)
def test_an_llm_layer_keeps_what_the_rule_says(name, dtype):
    ran = llm_layer(name)
    layer = ran.parts[0]
    # What transformers takes where nothing else is asked for.
    build(name).config.text_config._experts_implementation = "grouped_mm"
    angles = tuple(tensor.to(dtype) for tensor in ran.constants)
    ran.run = functools.partial(ran.run.func, **{**ran.run.keywords, "position_embeddings": angles})
    ran.constants = angles
    ours = testing.module_activation_bytes(
        json.dumps(CONFIGS[name]), "llm_layer", ran.segments, value_bytes=dtype.itemsize
    )
    try:
        layer.to(dtype)
        assert kept_bytes(ran, dtype) == ours + kept_besides(name, ran, dtype)
    finally:
        layer.to(torch.float32)
        build(name).config.text_config._experts_implementation = "eager"


@pytest.mark.parametrize("name", CONFIGS)
def test_an_encoder_layer_keeps_what_the_rule_says(name):
    ran = encoder_layer(name)
    ours = testing.module_activation_bytes(
        json.dumps(CONFIGS[name]), "encoder_layer", ran.segments, value_bytes=4
    )
    # Hugging Face's loop over segments copies their results into one tensor; packed kernels do not.
    copied = ran.leaf.numel() * 4 if is_native(name) or name.startswith("minicpm") else 0
    if name.startswith("glm_ocr"):
        # No copies are made for the norms of queries and keys: the product of both, which is kept for the values, is read.
        copied -= 2 * ran.leaf.numel() * 4
    assert kept_bytes(ran, torch.float32) == ours + copied


def test_norms_over_heads_of_an_encoder_keep_copies_in_half_precision():
    """Beside them the whole product is kept, of which values are a part."""
    ran, name = encoder_layer("glm_ocr"), "glm_ocr"
    ours = testing.module_activation_bytes(
        json.dumps(CONFIGS[name]), "encoder_layer", ran.segments, value_bytes=2
    )
    try:
        ran.parts[0].to(torch.bfloat16)
        assert kept_bytes(ran, torch.bfloat16) == ours + ran.leaf.numel() * 2
    finally:
        ran.parts[0].to(torch.float32)


def test_both_forms_of_internvl_are_one():
    hf = CONFIGS["internvl"]
    chat = {
        "model_type": "internvl_chat",
        "vision_config": {**TILES, "qkv_bias": True},
        "llm_config": QWEN2,
    }
    for module in MODULES:
        if module not in SOME:
            sizes = [17, 17]
            assert testing.module_flops(json.dumps(chat), module, sizes) == testing.module_flops(
                json.dumps(hf), module, sizes
            )
    assert testing.model_modules(json.dumps(chat)) == testing.model_modules(json.dumps(hf))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"model_type": "gpt"}, "`model_type` is `gpt`"),
        ({"vision_config": None}, "`vision_config` is missing, must be a section"),
        ({"text_config": {**QWEN2, "model_type": "mamba"}}, '`text_config.model_type` is "mamba"'),
        ({"text_config": {**QWEN2, "hidden_size": 0}}, "`text_config.hidden_size` is 0"),
        ({"text_config": {**QWEN2, "num_key_value_heads": 4}}, "must divide 6"),
        ({"text_config": {**QWEN2, "use_sliding_window": True}}, "`text_config.use_sliding_window`"),
        ({"vision_feature_layer": [1, 2]}, "`vision_feature_layer` is [1,2]"),
        ({"quantization_config": {"bits": 4}}, "quantized weights do not train"),
    ],
)
def test_what_is_not_known_is_refused_by_name(change, message):
    config = {**CONFIGS["llava_onevision"], **change}
    with pytest.raises(dflop.ProfileError, match="config.json") as raised:
        testing.model_modules(json.dumps(config))
    assert message in str(raised.value)
