"""A pass of no samples through a sharded piece: all that its ranks do together, and none of its work.

    forward:   gather unit 0, free it, gather unit 1, ...         as in a forward of samples
    backward:  the reverse, and each unit's gradients are summed; here they are zeros

Ranks that meet in every layer hang if one of them leaves a layer out. A microbatch of text alone has nothing
for the encoder; a rank may have no sample of a microbatch at all. Such a rank runs this instead. FSDP2 meets
in hooks around the forward of each unit. Those hooks run here too; only the forward within does nothing.

Where experts are dealt out, ranks meet in the layers that have them, whatever is sharded. There the pass
brings no rows, and this rank's experts run on those of the others.
"""

from __future__ import annotations

from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from dflop.models.expert_ranks import dealt_experts, no_rows
from dflop.models.recompute import NONE, recomputing

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
    """Forward and backward of nothing through the units of a piece, which FSDP2 may have sharded."""

    def __init__(
        self, piece: nn.Module, units: Units, takes_hidden: bool, *, gives_zeros: bool = True
    ) -> None:
        """Nothing done.

        Args:
            piece: The root.
            units: Its other units.
            takes_hidden: Whether what comes into the piece wants a gradient, as features and hidden states
                do.
            gives_zeros: Whether each backward sums gradients over ranks (ZeRO-3), so that this rank must have
                some, of zeros.
        """
        self._piece = piece
        self._takes_hidden = takes_hidden
        self._gives_zeros = gives_zeros
        self._experts = {layer: dealt_experts(layer) for layer in units.layers}
        self._has_experts = any(experts is not None for experts in self._experts.values())
        self._units = units
        self._before, self._after = _outside(piece, units.in_order())
        self._is_filling = False

    def forward(self, recompute: str = NONE) -> torch.Tensor:
        """Meets the other ranks as a forward of samples does.

        Args:
            recompute: What layers recompute in this microbatch on the ranks that have samples, as
                `recompute.modes_of` has it: where experts are dealt out ranks meet in that, too.

        Returns:
            A number to call `backward` on, if it requires a gradient.
        """
        return self._forward(self._takes_hidden, recompute if self._has_experts else NONE)

    def finish(self) -> None:
        """Forward and backward at the end of a step: gradients that there are stay, others are zeros."""
        self._is_filling = True
        try:
            self._forward(takes_hidden=True).backward()
        finally:
            self._is_filling = False

    def _forward(self, takes_hidden: bool, recompute: str = NONE) -> torch.Tensor:
        device = next(self._piece.parameters()).device
        with self._replaced(), recomputing(self._units.layers, recompute):
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
        if not (self._gives_zeros or self._is_filling):
            return passed
        wanting = [p for p in _trained(parameters) if p.grad is None or not self._is_filling]
        return _Zeros.apply(passed, *wanting)

    @contextmanager
    def _replaced(self) -> Iterator[None]:
        """While it lasts, the forward of each unit does nothing but touch its parameters.

        Dealt experts run, on the rows of other ranks, but at the end of a step.
        """

        def of_unit(unit: nn.Module) -> Callable[[torch.Tensor], torch.Tensor]:
            experts = self._experts.get(unit)
            inside = set() if experts is None else set(experts.modules())
            owners = [module for module in unit.modules() if module not in inside]

            def forward(passed: torch.Tensor) -> torch.Tensor:
                own = dict.fromkeys(p for owner in owners for p in owner.parameters(recurse=False))
                passed = self._touch(passed, list(own))
                if experts is None:
                    return passed
                return experts(passed) if self._is_filling else no_rows(experts, passed)

            return forward

        replaced = self._units.in_order()
        if self._is_filling:
            replaced += [experts for experts in self._experts.values() if experts is not None]
        forwards = [(self._piece, self._through_units), *((unit, of_unit(unit)) for unit in replaced)]
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
