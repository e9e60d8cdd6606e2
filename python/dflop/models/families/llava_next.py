"""LLaVA-NeXT: CLIP tiles with a CLS each, an MLP projector, anyres packing; no videos.

    pixels_NCHW --CLIP--> [N, P, V] --CLS dropped, projector--> [N, P - 1, D] --pack by image--> features_ED

Shape letters: see `models/adapter.py`; V is the width of the encoder.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, cast

import torch
from transformers import LlavaNextConfig, LlavaNextForConditionalGeneration
from transformers.models.llava_next import modeling_llava_next as hf

from dflop.models.adapter import EXAMPLE_SIZE, MediaGrid
from dflop.models.families.llava import Llava
from dflop.models.processor_files import processor_fields, processor_file
from dflop.models.tiles import CountedOnHost, check_features, check_pinpoints

if TYPE_CHECKING:
    from collections.abc import Sequence


class LlavaNext(Llava):
    """`ModelAdapter` of LLaVA-NeXT: the tower of LLaVA 1.5, and several tiles an image."""

    family = "llava_next"
    config_class = LlavaNextConfig
    model_class = LlavaNextForConditionalGeneration
    encoder_modules = ("vision_tower", "multi_modal_projector", "image_newline")
    encoders = ("clip_vision_model",)
    strategies = ("default",)

    def project(self, model: Any, hidden_NPV: torch.Tensor, media: Sequence[MediaGrid]) -> torch.Tensor:
        """See `TileFamily.project`."""
        features_NPD = model.multi_modal_projector(hidden_NPV[:, 1:])
        packed, _ = hf.LlavaNextModel.pack_image_features(
            # This method reads only the configuration of its model.
            cast("Any", SimpleNamespace(config=self.config)),
            CountedOnHost(features_NPD.split([grid.num_tiles for grid in media])),
            # A list: each size of a tensor would be read from the device.
            cast("Any", [[grid.height, grid.width] for grid in media]),
            vision_feature_select_strategy="default",
            image_newline=model.image_newline,
        )
        return torch.cat([check_features(*each) for each in zip(packed, media, strict=True)])

    def example_media(self, num_tiles: int) -> list[MediaGrid]:
        """Photographs as anyres cuts them, then images of one tile; see `ModelAdapter.example_media`."""
        vision = self.vision
        pinpoints = self.config.image_grid_pinpoints
        tiles = hf.image_size_to_num_patches(list(EXAMPLE_SIZE), pinpoints, vision.image_size)
        whole = MediaGrid("image", tiles, *EXAMPLE_SIZE, self._photograph_features())
        # An image of a single tile, packed with one newline. No processor makes one, but it costs as much as
        # another tile.
        one = MediaGrid("image", 1, vision.image_size, vision.image_size, self.features_per_tile + 1)
        photographs, left = divmod(num_tiles, tiles)
        return [whole] * photographs + [one] * left

    def _photograph_features(self) -> int:
        """How many features a photograph of `EXAMPLE_SIZE` has, by Hugging Face's processor."""
        from transformers import LlavaNextProcessor

        # Its counting methods read only these fields; a complete processor would need a tokenizer.
        shell = cast("Any", object.__new__(LlavaNextProcessor))
        shell.patch_size, shell.vision_feature_select_strategy = self.vision.patch_size, "default"
        shell.num_additional_image_tokens = 1
        pinpoints = self.config.image_grid_pinpoints
        shell.image_processor = SimpleNamespace(image_grid_pinpoints=pinpoints)
        side = self.vision.image_size
        return shell._get_number_of_features(*EXAMPLE_SIZE, side, side) - 1

    def make_processor(self) -> Any:
        """See `TileFamily.make_processor`."""
        from transformers import LlavaNextImageProcessorPil

        fields = processor_fields(self.model_dir, "image_processor")
        processor: Any = LlavaNextImageProcessorPil.from_dict(fields)
        check_pinpoints(processor_file(self.model_dir), processor, self.config)
        return processor


ADAPTER = LlavaNext
