"""A pass of no samples through a sharded piece: all that its ranks do together, and none of its work.

    forward:   gather unit 0, free it, gather unit 1, ...         as in a forward of samples
    backward:  the reverse, and each unit's gradients are summed; here they are zeros

Ranks that meet in every layer hang if one of them leaves a layer out. A microbatch of text alone has nothing
for the encoder; a rank may have no sample of a microbatch at all. Such a rank runs this instead. FSDP2 meets
in hooks around the forward of each unit. Those hooks run here too; only the forward within does nothing.
"""

from __future__ import annotations

from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from torch import nn


@dataclass(frozen=True)
class Units:
    """The modules of a piece that are gathered one by one, in the order of its forward."""

    first: nn.Module | None
    """The embedding, whose ids want no gradient; none where it is gathered with the piece."""
    layers: list[nn.Module]
    last: nn.Module | None
    """The head, with its loss; none where it is gathered with the piece."""

    def in_order(self) -> list[nn.Module]:
        """All of them."""
        return [unit for unit in (self.first, *self.layers, self.last) if unit is not None]


class _Zeros(torch.autograd.Function):
    """The first argument as it is; each of the others gets a gradient of zeros."""

    @staticmethod
    def forward(ctx: Any, passed: torch.Tensor, *parameters: torch.Tensor) -> torch.Tensor:
        # Not the parameters themselves: what was gathered may be freed until the backward.
        ctx.like = [(p.shape, p.dtype, p.device) for p in parameters]
        return passed.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        zeros = [
            torch.zeros(shape, dtype=dtype, device=device) if is_needed else None
            for (shape, dtype, device), is_needed in zip(ctx.like, ctx.needs_input_grad[1:], strict=True)
        ]
        return (gradients[0], *zeros)


def _trained(parameters: Sequence[nn.Parameter]) -> list[nn.Parameter]:
    return [p for p in parameters if p.requires_grad]


def _outside(piece: nn.Module, layers: Sequence[nn.Module]) -> tuple[list[str], list[str]]:
    """Names of the parameters in none of `layers` (or units): those that make what enters them, and others.

    The first are in modules registered before the layers, as patch embeddings are. A parameter of a module
    around the layers (the newline between rows of features) is one of the others.
    """
    inside = {id(p) for layer in layers for p in layer.parameters()}
    around = {id(p) for module in _around(piece, layers) for p in module.parameters(recurse=False)}
    before: list[str] = []
    after: list[str] = []
    names = before if layers else after
    for name, parameter in piece.named_parameters():
        if id(parameter) in inside:
            names = after
        else:
            (after if id(parameter) in around else names).append(name)
    return before, after


def _around(piece: nn.Module, layers: Sequence[nn.Module]) -> list[nn.Module]:
    """The modules that contain the first of `layers`."""
    return [m for m in piece.modules() if layers and m is not layers[0] and layers[0] in set(m.modules())]


def tie_unused(piece: nn.Module, layers: Sequence[nn.Module]) -> None:
    """From now on a backward of `piece` gives each parameter outside of `layers` a gradient.

    Zeros, if need be. A rank whose samples do not reach one (a microbatch without the kind of image that ends
    in a newline) would bring one gradient less to the sum than the others.

    Args:
        piece: To be sharded after this.
        layers: Its layers, which use all their parameters.
    """
    names = [name for part in _outside(piece, layers) for name in part]

    def tie(module: nn.Module, _: Any, output: torch.Tensor) -> torch.Tensor:
        parameters = _trained([module.get_parameter(name) for name in names])
        return _Zeros.apply(output, *parameters)

    piece.register_forward_hook(tie)


class NothingPass:
    """Forward and backward of nothing through the units of a piece that FSDP2 has sharded."""

    def __init__(self, piece: nn.Module, units: Units, takes_hidden: bool) -> None:
        """Nothing done.

        Args:
            piece: The root.
            units: Its other units.
            takes_hidden: Whether what comes into the piece wants a gradient, as features and hidden states
                do.
        """
        self._piece = piece
        self._takes_hidden = takes_hidden
        self._units = units
        self._before, self._after = _outside(piece, units.in_order())
        self._is_filling = False

    def forward(self) -> torch.Tensor:
        """Meets the other ranks as a forward of samples does.

        Returns:
            A number to call `backward` on, if it requires a gradient.
        """
        return self._forward(self._takes_hidden)

    def finish(self) -> None:
        """Forward and backward at the end of a step: gradients that there are stay, others are zeros."""
        self._is_filling = True
        try:
            self._forward(takes_hidden=True).backward()
        finally:
            self._is_filling = False

    def _forward(self, takes_hidden: bool) -> torch.Tensor:
        device = next(self._piece.parameters()).device
        with self._replaced():
            return self._piece(torch.zeros((), device=device, requires_grad=takes_hidden))

    def _through_units(self, passed: torch.Tensor) -> torch.Tensor:
        passed = self._with_zeros(passed, self._before)
        if self._units.first is not None:
            # Its own input wants no gradient, as ids do not. So FSDP2 sums its gradient when all else is
            # summed, as in a backward of samples: ranks meet in the same order.
            passed = passed + self._units.first(passed.detach())
        for layer in self._units.layers:
            passed = layer(passed)
        if self._units.last is not None:
            passed = self._units.last(passed)
        # Last: the result of the piece is another tensor than that of its last unit. Hooks on one tensor
        # would gather the unit before the piece.
        return self._with_zeros(passed, self._after)

    def _with_zeros(self, passed: torch.Tensor, names: Sequence[str]) -> torch.Tensor:
        return self._touch(passed, [self._piece.get_parameter(name) for name in names])

    def _touch(self, passed: torch.Tensor, parameters: Sequence[nn.Parameter]) -> torch.Tensor:
        wanting = [p for p in _trained(parameters) if p.grad is None or not self._is_filling]
        return _Zeros.apply(passed, *wanting)

    @contextmanager
    def _replaced(self) -> Iterator[None]:
        """While it lasts, the forward of each unit does nothing but touch its parameters."""

        def of_unit(unit: nn.Module) -> Callable[[torch.Tensor], torch.Tensor]:
            return lambda passed: self._touch(passed, list(unit.parameters()))

        forwards = [
            (self._piece, self._through_units),
            *((unit, of_unit(unit)) for unit in self._units.in_order()),
        ]
        before = [vars(unit).get("forward") for unit, _ in forwards]
        try:
            for unit, forward in forwards:
                vars(unit)["forward"] = forward
            yield
        finally:
            for (unit, _), forward in zip(forwards, before, strict=True):
                if forward is None:
                    del vars(unit)["forward"]
                else:
                    vars(unit)["forward"] = forward
