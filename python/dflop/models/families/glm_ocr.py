"""GLM-OCR: the encoder of GLM-4.1V with norms over heads, without learnt positions; a backbone without bias.

The width of a layer's MLP is a field of its own here, and the projector's is three times the backbone's.
"""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

from transformers import GlmOcrConfig, GlmOcrForConditionalGeneration, GlmOcrVisionConfig
from transformers.models.glm_ocr.modeling_glm_ocr import GlmOcrModel

from dflop.models.families.glm4v import Glm4v
from dflop.models.patches import embed_patches, patch_plan

if TYPE_CHECKING:
    from collections.abc import Sequence
    from typing import Any

    from torch import nn

    from dflop.models.tensor import LayerPlan


class GlmOcr(Glm4v):
    """`ModelAdapter` of GLM-OCR."""

    family = "glm_ocr"
    config_class = GlmOcrConfig
    vision_class = GlmOcrVisionConfig
    model_class = GlmOcrForConditionalGeneration
    model_methods = GlmOcrModel
    embed = staticmethod(embed_patches)
    is_bicubic = False

    @property
    def grid_side(self) -> int | None:
        """See `PatchFamily.grid_side`: positions are only rotations."""
        return None

    @property
    def head_size(self) -> int:
        """See `Glm4v.head_size`. The file may say it: heads need not fill the width."""
        return getattr(self.text, "head_dim", None) or super().head_size

    def before_layers(self, model: Any) -> Sequence[nn.Module]:
        """See `FamilyAdapter.before_layers`."""
        return [model.visual.patch_embed]

    def encoder_plan(self) -> LayerPlan:
        """See `FamilyAdapter.encoder_plan`."""
        width = ("vision_config.intermediate_size", self.vision.intermediate_size)
        plan = patch_plan(self.vision.num_heads, ("gate_proj", "up_proj"), "down_proj", width)
        return dataclasses.replace(plan, partial=("attn.q_norm", "attn.k_norm"))


ADAPTER = GlmOcr
