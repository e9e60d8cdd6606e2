"""What a shared encoder must know of families whose towers are those of others under other names."""

from __future__ import annotations

from dflop.integrations.encoder_patches import PatchTower, PlainPatchTower, UnmergedTower
from dflop.integrations.encoder_tiles import SquaresTower


class ProjectedTower(PatchTower):
    """HyperCLOVA X SEED Think: the tower of Qwen2.5-VL, and a map behind it."""

    tower = "vision_model"
    projector = "projector"


class AlignedTower(SquaresTower):
    """DeepSeek-VL: an image is one square."""

    tower = "vision_model"
    projector = "aligner"


class ResampledTower(UnmergedTower, PlainPatchTower):
    """ERNIE 4.5 VL: a unit is an image or a frame; what merges patches and frames stands behind the tower."""

    tower = "vision_tower"
    projector = "resampler_model"
    positional = ("grid_thw",)
