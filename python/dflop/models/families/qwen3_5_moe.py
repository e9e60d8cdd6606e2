"""Qwen3.5 with experts: as Qwen3.5, with experts and one expert for all in place of the MLP of each layer.

hidden_TD --router--> K experts of each row, weighted --+--> hidden_TD
hidden_TD --shared expert, times its gate ------------- +
"""

from __future__ import annotations

from transformers import Qwen3_5MoeConfig, Qwen3_5MoeForConditionalGeneration
from transformers.models.qwen3_5_moe import modeling_qwen3_5_moe

from dflop.models.delta_rule import keep_samples_apart
from dflop.models.families.qwen3_5 import Qwen35

keep_samples_apart(modeling_qwen3_5_moe)


class Qwen35Moe(Qwen35):
    """`ModelAdapter` of Qwen3.5 with experts."""

    family = "qwen3_5_moe"
    config_class = Qwen3_5MoeConfig
    model_class = Qwen3_5MoeForConditionalGeneration
    model_methods = modeling_qwen3_5_moe.Qwen3_5MoeModel


ADAPTER = Qwen35Moe
