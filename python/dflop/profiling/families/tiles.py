"""Encoders whose segments all have one size: tiles of pixels or windows of sound.

    encoder_embedding   pixels or sound -> hidden_NPV
    encoder_layer       hidden_NPV      -> hidden_NPV     attention within a tile
    projector           hidden_NPV      -> features_ED

Attention is part of the linear time. Only the layers are cut by tensor parallelism. Shape letters: N tiles or
windows, P tokens of one, V and D widths of encoder and backbone.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from torch import nn

from dflop.models.encoder import modules_of
from dflop.models.tensor import cut_layer
from dflop.profiling.families.source import Fed, ModelPiece, layers_at_once, random_states

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    import torch

    from dflop.models.tensor import LayerPlan
    from dflop.models.tiles import TileFamily
    from dflop.profiling.families.source import Source
    from dflop.profiling.pieces import PieceSettings


class Modules(nn.Module):
    """Modules of the model under their names, run by a function of training."""

    def __init__(self, whole: Any, names: Sequence[str], run: Callable[..., torch.Tensor]) -> None:
        super().__init__()
        self.model = modules_of(whole.model, names)
        self.run = run

    def forward(self, inputs: torch.Tensor, *more: Any) -> torch.Tensor:
        """Gives the inputs to `run`.

        Args:
            inputs: tiles or windows, or hidden_NPV.
            *more: what else `run` takes.

        Returns:
            hidden_NPV, or features_ED.
        """
        return self.run(self.model, inputs, *more)


def project_by(family: TileFamily) -> Callable[[Any, torch.Tensor], torch.Tensor]:
    """The family's projector, on usual media (`example_media`).

    Args:
        family: the family.

    Returns:
        (its modules, hidden_NPV) -> features_ED.
    """
    return lambda model, hidden: family.project(model, hidden, family.example_media(hidden.shape[0]))


class Layers(nn.Module):
    """A run of encoder layers."""

    def __init__(self, layers: Sequence[nn.Module], arguments: tuple[Any, ...]) -> None:
        super().__init__()
        self.layers = nn.ModuleList(layers)
        self.arguments = arguments
        # A buffer, so that a mask moves to the device with the layers.
        mask = arguments[0] if arguments else None
        self.register_buffer("mask", mask, persistent=False)

    def forward(self, hidden_NPV: torch.Tensor) -> torch.Tensor:
        """Hidden states after the layers.

        Args:
            hidden_NPV: before.

        Returns:
            hidden_NPV.
        """
        arguments = self.arguments if self.mask is None else (self.mask, *self.arguments[1:])
        for layer in self.layers:
            hidden_NPV = layer(hidden_NPV, *arguments)
        return hidden_NPV


@dataclass(frozen=True)
class TileEncoder:
    """All in which such encoders differ. In the functions, `whole` is the model on the meta device."""

    num_layers: int
    """Layers that are run."""
    tokens: int
    """P: encoder tokens of a tile."""
    width: int
    """V."""
    shape: tuple[int, ...]
    """Tensor shape of what the embedding reads for one tile."""
    plan: LayerPlan
    """How a layer is cut."""
    embedding: Callable[[Any], nn.Module]
    """whole -> module of the embedding, its buffers real."""
    layers: Callable[[Any], Sequence[nn.Module]]
    """whole -> its encoder layers."""
    projector: Callable[[Any], nn.Module]
    """whole -> module of the projector."""
    arguments: tuple[Any, ...] = ()
    """Arguments of a layer after the hidden states. The first is the mask, if there is one."""
    check_cut: Callable[[], None] = lambda: None
    """Refuses layers that cannot be cut."""


def tile_pieces(source: Source, encoder: TileEncoder) -> list[ModelPiece]:
    """Embedding, layers and projector.

    Args:
        source: of the model.
        encoder: its encoder.

    Returns:
        Three pieces.
    """

    def take_layers(whole: Any, settings: PieceSettings) -> nn.Module:
        degree = settings.tensor_parallel_degree
        if degree > 1:
            encoder.check_cut()
        layers = list(encoder.layers(whole))
        for layer in layers:
            cut_layer(layer, encoder.plan, degree)
        return Layers(layers, encoder.arguments)

    def feed(*shape: int) -> Callable[[Any, Sequence[int], PieceSettings], Fed]:
        def feed_tiles(_: Any, segments: Sequence[int], settings: PieceSettings) -> Fed:
            return Fed(random_states(settings, sum(segments) // encoder.tokens, *shape))

        return feed_tiles

    def piece(name: str, count: int, take: Any, *shape: int, **more: Any) -> ModelPiece:
        size = {"segment_tokens": encoder.tokens, "size_unit": encoder.tokens}
        return ModelPiece(name, count, source, take, feed(*shape), **size, **more)

    at_once = layers_at_once(encoder.num_layers, encoder.layers(source.whole(1))[0])
    hidden = (encoder.tokens, encoder.width)
    return [
        piece(
            "encoder_embedding",
            1,
            lambda whole, _: encoder.embedding(whole),
            *encoder.shape,
            wants_input_gradient=False,
        ),
        piece("encoder_layer", encoder.num_layers, take_layers, *hidden, num_layers=at_once),
        piece("projector", 1, lambda whole, _: encoder.projector(whole), *hidden),
    ]
