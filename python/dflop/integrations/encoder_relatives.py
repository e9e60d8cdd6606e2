"""What a shared encoder must know of families whose towers are those of others under other names."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from transformers.modeling_outputs import BaseModelOutputWithPooling

from dflop.integrations.encoder_patches import PatchTower, PlainPatchTower
from dflop.integrations.encoder_tiles import SquaresTower

if TYPE_CHECKING:
    import torch


class ProjectedTower(PatchTower):
    """HyperCLOVA X SEED Think: the tower of Qwen2.5-VL, and a map behind it."""

    tower = "vision_model"
    projector = "projector"


class AlignedTower(SquaresTower):
    """DeepSeek-VL: an image is one square."""

    tower = "vision_model"
    projector = "aligner"


class ResampledTower(PlainPatchTower):
    """ERNIE 4.5 VL: a unit is an image or a frame; what merges patches and frames stands behind the tower."""

    tower = "vision_tower"
    projector = "resampler_model"
    positional = ("grid_thw",)

    def rows_out(self, grid: tuple[int, int] | None) -> int:
        """Patches."""
        return self.rows_in(grid)

    def features(self, output: Any) -> torch.Tensor:
        """After the last norm."""
        return output.last_hidden_state

    def output(self, features: torch.Tensor) -> Any:
        """As of the base class."""
        return BaseModelOutputWithPooling(last_hidden_state=features)  # type: ignore[arg-type]
