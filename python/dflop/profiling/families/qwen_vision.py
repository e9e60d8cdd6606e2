"""The modules of the encoders of the Qwen-VL kind, run by the functions of training.

Shape letters: T patches (encoder tokens), C values of a patch, E feature tokens, V and D widths of encoder
and backbone. With windows, patches are sorted window by window from the embedding to the projector.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from torch import nn

from dflop.models.patches import bounds_of_patches, merge, rotate_patches, run_layer

if TYPE_CHECKING:
    import torch

    from dflop.models.patch_layout import Geometry, Patches
    from dflop.models.patches import Bounds, PatchFamily


class PatchEmbedding(nn.Module):
    """Patches to hidden states, window by window."""

    def __init__(self, whole: Any, family: PatchFamily) -> None:
        super().__init__()
        tower = whole.model.visual
        self.rotary, self.geometry, self.embed = tower.rotary_pos_emb, family.geometry, family.embed
        # Under their own names, by which the family finds them.
        before = family.before_layers(whole.model)
        for name, module in tower.named_children():
            if any(module is one for one in before):
                setattr(self, name, module)

    def forward(self, patches_TC: torch.Tensor, patches: Patches) -> torch.Tensor:
        """Hidden states before the first layer.

        Args:
            patches_TC: pixels.
            patches: where they lie.

        Returns:
            hidden_TV.
        """
        hidden_TV = self.embed(self, patches_TC, patches, self.geometry)
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

    def __init__(self, whole: Any, family: PatchFamily) -> None:
        super().__init__()
        tower = whole.model.visual
        self.makes = family.mergers
        others = [*family.before_layers(whole.model), family.tower_layers(whole.model), tower.rotary_pos_emb]
        for name, module in tower.named_children():
            if not any(module is one for one in others):
                setattr(self, name, module)

    @property
    def mergers(self) -> list[Any]:
        """What makes features: of the last layer, then of those before it."""
        return self.makes(self)

    def forward(self, hidden_TV: torch.Tensor, order: torch.Tensor | None) -> torch.Tensor:
        """Features of all pictures, one after the other.

        Args:
            hidden_TV: after the last layer.
            order: that of `Patches`.

        Returns:
            features_EW. Where features come of several layers, all of them read `hidden_TV` here.
        """
        mergers = self.mergers
        return merge(mergers, [hidden_TV] * len(mergers), order)
