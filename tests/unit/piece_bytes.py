"""What a piece of a model needs, counted over one run: an oracle for the memory model."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from dflop.models.byte_counter import ByteCounter
from dflop.profiling.memory import saved_for_backward

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable


@dataclass(frozen=True)
class PieceBytes:
    """What one microbatch needs on one piece of a model."""

    kept_bytes: int
    """From the forward to the backward: tensors saved for it, the piece's input among them if it is saved;
    parameters and the result are not counted (the next piece counts it as its input), unless the result is
    itself saved."""
    workspace_bytes: int
    """Beyond `kept_bytes`, for a while, in the forward or in the backward; neither the result nor its
    gradient is counted, the gradient of the input is."""


def peak_bytes(
    forward: Callable[[], torch.Tensor],
    device: torch.device,
    parameters: Iterable[torch.Tensor],
    inputs: Iterable[torch.Tensor] = (),
    backward: Callable[[torch.Tensor], object] | None = None,
) -> PieceBytes:
    """Bytes that a forward and the backward through it need, counted over one run of both.

    The parameters that train get a `.grad` first, as they have in training, where gradients are added in
    place.

    Args:
        forward: Run twice; gives what the backward starts from.
        device: Where it runs.
        parameters: Of the piece; their storages are not counted.
        inputs: Buffers of which `forward` reads a part; the parts that are kept are counted, not the buffers.
        backward: Run on the result of `forward`; by default a backward from a gradient of ones. None is run
            where the result wants no gradient.

    Returns:
        What is kept, and the peak above it.
    """
    parameters, inputs = list(parameters), list(inputs)
    for parameter in parameters:
        if parameter.requires_grad and parameter.grad is None:
            parameter.grad = torch.zeros_like(parameter)
    saved = saved_for_backward(forward, parameters, inputs)
    counter = ByteCounter(device)
    with counter:
        counter.phase("forward")
        result = forward()
        counter.phase("gradient")
        gradient = torch.ones_like(result) if backward is None else None
        counter.phase("backward")
        if result.requires_grad:
            if backward is None:
                torch.autograd.backward(result, gradient)
            else:
                backward(result)
    phases = {phase.name: phase for phase in counter.phases}
    read_bytes = saved.input_bytes
    result_bytes = 0 if saved.has_result else result.untyped_storage().nbytes()
    given_bytes = phases["gradient"].end_bytes - phases["forward"].end_bytes
    kept = phases["forward"].end_bytes + read_bytes - result_bytes if result.requires_grad else 0
    highest = max(phases["forward"].peak_bytes, phases["backward"].peak_bytes - given_bytes)
    return PieceBytes(max(kept, 0), max(highest + read_bytes - result_bytes - max(kept, 0), 0))
