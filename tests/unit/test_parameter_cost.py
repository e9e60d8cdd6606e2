"""What samples cost by the parameters of a model equals the operations that PyTorch counts."""

from __future__ import annotations

import pytest
import tiny_gemma4
import torch
from tiny_families import TINY
from torch.utils.flop_counter import FlopCounterMode
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText

import dflop
from dflop.integrations import cost_of_parameters

LENGTHS = (24, 40)


def make(name: str) -> torch.nn.Module:
    torch.manual_seed(0)
    content = tiny_gemma4.SMALL if name == "gemma4-e2b" else TINY[name]
    settings = {**content, "model_type": name.split("-")[0]}
    config = AutoConfig.for_model(**settings)
    return AutoModelForImageTextToText.from_config(config, attn_implementation="eager").train()


def counted(model: torch.nn.Module, length: int, *, has_backward: bool = True) -> int:
    """Operations of one text of the LLM; eager attention multiplies all pairs of tokens."""
    ids = torch.randint(0, 8, (1, length))
    with FlopCounterMode(display=False) as counter:
        logits = model(input_ids=ids, attention_mask=torch.ones_like(ids)).logits
        if has_backward:
            logits.sum().backward()
    return counter.get_total_flops()


def of_text(cost: dflop.integrations.ParameterCost, length: int) -> float:
    """The same by parameters; a causal sample's pairs count half, the counter counts all."""
    return cost.llm_token * length + cost.llm_pair * length**2


@pytest.mark.parametrize("name", ["llava", "qwen2_5_vl", "internvl", "gemma3", "gemma4-e2b"])
def test_the_llm_costs_what_pytorch_counts(name):
    model = make(name)
    cost = cost_of_parameters(model)
    for length in LENGTHS:
        assert of_text(cost, length) == pytest.approx(counted(model, length), rel=0.02)


def test_what_is_frozen_costs_less():
    """A frozen encoder runs forward alone; a frozen LLM hands gradients on to it, and has none of its own."""
    model = make("llava")
    full = cost_of_parameters(model)
    forward = cost_of_parameters(model, is_trained=False)
    assert forward.encoder_token == pytest.approx(full.encoder_token / 3)
    assert (forward.llm_token, forward.llm_pair) == pytest.approx((full.llm_token / 3, full.llm_pair / 3))
    tower, projector = model.model.vision_tower, model.model.multi_modal_projector
    tower.requires_grad_(False)
    frozen = cost_of_parameters(model)
    linear = [m for m in projector.modules() if isinstance(m, torch.nn.Linear)]
    trained = 2 * sum(m.weight.numel() for m in linear)
    assert frozen.encoder_token == pytest.approx((full.encoder_token - 3 * trained) / 3 + 3 * trained)
    assert frozen.llm_token == full.llm_token
    projector.requires_grad_(False)
    assert cost_of_parameters(model).encoder_token == pytest.approx(full.encoder_token / 3)
    model.requires_grad_(False)
    projector.requires_grad_(True)
    alone = cost_of_parameters(model)
    assert alone.llm_token == pytest.approx(full.llm_token * 2 / 3)
    assert alone.llm_pair == full.llm_pair
    model.requires_grad_(False)
    nothing = cost_of_parameters(model)
    assert nothing.llm_token == pytest.approx(full.llm_token / 3)
    assert of_text(nothing, 40) == pytest.approx(counted(model, 40, has_backward=False), rel=0.02)


def test_a_head_with_adapters_or_a_copy_that_trains_is_the_llms():
    """Both stand in a wrapper of peft, which is no map itself; the copy's original computes nothing."""
    peft = pytest.importorskip("peft")
    plain = make("llava")
    head = plain.lm_head.weight.numel()

    def found(**settings):
        lora = peft.LoraConfig(r=2, target_modules=["q_proj"], **settings)
        return cost_of_parameters(peft.get_peft_model(make("llava"), lora))

    alone, copied = found(), found(modules_to_save=["lm_head"])
    assert copied.encoder_token == alone.encoder_token
    # A copy that trains has a gradient of its own besides.
    assert copied.llm_token == alone.llm_token + 2 * head
    both = peft.LoraConfig(r=2, target_modules=["q_proj", "lm_head"])
    adapted = cost_of_parameters(peft.get_peft_model(make("llava"), both))
    assert adapted.encoder_token == alone.encoder_token
    assert adapted.llm_token == alone.llm_token + 6 * 2 * (
        plain.lm_head.in_features + plain.lm_head.out_features
    )


def test_the_encoder_costs_what_pytorch_counts_but_for_pairs():
    model = make("llava")
    vision = model.config.vision_config
    pixels = torch.randn(2, 3, vision.image_size, vision.image_size)
    with FlopCounterMode(display=False) as counter:
        model.get_image_features(pixels, vision_feature_layer=-1)
    tokens = (vision.image_size // vision.patch_size) ** 2 + 1
    layers, width = vision.num_hidden_layers, vision.hidden_size
    pairs = 2 * layers * 4 * width * tokens**2
    model.requires_grad_(False)
    found = cost_of_parameters(model).encoder_token * 2 * tokens
    assert found == pytest.approx(counter.get_total_flops() - pairs, rel=0.05)


def test_of_experts_those_count_that_a_token_reads():
    model = make("qwen3_vl_moe")
    text = model.config.text_config
    cost = cost_of_parameters(model)
    every = 6 * sum(w.numel() for n, w in model.get_decoder().named_parameters() if "experts." in n)
    dense = cost.llm_token - every * text.num_experts_per_tok / text.num_experts
    others = [
        module.weight.numel()
        for module in [*model.get_decoder().modules(), model.lm_head]
        if isinstance(module, torch.nn.Linear)
    ]
    assert dense == pytest.approx(6 * sum(others))
    assert 0 < text.num_experts_per_tok < text.num_experts


DEEPSEEK = {
    "hidden_size": 32, "intermediate_size": 48, "moe_intermediate_size": 16, "num_hidden_layers": 2,
    "first_k_dense_replace": 1, "num_attention_heads": 2, "num_key_value_heads": 2, "n_routed_experts": 4,
    "num_experts_per_tok": 2, "n_group": 2, "topk_group": 1, "q_lora_rank": 8, "kv_lora_rank": 8,
    "qk_rope_head_dim": 4, "qk_nope_head_dim": 8, "v_head_dim": 8, "vocab_size": 64,
}  # fmt: skip
"""Its block of experts says their number, and so do the experts inside."""


@pytest.mark.parametrize("name", ["qwen3_vl_moe", "deepseek_v3"])
@pytest.mark.parametrize("targets", [["gate_up_proj"], ["gate_up_proj", "down_proj"]])
def test_experts_inside_wrappers_of_peft_count_once(name, targets):
    """Two wrappers are nested. What is frozen has no gradient of its own, so two operations of six fall away."""
    peft = pytest.importorskip("peft", minversion="0.18")
    if name == "deepseek_v3":
        model = AutoModelForCausalLM.from_config(AutoConfig.for_model(name, **DEEPSEEK))
    else:
        model = make(name)
    full = cost_of_parameters(model).llm_token
    named = [f"experts.{target}" for target in targets]
    lora = peft.LoraConfig(r=2, target_modules=[], target_parameters=named)
    adapted = peft.get_peft_model(model, lora)
    adapters = [weight.numel() for key, weight in adapted.named_parameters() if "lora_" in key]
    assert len(adapters) >= 2 * len(targets)
    assert cost_of_parameters(adapted).llm_token == pytest.approx(full * 2 / 3 + 6 * sum(adapters))


def test_gemma_4_e2b_costs_what_its_published_sizes_say():
    """Tables of embeddings cost nothing, layers that read keys of others have none; sounds have an encoder of their own."""
    width, mlp, layers, shared, heads, vocabulary, own = 1536, 6144, 35, 20, 8, 262_144, 256
    kinds = (["sliding_attention"] * 4 + ["full_attention"]) * 7
    text = {
        "hidden_size": width, "intermediate_size": mlp, "num_hidden_layers": layers, "num_attention_heads": heads,
        "num_key_value_heads": 1, "head_dim": 256, "global_head_dim": 512, "layer_types": kinds,
        "num_kv_shared_layers": shared, "use_double_wide_mlp": True, "hidden_size_per_layer_input": own,
    }  # fmt: skip
    config = AutoConfig.for_model("gemma4", text_config=text, vision_config={}, audio_config={})
    with torch.device("meta"):
        cost = cost_of_parameters(AutoModelForImageTextToText.from_config(config))
    maps = vocabulary * width + layers * own * width
    queries = 0
    for index, kind in enumerate(kinds):
        head, reads_others = (512 if kind == "full_attention" else 256), index >= layers - shared
        maps += 2 * width * heads * head + (0 if reads_others else 2 * width * head)
        maps += 3 * width * mlp * (2 if reads_others else 1) + 2 * width * own
        queries += heads * head
    assert cost.llm_token == 6 * maps
    assert cost.llm_pair == 12 * queries
    # 16 layers of 768, and what makes features of them.
    patch, features = 16 * 16 * 3 * 768, 768 * width
    assert cost.encoder_token == 6 * (16 * (4 * 768**2 + 3 * 768 * 3072) + patch + features)
    # 12 layers of 1,024: two MLPs of four times the width, attention, a convolution. Two convolutions before them.
    sounds = 12 * (23 * 1024**2 + 5 * 1024) + 9 * (128 + 128 * 32)
    assert cost.sound_token == 6 * (sounds + 1024 * 1024 + 1024 * 1536 + 1536 * width)


def test_costs_of_a_data_profile_take_it_and_another_module_is_refused():
    cost = cost_of_parameters(make("llava"))
    costs = dflop.costs([(0, 10), (50, 60)], cost=cost)
    assert costs.encoder_ns[0] == 0
    ratio = cost((50, 60))[0] / cost((50, 60))[1]
    assert costs.encoder_ns[1] / costs.llm_ns[1] == pytest.approx(ratio, rel=1e-6)
    with pytest.raises(ValueError, match="`Linear` has no LLM backbone with layers that `get_decoder` finds"):
        cost_of_parameters(torch.nn.Linear(2, 2))
