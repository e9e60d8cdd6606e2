"""What a shared encoder must know of MiniCPM-V 4.6: slices in one row, a merger between the layers."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from dflop.integrations.encoder_tiles import Media, NormedTower, refuse_computed

if TYPE_CHECKING:
    from torch import nn


class SliceTower(NormedTower):
    """MiniCPM-V 4.6: a unit is a whole picture or a slice, of its own height and width."""

    projector = "merger"
    has_grids = True
    methods = ("get_image_features",)

    def __init__(self, model: nn.Module) -> None:
        super().__init__(model)
        self._is_merged = self.config.downsample_mode == "16x"

    def unread(self, tower: nn.Module) -> list[nn.Module]:
        """The merger between the layers, where the mode has none."""
        return [] if self._is_merged else [tower.get_submodule("vit_merger")]

    def media(self, rows: torch.Tensor, extra: dict[str, Any]) -> Media:
        """As of the base class.

        Args:
            rows: patches side by side, [1, channels, side, side x patches].
            extra: `target_sizes` and all others.

        Returns:
            The media, a row a patch.

        Raises:
            ValueError: an argument was computed for the media of this rank alone, or the call asks for
                another `downsample_mode` than the configuration.
        """
        extra = dict(extra)
        sizes: Any = extra.pop("target_sizes")
        if extra.pop("use_vit_merger", self._is_merged) != self._is_merged:
            message = (
                "`downsample_mode` of the call is not that of the configuration, "
                f"`{self.config.downsample_mode}`: all ranks must have one, set it there"
            )
            raise ValueError(message)
        refuse_computed(extra)
        grids = [(int(height), int(width)) for height, width in sizes.tolist()]
        side = rows.shape[2]
        patches = rows[0].unflatten(2, (-1, side)).permute(2, 0, 1, 3).flatten(1)
        return Media(patches, grids, extra)

    def cost(self, grid: tuple[int, int] | None) -> float:
        """Multiplications of the layers, forward."""
        vision, num_tokens = self.config.vision_config, self.rows_in(grid)
        count, width = int(vision.num_hidden_layers), int(vision.hidden_size)
        first = int(self.config.insert_layer_id) + 1 if self._is_merged else count
        linear = 4 * width * width + 2 * width * int(vision.intermediate_size)

        def of_layer(tokens: int) -> float:
            return float(tokens) * (linear + 2 * width * tokens)

        return first * of_layer(num_tokens) + (count - first) * of_layer(num_tokens // 4)

    def rows_in(self, grid: tuple[int, int] | None) -> int:
        """Patches."""
        assert grid is not None
        return grid[0] * grid[1]

    def rows_out(self, grid: tuple[int, int] | None) -> int:
        """Windows of patches; with "4x" patches."""
        return self.rows_in(grid) // (4 if self._is_merged else 1)

    def encode(self, forward: Any, media: Media) -> Any:
        """As of the base class."""
        side = int(self.config.vision_config.patch_size)
        rows = media.rows.unflatten(1, (-1, side, side)).permute(1, 2, 0, 3).flatten(2)
        # Sizes stay on the host: transformers reads them one by one.
        sizes = torch.tensor(media.grids, dtype=torch.int32)
        return forward(rows[None], target_sizes=sizes, use_vit_merger=self._is_merged, **media.extra)

    def features(self, output: Any) -> torch.Tensor:
        """As of the base class, without the batch of one."""
        return super().features(output)[0]

    def output(self, features: torch.Tensor) -> Any:
        """As of the base class."""
        return super().output(features[None])
