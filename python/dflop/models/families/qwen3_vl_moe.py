"""Qwen3-VL with experts: as Qwen3-VL, with a router and experts in place of the MLP of each layer of the LLM.

    hidden_TD --router--> K experts of each row --> their results, weighted --> hidden_TD

Each row finds its experts by its own values. So packing, microbatches and layouts do not change them. Every
rank has all experts of its layers; ranks that share layers have each a part of every expert's width.
"""

from __future__ import annotations

from transformers import Qwen3VLMoeConfig, Qwen3VLMoeForConditionalGeneration
from transformers.models.qwen3_vl_moe.modeling_qwen3_vl_moe import Qwen3VLMoeModel

from dflop.models.families.qwen3_vl import Qwen3Vl


class Qwen3VlMoe(Qwen3Vl):
    """`ModelAdapter` of Qwen3-VL with experts."""

    family = "qwen3_vl_moe"
    config_class = Qwen3VLMoeConfig
    model_class = Qwen3VLMoeForConditionalGeneration
    model_methods = Qwen3VLMoeModel


ADAPTER = Qwen3VlMoe
