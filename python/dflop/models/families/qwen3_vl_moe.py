"""Qwen3-VL with experts: as Qwen3-VL, with a router and experts in place of the MLP of each layer of the LLM.

    hidden_TD --router--> K experts of each row --> their results, weighted --> hidden_TD

Each row finds its experts by its own values. So packing, microbatches and layouts do not change them. Every
rank has all experts of its layers.
"""

from __future__ import annotations

from transformers import Qwen3VLMoeConfig, Qwen3VLMoeForConditionalGeneration
from transformers.models.qwen3_vl_moe.modeling_qwen3_vl_moe import Qwen3VLMoeModel

from dflop.models.backbone import layers_with_experts
from dflop.models.families.qwen3_vl import Qwen3Vl
from dflop.models.rules import Rule


class Qwen3VlMoe(Qwen3Vl):
    """`ModelAdapter` of Qwen3-VL with experts."""

    family = "qwen3_vl_moe"
    config_class = Qwen3VLMoeConfig
    model_class = Qwen3VLMoeForConditionalGeneration
    model_methods = Qwen3VLMoeModel

    def rules(self) -> list[Rule]:
        """See `FamilyAdapter.rules`."""
        text = self.text
        have = layers_with_experts(text)
        are_alike = len(set(have)) == 1
        # The text model of transformers 5.17 has no such field.
        has_router_loss = getattr(text, "output_router_logits", False)
        is_dealt = text.decoder_sparse_step > 1 and not are_alike
        field = "decoder_sparse_step" if is_dealt else "mlp_only_layers"
        return [
            *super().rules(),
            Rule(
                "text_config.output_router_logits",
                has_router_loss,
                not has_router_loss,
                "false: the loss that balances experts is of a microbatch and not of its samples, so the "
                "gradient would depend on the schedule",
            ),
            Rule(
                f"text_config.{field}",
                getattr(text, field),
                are_alike,
                f"such that all {len(have)} layers have experts or none (now {sum(have)} have): the planner "
                "knows one kind of layer",
            ),
            Rule(
                "text_config.num_experts_per_tok",
                text.num_experts_per_tok,
                not any(have) or 1 <= text.num_experts_per_tok <= text.num_experts,
                f"from 1 to `num_experts`, {text.num_experts}",
            ),
        ]


ADAPTER = Qwen3VlMoe
