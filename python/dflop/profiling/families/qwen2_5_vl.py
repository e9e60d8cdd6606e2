"""Qwen2.5-VL: as Qwen2-VL, but most layers of the encoder attend within windows.

    encoder_layer          the layers of `fullatt_block_indexes`: attention within a picture or a frame pair
    encoder_window_layer   all others: attention within windows of 8 x 8 patches

Only full windows are measured. Windows at the edge of a picture are smaller and cost less, so their time is
overstated, by a part of what attention over 64 tokens costs.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from transformers import Qwen2_5_VLConfig, Qwen2_5_VLForConditionalGeneration

from dflop.models.families.qwen2_5_vl import Qwen25Vl
from dflop.models.packing import PACKED_ENCODER
from dflop.profiling.families.backbone import backbone_pieces
from dflop.profiling.families.qwen2_vl import set_layers, vision_pieces
from dflop.profiling.families.source import Source

if TYPE_CHECKING:
    from pathlib import Path

    from dflop.profiling.pieces import Piece


def pieces(model_dir: Path) -> list[Piece]:
    """The pieces of a Qwen2.5-VL model.

    Args:
        model_dir: folder with `config.json`.

    Returns:
        Seven pieces; six where no layer has windows.

    Raises:
        ProfileError: the configuration asks for what is not built here; the message names the field.
    """
    # The adapter of training checks the configuration, and gives the geometry.
    family = Qwen25Vl(model_dir)
    source = Source(
        model_dir, Qwen2_5_VLConfig, Qwen2_5_VLForConditionalGeneration, set_layers, PACKED_ENCODER
    )
    full = len(family.full_layers)
    counts = {"encoder_layer": full, "encoder_window_layer": source.encoder.depth - full}
    return [*vision_pieces(source, family, counts), *backbone_pieces(source)]
