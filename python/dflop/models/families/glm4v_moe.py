"""GLM-4.5V and GLM-4.6V (106B): the encoder of GLM-4.1V before the backbone of GLM-4.5, which has experts.

    hidden_TD --router--> K experts of each row, weighted --+--> hidden_TD      all layers but the first
    hidden_TD --shared expert ----------------------------- +

A router takes the sigmoid of each expert's score, adds a correction bias, and chooses the experts with the
largest sums; the weights are the sigmoids alone. The bias is a buffer that no gradient reaches. It is read
with the weights, stays as it is, and is exported as it was.
"""

from __future__ import annotations

from typing import Any

from transformers import Glm4vMoeConfig, Glm4vMoeForConditionalGeneration
from transformers.models.glm4v_moe.configuration_glm4v_moe import Glm4vMoeVisionConfig
from transformers.models.glm4v_moe.modeling_glm4v_moe import Glm4vMoeModel

from dflop.models.families.glm4v import Glm4v


class Glm4vMoe(Glm4v):
    """`ModelAdapter` of GLM-4.5V."""

    family = "glm4v_moe"
    config_class = Glm4vMoeConfig
    vision_class = Glm4vMoeVisionConfig
    model_class = Glm4vMoeForConditionalGeneration
    model_methods = Glm4vMoeModel

    def read_config(self) -> Any:
        """See `FamilyAdapter.read_config`."""
        config = super().read_config()
        # transformers' model draws routers with this field of the whole, which only the parts have.
        if not hasattr(config, "initializer_range"):
            config.initializer_range = config.text_config.initializer_range
        return config

    @property
    def head_size(self) -> int:
        """See `Glm4v.head_size`. Of this family the file may say it: then heads need not fill the width."""
        return getattr(self.text, "head_dim", None) or super().head_size


ADAPTER = Glm4vMoe
