"""Qwen2.5-VL: as Qwen2-VL, but most layers of the encoder attend within windows.

    encoder_layer          the layers of `fullatt_block_indexes`: attention within a picture or a frame pair
    encoder_window_layer   all others: attention within windows of 8 x 8 patches

Windows are measured whole. Those at the edge of a picture are smaller and cost less, so time is overstated
there, by a part of what attention over 64 tokens costs.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from transformers import Qwen2_5_VLConfig, Qwen2_5_VLForConditionalGeneration

from dflop.models.backbone import backbone_rules
from dflop.models.packing import PACKED_ENCODER
from dflop.models.patches import Geometry
from dflop.models.rules import Rule
from dflop.profiling.families.backbone import backbone_pieces
from dflop.profiling.families.qwen2_vl import layer_plan, set_layers, vision_pieces
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
    source = Source(
        model_dir, Qwen2_5_VLConfig, Qwen2_5_VLForConditionalGeneration, set_layers, PACKED_ENCODER
    )
    vision = source.encoder
    full = sorted(set(vision.fullatt_block_indexes) & set(range(vision.depth)))
    source.check(
        [
            *backbone_rules(source.text),
            Rule(
                "vision_config.fullatt_block_indexes",
                vision.fullatt_block_indexes,
                bool(full),
                f"indexes of layers below {vision.depth}, at least one",
            ),
        ]
    )
    width = ("vision_config.intermediate_size", vision.intermediate_size)
    plan = layer_plan(vision.num_heads, ("gate_proj", "up_proj"), "down_proj", width)
    geometry = Geometry(vision.spatial_merge_size, vision.patch_size, vision.window_size)
    counts = {"encoder_layer": len(full), "encoder_window_layer": vision.depth - len(full)}
    return [*vision_pieces(source, geometry, plan, vision.hidden_size, counts), *backbone_pieces(source)]
