"""Qwen2.5-VL: as Qwen2-VL, but most layers attend within windows, and positions in time count seconds."""

from __future__ import annotations

from typing import TYPE_CHECKING

from transformers import Qwen2_5_VLConfig, Qwen2_5_VLForConditionalGeneration
from transformers.models.qwen2_5_vl.modeling_qwen2_5_vl import Qwen2_5_VLModel

from dflop.models.patches import PatchFamily, patch_plan
from dflop.models.rules import Rule

if TYPE_CHECKING:
    from typing import Any

    from dflop.models.tensor import LayerPlan


class Qwen25Vl(PatchFamily):
    """`ModelAdapter` of Qwen2.5-VL."""

    family = "qwen2_5_vl"
    config_class = Qwen2_5_VLConfig
    model_class = Qwen2_5_VLForConditionalGeneration
    model_methods = Qwen2_5_VLModel
    has_time = True

    @property
    def encoder_width(self) -> int:
        """See `PatchFamily.encoder_width`."""
        return self.vision.hidden_size

    @property
    def window_size(self) -> int | None:
        """See `PatchFamily.window_size`."""
        return self.vision.window_size

    @property
    def full_layers(self) -> frozenset[int]:
        """See `PatchFamily.full_layers`."""
        return frozenset(self.vision.fullatt_block_indexes) & frozenset(range(self.vision.depth))

    def encoder_plan(self) -> LayerPlan:
        """See `FamilyAdapter.encoder_plan`."""
        width = ("vision_config.intermediate_size", self.vision.intermediate_size)
        return patch_plan(self.vision.num_heads, ("gate_proj", "up_proj"), "down_proj", width)

    def rules(self) -> list[Rule]:
        """See `FamilyAdapter.rules`."""
        named: Any = self.vision.fullatt_block_indexes
        wanted = f"indexes of layers below {self.vision.depth}, at least one"
        return [Rule("vision_config.fullatt_block_indexes", named, bool(self.full_layers), wanted)]


ADAPTER = Qwen25Vl
