"""GLM-4.6V of type `glm46v`: the modules of GLM-4.1V under another configuration."""

from __future__ import annotations

from transformers import Glm46VConfig, Glm46VForConditionalGeneration
from transformers.models.glm46v.modeling_glm46v import Glm46VModel

from dflop.models.families.glm4v import Glm4v


class Glm46v(Glm4v):
    """`ModelAdapter` of GLM-4.6V."""

    family = "glm46v"
    config_class = Glm46VConfig
    model_class = Glm46VForConditionalGeneration
    model_methods = Glm46VModel


ADAPTER = Glm46v
