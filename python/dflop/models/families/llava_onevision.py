"""LLaVA-OneVision: SigLIP tiles, an MLP projector, anyres packing; a Qwen2, Qwen2.5 or Llama-3 backbone.

    pixels_NCHW --SigLIP--> [N, P, V] --projector--> [N, P, D] --pack by media--> features_ED

Shape letters: see `models/adapter.py`; V is the width of the encoder.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, cast

import torch
from torch.nn.functional import interpolate
from transformers import LlavaOnevisionConfig, LlavaOnevisionForConditionalGeneration
from transformers.models.llava_onevision import modeling_llava_onevision as hf

from dflop.models.adapter import EXAMPLE_SIZE, MediaGrid
from dflop.models.errors import profile_error
from dflop.models.processor_files import processor_fields, processor_file
from dflop.models.rules import Rule
from dflop.models.tiles import CountedOnHost, TileFamily, check_features, check_pinpoints, clip_plan
from dflop.models.towers import inner_tower

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from torch import nn

    from dflop.models.media import MediaFile
    from dflop.models.tensor import LayerPlan


_POOLED_FRAMES = 256
"""Frames that are pooled at once: of 729 tokens and 8,192 channels 1.5 * 10^9 numbers."""


class LlavaOnevision(TileFamily):
    """`ModelAdapter` of LLaVA-OneVision."""

    family = "llava_onevision"
    config_class = LlavaOnevisionConfig
    model_class = LlavaOnevisionForConditionalGeneration
    encoder_modules = ("vision_tower", "multi_modal_projector", "image_newline")
    video_processor_class = "LlavaOnevisionVideoProcessor"

    def __init__(self, model_dir: Path) -> None:
        super().__init__(model_dir)
        vision = self.vision
        self.num_encoder_layers = vision.num_hidden_layers
        self.image_size: int = vision.image_size
        self.patches_per_side: int = vision.image_size // vision.patch_size
        self.input_shape = (3, vision.image_size, vision.image_size)
        self.encoder_tokens_per_tile = self.patches_per_side**2
        self.feature_layers = self.read_layers(self.config.vision_feature_layer, vision.num_hidden_layers)

    def rules(self) -> list[Rule]:
        """See `FamilyAdapter.rules`."""
        vision = self.vision
        is_one_number = isinstance(vision.image_size, int) and isinstance(vision.patch_size, int)
        kind, size = vision.model_type, vision.image_size
        return [
            Rule("vision_config.model_type", kind, kind == "siglip_vision_model", "siglip_vision_model"),
            Rule("vision_config.image_size", size, is_one_number, "one number, as is `patch_size`"),
        ]

    def embed(self, model: Any, inputs_N: torch.Tensor) -> torch.Tensor:
        """See `TileFamily.embed`."""
        return inner_tower(model.vision_tower).embeddings(inputs_N)

    def before_layers(self, model: Any) -> Sequence[nn.Module]:
        """See `FamilyAdapter.before_layers`."""
        return [inner_tower(model.vision_tower).embeddings]

    def tower_layers(self, model: Any) -> Any:
        """See `FamilyAdapter.tower_layers`."""
        return inner_tower(model.vision_tower).encoder.layers

    def encoder_plan(self) -> LayerPlan:
        """See `FamilyAdapter.encoder_plan`."""
        return clip_plan(self.vision)

    def project(self, model: Any, hidden_NPV: torch.Tensor, media: Sequence[MediaGrid]) -> torch.Tensor:
        """See `TileFamily.project`."""
        if self.config.vision_feature_select_strategy == "default":
            hidden_NPV = hidden_NPV[:, 1:]
        features_NPD = model.multi_modal_projector(hidden_NPV)
        tiles = features_NPD.split([grid.num_tiles for grid in media])
        return torch.cat([self.pack(model, *each) for each in zip(tiles, media, strict=True)])

    def pack(self, model: Any, features_nPD: torch.Tensor, grid: MediaGrid) -> torch.Tensor:
        """Packs the tiles of one image or video to features [num_features, D], as Hugging Face does."""
        newline_D = model.image_newline
        # Those methods read only the configuration of their model.
        shell = cast("Any", SimpleNamespace(config=self.config))
        if grid.kind == "video":
            features_ED = self.pool(features_nPD)
            # A video has one newline, after its last frame: the rank that encodes that frame adds it.
            return check_features(
                torch.cat([features_ED, newline_D[None]]) if grid.is_end else features_ED, grid
            )
        features_ED = hf.LlavaOnevisionModel.pack_image_features(
            shell,
            CountedOnHost([features_nPD]),
            [[grid.height, grid.width]],
            image_newline=newline_D,
            vision_aspect_ratio=self.config.vision_aspect_ratio,
        )[0][0]
        return check_features(features_ED, grid)

    def pool(self, features_nPD: torch.Tensor) -> torch.Tensor:
        """Halves the rows and columns of frames: [n, P, D] to [E, D], as Hugging Face's `apply_pooling`.

        That copies the frames first, so that a channel's positions lie together. For this layout PyTorch's
        kernel has a thread for each position, which goes through all channels: 1.3 ms a frame of D = 3,584 on
        an H100. In the layout that the frames have, each number has a thread.
        """
        side, half = self.patches_per_side, (self.patches_per_side + 1) // 2
        channels_last = features_nPD.unflatten(1, (side, side)).permute(0, 3, 1, 2)
        # That kernel of PyTorch 2.11 takes fewer than 2^31 numbers at once.
        pooled = [
            interpolate(frames, size=(half, half), mode="bilinear").permute(0, 2, 3, 1).flatten(0, 2)
            for frames in channels_last.split(_POOLED_FRAMES)
        ]
        return pooled[0] if len(pooled) == 1 else torch.cat(pooled)

    def num_features(self, kind: str, height: int, width: int, num_tiles: int) -> int:
        """How many features an `image` of that size in pixels, or a `video` of so many frames, has."""
        side = self.patches_per_side
        if kind == "video":
            return num_tiles * ((side + 1) // 2) ** 2 + 1
        if kind == "multi_image":
            return side * side + 1
        from transformers import LlavaOnevisionProcessor

        # Its counting methods read only these fields; a complete processor would need a tokenizer.
        shell = cast("Any", object.__new__(LlavaOnevisionProcessor))
        shell.num_image_tokens = side * side
        shell.vision_aspect_ratio = self.config.vision_aspect_ratio
        shell.image_processor = SimpleNamespace(image_grid_pinpoints=self.config.image_grid_pinpoints)
        return shell._get_number_of_features(height, width, self.image_size, self.image_size)

    def example_media(self, num_tiles: int) -> list[MediaGrid]:
        """Photographs as anyres cuts them, a video of the other tiles; see `ModelAdapter.example_media`."""
        height, width = EXAMPLE_SIZE
        pinpoints = self.config.image_grid_pinpoints
        tiles = hf.image_size_to_num_patches([height, width], pinpoints, self.image_size)
        image = MediaGrid("image", tiles, height, width, self.num_features("image", height, width, tiles))
        media = [image] * (num_tiles // tiles)
        frames = num_tiles % tiles
        if frames:
            media.append(MediaGrid("video", frames, height, width, self.num_features("video", 0, 0, frames)))
        return media

    def make_processor(self) -> Any:
        """See `TileFamily.make_processor`."""
        from transformers import LlavaOnevisionImageProcessorPil

        path = processor_file(self.model_dir)
        processor: Any = LlavaOnevisionImageProcessorPil.from_dict(
            processor_fields(self.model_dir, "image_processor")
        )
        size = (processor.size.height, processor.size.width)
        if size != (self.image_size, self.image_size):
            message = (
                f"`{path}` has tiles of {size[1]} x {size[0]} pixels, `config.json` of {self.image_size}"
            )
            raise profile_error(message)
        check_pinpoints(path, processor, self.config)
        return processor

    def pixels(
        self, file: MediaFile, kind: str, frame_indices: Sequence[int], grid: MediaGrid | None = None
    ) -> torch.Tensor:
        """See `ModelAdapter.pixels`."""
        del grid
        return self.tiles_of(file, kind, frame_indices, several=kind == "multi_image")


ADAPTER = LlavaOnevision
"""The adapter of the family that this module is named for: `load_adapter` looks for it."""
