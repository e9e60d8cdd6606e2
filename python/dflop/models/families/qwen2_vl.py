"""Qwen2-VL: pictures at their own resolution in patches, frames of a video in pairs; M-RoPE."""

from __future__ import annotations

from typing import TYPE_CHECKING

from transformers import Qwen2VLConfig, Qwen2VLForConditionalGeneration
from transformers.models.qwen2_vl.modeling_qwen2_vl import Qwen2VLModel

from dflop.models.patches import PatchFamily, patch_plan

if TYPE_CHECKING:
    from dflop.models.rules import Rule
    from dflop.models.tensor import LayerPlan


class Qwen2Vl(PatchFamily):
    """`ModelAdapter` of Qwen2-VL."""

    family = "qwen2_vl"
    config_class = Qwen2VLConfig
    model_class = Qwen2VLForConditionalGeneration
    model_methods = Qwen2VLModel

    def encoder_plan(self) -> LayerPlan:
        """See `FamilyAdapter.encoder_plan`."""
        vision = self.vision
        # The configuration has a ratio; the width to be cut evenly is this product.
        width = ("vision_config.embed_dim x mlp_ratio", int(vision.embed_dim * vision.mlp_ratio))
        return patch_plan(vision.num_heads, ("fc1",), "fc2", width)

    def rules(self) -> list[Rule]:
        """See `FamilyAdapter.rules`."""
        return []


ADAPTER = Qwen2Vl
