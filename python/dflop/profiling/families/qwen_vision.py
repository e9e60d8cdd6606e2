"""The modules of Qwen2-VL's and Qwen2.5-VL's encoders, run by the functions of training.

Shape letters: T patches (encoder tokens), C values of a patch, E feature tokens, V and D widths of encoder
and backbone. With windows, patches are sorted window by window from the embedding to the projector.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from torch import nn

from dflop.models.patches import (
    bounds_of_patches,
    embed_patches,
    merge,
    mergers_of,
    rotate_patches,
    run_layer,
)

if TYPE_CHECKING:
    import torch

    from dflop.models.patches import Bounds, Geometry, Patches


class PatchEmbedding(nn.Module):
    """Patches to hidden states, window by window."""

    def __init__(self, tower: Any, geometry: Geometry) -> None:
        super().__init__()
        self.patch_embed, self.rotary, self.geometry = tower.patch_embed, tower.rotary_pos_emb, geometry
        if hasattr(tower, "pos_embed"):
            self.pos_embed = tower.pos_embed

    def forward(self, patches_TC: torch.Tensor, patches: Patches) -> torch.Tensor:
        """Hidden states before the first layer.

        Args:
            patches_TC: pixels.
            patches: where they lie.

        Returns:
            hidden_TV.
        """
        hidden_TV = embed_patches(self, patches_TC, patches, self.geometry)
        # Rotary angles are computed here and not with the layers: a call does it once, while the time of a
        # layer is multiplied by the number of layers.
        rotate_patches(self.rotary, patches, self.geometry, hidden_TV)
        return hidden_TV


class EncoderLayers(nn.Module):
    """A run of encoder layers, all of them with windows or all without."""

    def __init__(self, tower: Any, geometry: Geometry, has_windows: bool) -> None:
        super().__init__()
        self.layers, self.rotary = tower.blocks, tower.rotary_pos_emb
        self.geometry, self.has_windows = geometry, has_windows

    def bounds(self, patches: Patches, like: torch.Tensor) -> Bounds:
        """What the layers must know of these patches.

        Args:
            patches: where they lie.
            like: tells device and dtype.

        Returns:
            Argument of `forward`.
        """
        angles = rotate_patches(self.rotary, patches, self.geometry, like)
        tokens = patches.windows if self.has_windows else patches.segments
        return bounds_of_patches(tokens, angles, like.device)

    def forward(self, hidden_TV: torch.Tensor, bounds: Bounds) -> torch.Tensor:
        """Hidden states after the layers.

        Args:
            hidden_TV: before.
            bounds: who sees whom.

        Returns:
            hidden_TV.
        """
        for layer in self.layers:
            hidden_TV = run_layer(layer, hidden_TV, bounds)
        return hidden_TV


class Merger(nn.Module):
    """Hidden states to features, which get back the order of their pictures."""

    def __init__(self, tower: Any) -> None:
        super().__init__()
        self.mergers = nn.ModuleList(mergers_of(tower))

    def forward(self, hidden_TV: torch.Tensor, order: torch.Tensor | None) -> torch.Tensor:
        """Features of all pictures, one after the other.

        Args:
            hidden_TV: after the last layer.
            order: that of `Patches`.

        Returns:
            features_EW. Where features come of several layers, all of them read `hidden_TV` here.
        """
        return merge(list(self.mergers), [hidden_TV] * len(self.mergers), order)
