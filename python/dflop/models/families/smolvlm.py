"""SmolVLM: as Idefics3, and it reads videos, a tile a frame."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from transformers import SmolVLMConfig, SmolVLMForConditionalGeneration

from dflop.models.families.idefics3 import Idefics3
from dflop.models.processor_files import processor_fields, stacked

if TYPE_CHECKING:
    from collections.abc import Sequence

    import torch


class SmolVlm(Idefics3):
    """`ModelAdapter` of SmolVLM."""

    family = "smolvlm"
    config_class = SmolVLMConfig
    model_class = SmolVLMForConditionalGeneration
    video_processor_class = "SmolVLMVideoProcessor"

    def make_processor(self) -> Any:
        """See `TileFamily.make_processor`."""
        from transformers.models.smolvlm.image_processing_pil_smolvlm import SmolVLMImageProcessorPil

        return SmolVLMImageProcessorPil.from_dict(processor_fields(self.model_dir, "image_processor"))

    def frame_tiles(self, frames: Sequence[Any]) -> torch.Tensor:
        """See `TileFamily.frame_tiles`; this processor calls frames what others call tiles."""
        found = self.video_processor.preprocess(
            [stacked(frames)], do_sample_frames=False, return_tensors="pt"
        )
        return found["pixel_values"][0].float()


ADAPTER = SmolVlm
