"""Qwen3-VL: patches with learnt positions; features of several depths of the encoder (DeepStack).

    hidden_NV after the last layer ---------- merger --+
    hidden_NV after each layer of deepstack - merger --+--> features_EW: D of the last layer, then D of each

A feature is W = D x (1 + deep layers) wide. The backbone reads the first D values in place of the embedding.
It adds the next D to the states after its first layer, and so on (`LlmStage`). Each frame pair of a video
stands between texts of its own, which say its time: positions count no seconds.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from transformers import Qwen3VLConfig, Qwen3VLForConditionalGeneration
from transformers.models.qwen3_vl.modeling_qwen3_vl import Qwen3VLModel

from dflop.models.patches import PatchFamily, patch_plan
from dflop.models.rules import Rule

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import nn

    from dflop.models.tensor import LayerPlan


class Qwen3Vl(PatchFamily):
    """`ModelAdapter` of Qwen3-VL."""

    family = "qwen3_vl"
    config_class = Qwen3VLConfig
    model_class = Qwen3VLForConditionalGeneration
    model_methods = Qwen3VLModel
    video_processor_class = "Qwen3VLVideoProcessor"

    @property
    def encoder_width(self) -> int:
        """See `PatchFamily.encoder_width`."""
        return self.vision.hidden_size

    @property
    def grid_side(self) -> int:
        """See `PatchFamily.grid_side`."""
        return int(self.vision.num_position_embeddings**0.5)

    @property
    def deep_layers(self) -> tuple[int, ...]:
        """See `PatchFamily.deep_layers`."""
        return tuple(self.vision.deepstack_visual_indexes)

    def before_layers(self, model: Any) -> Sequence[nn.Module]:
        """See `FamilyAdapter.before_layers`."""
        return [model.visual.patch_embed, model.visual.pos_embed]

    def encoder_plan(self) -> LayerPlan:
        """See `FamilyAdapter.encoder_plan`."""
        width = ("vision_config.intermediate_size", self.vision.intermediate_size)
        return patch_plan(self.vision.num_heads, ("linear_fc1",), "linear_fc2", width)

    def rules(self) -> list[Rule]:
        """See `FamilyAdapter.rules`."""
        vision, deep = self.vision, self.deep_layers
        are_layers = all(0 <= layer < vision.depth for layer in deep)
        has_order = list(deep) == sorted(set(deep))
        most = self.text.num_hidden_layers
        return [
            Rule(
                "vision_config.deepstack_visual_indexes",
                list(deep),
                are_layers and has_order and len(deep) <= most,
                f"ascending indexes of layers below {vision.depth}, at most as many as the backbone's {most}",
            ),
            Rule(
                "vision_config.out_hidden_size",
                vision.out_hidden_size,
                vision.out_hidden_size == self.text.hidden_size,
                f"`text_config.hidden_size`, {self.text.hidden_size}",
            ),
        ]


ADAPTER = Qwen3Vl
