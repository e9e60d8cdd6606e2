"""LightOnOCR: the encoder of Mistral3 under other names, and a Qwen3 backbone.

Its processor rounds the sides of a picture to whole patches, not to whole features: a last row or column of
patches that fills no feature is encoded, and the projector leaves it out.
"""

from __future__ import annotations

from transformers import LightOnOcrConfig, LightOnOcrForConditionalGeneration

from dflop.models.families.mistral3 import Mistral3


class LightOnOcr(Mistral3):
    """`ModelAdapter` of LightOnOCR."""

    family = "lighton_ocr"
    config_class = LightOnOcrConfig
    model_class = LightOnOcrForConditionalGeneration
    encoder_modules = ("vision_encoder", "vision_projection")

    @property
    def rounded_to(self) -> int:
        """Sides of a resized picture are multiples of it, in pixels: the image processor's own patch."""
        side = self.image_processor.patch_size
        return int(side if isinstance(side, int) else side["height"])


ADAPTER = LightOnOcr
