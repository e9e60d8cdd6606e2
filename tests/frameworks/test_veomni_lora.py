"""What VeOmni's own LoRA of experts costs by parameters: every parameter counts once, whatever wraps it.

`make test-frameworks` runs these tests.
"""

from __future__ import annotations

import pytest
from transformers import AutoConfig, AutoModelForCausalLM

pytest.importorskip("veomni", reason="VeOmni is not installed: `make test-frameworks`")
from veomni.lora import moe_layers

from dflop.integrations import cost_of_parameters

ALIKE = {"num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 2, "vocab_size": 64}
ALIKE |= {"hidden_size": 32, "moe_intermediate_size": 16, "intermediate_size": 48, "num_experts_per_tok": 2}
CONFIGS = {
    "qwen3_moe": {**ALIKE, "num_experts": 4, "head_dim": 16, "decoder_sparse_step": 1},
    # Its block of experts says their number, and so do the experts inside.
    "deepseek_v3": {
        **ALIKE,
        **{"n_routed_experts": 4, "n_group": 2, "topk_group": 1, "first_k_dense_replace": 1},
        **{
            "q_lora_rank": 8,
            "kv_lora_rank": 8,
            "qk_rope_head_dim": 4,
            "qk_nope_head_dim": 8,
            "v_head_dim": 8,
        },
    },
}


@pytest.mark.parametrize("name", CONFIGS)
@pytest.mark.parametrize("kind", ["LoraIndependentExperts", "LoraSharedExperts"])
def test_experts_count_once(name, kind):
    """What is frozen has no gradient of its own; of an adapter of each expert those count that a token reads."""
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(name, **CONFIGS[name]))
    full = cost_of_parameters(model).llm_token
    model.requires_grad_(False)
    blocks = [
        module for module in model.modules() if hasattr(getattr(module, "experts", None), "gate_up_proj")
    ]
    for block in blocks:
        block.experts = getattr(moe_layers, kind)(block.experts, r=2, lora_alpha=4)
    adapters = sum(weight.numel() for key, weight in model.named_parameters() if ".lora_" in key)
    read = adapters * (2 / 4 if kind == "LoraIndependentExperts" else 1)
    assert blocks
    assert cost_of_parameters(model).llm_token == pytest.approx(full * 2 / 3 + 6 * read)
