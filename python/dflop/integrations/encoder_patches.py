"""What a shared encoder must know of the vision models of Qwen and GLM: packed patches of any grid."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from transformers.modeling_outputs import BaseModelOutputWithPooling

from dflop.integrations.encoder_tiles import Media, TileTower, refuse_computed

if TYPE_CHECKING:
    from torch import nn


class PatchTower(TileTower):
    """Qwen2-VL and 2.5-VL: a unit is a frame pair of a video or an image, of its own height and width."""

    tower = "visual"
    has_grids = True
    projector = None
    parameters = ()

    def __init__(self, model: nn.Module) -> None:
        super().__init__(model)
        vision = self.config.vision_config
        self._merged = int(vision.spatial_merge_size) ** 2
        is_windowed = hasattr(vision, "fullatt_block_indexes")
        width, inner = self.widths()
        # Multiplications of a token in one block: four projections and the MLP; attention by token read.
        self._linear = float(vision.depth * (4 * width * width + inner * width))
        self._attention = float(2 * width)
        self._depth = int(vision.depth)
        self._full = len(vision.fullatt_block_indexes) if is_windowed else self._depth
        self._window = (int(vision.window_size) // int(vision.patch_size)) ** 2 if is_windowed else 0

    def unread(self, tower: nn.Module) -> list[nn.Module]:
        """All is read."""
        del tower
        return []

    def widths(self) -> tuple[int, int]:
        """Width of a block, and of the maps of its MLP together."""
        vision = self.config.vision_config
        # Of the 2.5 the blocks' own width is `hidden_size`; before, that is the LLM's.
        if hasattr(vision, "fullatt_block_indexes"):
            return int(vision.hidden_size), int(vision.intermediate_size) * 3
        return int(vision.embed_dim), int(vision.embed_dim * vision.mlp_ratio) * 2

    def media(self, rows: torch.Tensor, extra: dict[str, Any]) -> Media:
        """As of the base class.

        Args:
            rows: patches.
            extra: `grid_thw` and all others.

        Returns:
            The media, a unit a frame.

        Raises:
            ValueError: an argument was computed for the media of this rank alone.
        """
        extra = dict(extra)
        grid_thw: Any = extra.pop("grid_thw")
        refuse_computed(extra)
        grids = [(int(h), int(w)) for t, h, w in grid_thw.tolist() for _ in range(int(t))]
        return Media(rows, grids, extra)

    def cost(self, grid: tuple[int, int] | None) -> float:
        """Multiplications, forward."""
        num_tokens = self.rows_in(grid)
        read = self._full * num_tokens + (self._depth - self._full) * min(self._window, num_tokens)
        return num_tokens * (self._linear + self._attention * read)

    def rows_in(self, grid: tuple[int, int] | None) -> int:
        """Patches."""
        assert grid is not None
        return grid[0] * grid[1]

    def rows_out(self, grid: tuple[int, int] | None) -> int:
        """Merged patches."""
        return self.rows_in(grid) // self._merged

    def encode(self, forward: Any, media: Media) -> Any:
        """As of the base class."""
        grids = [(1, *grid) for grid in media.grids or []]
        return forward(media.rows, grid_thw=torch.tensor(grids, device=media.rows.device), **media.extra)

    def features(self, output: Any) -> torch.Tensor:
        """Merged."""
        return output.pooler_output

    def output(self, features: torch.Tensor) -> Any:
        """As of the base class."""
        return BaseModelOutputWithPooling(pooler_output=features)  # type: ignore[arg-type]


class UnmergedTower(PatchTower):
    """A tower that gives patches; what merges them stands behind it."""

    def rows_out(self, grid: tuple[int, int] | None) -> int:
        """Patches."""
        return self.rows_in(grid)

    def features(self, output: Any) -> torch.Tensor:
        """After the last norm."""
        return output.last_hidden_state

    def output(self, features: torch.Tensor) -> Any:
        """As of the base class."""
        return BaseModelOutputWithPooling(last_hidden_state=features)  # type: ignore[arg-type]


class GlmTower(PatchTower):
    """GLM-4.1V, 4.5V and 4.6V: the MLP of a block is as wide as the features."""

    def widths(self) -> tuple[int, int]:
        """As of the base class."""
        vision = self.config.vision_config
        return int(vision.hidden_size), int(vision.out_hidden_size) * 3


class GlmOcrTower(PatchTower):
    """GLM-OCR: the width of a block's MLP stands in the configuration."""

    def widths(self) -> tuple[int, int]:
        """As of the base class."""
        vision = self.config.vision_config
        return int(vision.hidden_size), int(vision.intermediate_size) * 3


class PlainPatchTower(PatchTower):
    """Qwen3.5: blocks with a plain MLP, whose width stands in the configuration."""

    def widths(self) -> tuple[int, int]:
        """As of the base class."""
        vision = self.config.vision_config
        return int(vision.hidden_size), int(vision.intermediate_size) * 2


class DeepPatchTower(PlainPatchTower):
    """Qwen3-VL, Qwen3-Omni: beside its last features the tower gives those of earlier blocks (DeepStack)."""

    # Qwen3-Omni's registers its mergers before them.
    called_first = ("patch_embed", "pos_embed", "blocks")

    def features(self, output: Any) -> torch.Tensor:
        """Merged, the last and then those of earlier blocks, side by side."""
        return torch.cat([output.pooler_output, *output.deepstack_features], dim=-1)

    def output(self, features: torch.Tensor) -> Any:
        """As of the base class."""
        from transformers.models.qwen3_vl.modeling_qwen3_vl import BaseModelOutputWithDeepstackFeatures

        last, *deep = features.chunk(1 + len(self.config.vision_config.deepstack_visual_indexes), dim=-1)
        return BaseModelOutputWithDeepstackFeatures(pooler_output=last, deepstack_features=deep)  # type: ignore[arg-type]
