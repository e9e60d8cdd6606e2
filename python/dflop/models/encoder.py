"""The encoder that ranks hold: parts of Hugging Face's model under their own names, run as the family says.

    inputs_N, media --Encoder--> features_ED

Shape letters: see `adapter.py`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import nn

if TYPE_CHECKING:
    from collections.abc import Sequence

    from dflop.models.adapter import EncoderInput


def part_of(source: nn.Module, names: Sequence[str]) -> nn.Module:
    """Modules and parameters of `source` alone, under the names that they have in it.

    Args:
        source: a module.
        names: paths below it, as in `multi_modal_projector`.

    Returns:
        A module that has these and nothing else; they are shared with `source`.
    """
    part = nn.Module()
    for name in names:
        owner, found = part, source
        *path, last = name.split(".")
        for step in path:
            found = getattr(found, step)
            if not hasattr(owner, step):
                setattr(owner, step, nn.Module())
            owner = getattr(owner, step)
        setattr(owner, last, getattr(found, last))
    return part


class RunsEncoder(Protocol):
    """What of a `FamilyAdapter` the encoder needs."""

    @property
    def encoder_parts(self) -> Sequence[str]:
        """See `FamilyAdapter.encoder_parts`."""
        ...

    hidden_size: int

    def encode(self, model: Any, batch: EncoderInput) -> torch.Tensor:
        """See `FamilyAdapter.encode`."""
        ...

    def layers_in_order(self, model: Any) -> list[nn.Module]:
        """See `FamilyAdapter.layers_in_order`."""
        ...


class Encoder(nn.Module):
    """The encoder with its projector; parameter names are those of the whole model."""

    def __init__(self, whole: nn.Module, family: RunsEncoder) -> None:
        super().__init__()
        self.model = part_of(whole.get_submodule("model"), family.encoder_parts)
        self.family = family

    def layers_in_order(self) -> list[nn.Module]:
        """The layers of the tower that a forward runs, in their order."""
        return self.family.layers_in_order(self.model)

    def forward(self, batch: EncoderInput) -> torch.Tensor:
        """Features of all media, one after the other.

        Args:
            batch: what the encoder reads, and the media it belongs to.

        Returns:
            features_ED: [E, D], dtype of the parameters; [0, D] without running anything when there are no
                inputs.

        Raises:
            ValueError: a medium gives another number of features than its `num_features`.
        """
        if batch.inputs_N.shape[0] == 0:
            # Tied to one small parameter: the caller may run backward through it and finds a gradient of
            # zeros.
            smallest = min(self.parameters(), key=lambda p: (not p.requires_grad, p.numel()))
            return smallest.new_zeros(0, self.family.hidden_size) + smallest.reshape(-1)[:0].sum()
        features_ED = self.family.encode(self.model, batch)
        expected = sum(grid.num_features for grid in batch.media)
        if features_ED.shape[0] != expected:
            found = features_ED.shape[0]
            message = (
                f"the encoder gave {found} features of {len(batch.media)} media, {expected} were expected"
            )
            raise ValueError(message)
        return features_ED
