"""A piece of the model whose parameters, gradients and optimizer states are cut among ranks: PyTorch's FSDP2.

    ZeRO   parameters during a step       gradients                        ranks meet
    1, 2   gathered once, kept whole      whole; cut once, at the end      once a step
    3      gathered unit by unit          cut after each microbatch        in each unit of each microbatch

In between, all three are cut, and that is what the optimizer updates. Gradients are summed, not averaged: the
loss is divided by the label tokens of the global batch before. 1 and 2 run the same code: FSDP2 has no whole
gradients after the sum, so 1 needs no more memory than 2.

Under 3 each layer is a unit, and so are the embedding and the head, whose matrices are the largest of a
model: of InternVL3 78B each has 1.2 billion numbers, as many as one and a half layers. All else (norms,
projectors) is gathered with the piece, for as long as a pass takes. So is a matrix that both share.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, cast

import torch
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.fsdp._fully_shard._fsdp_param import FSDPParam
from torch.distributed.tensor import DTensor

from dflop.models.loss import gather_for_loss
from dflop.parallel.nothing import NothingPass, Units, tie_unused

if TYPE_CHECKING:
    from torch import nn
    from torch.distributed.device_mesh import DeviceMesh

PARAMETERS = 3
"""The ZeRO stage that keeps parameters cut during a step."""


def layers_of(piece: nn.Module) -> list[nn.Module]:
    """The layers that a forward of `piece` runs, in their order: what is gathered together, and recomputed.

    Args:
        piece: As an adapter builds it; its method `layers_in_order` names them.

    Returns:
        Them; nothing where the piece names none, so that it is gathered as a whole.
    """
    named = getattr(piece, "layers_in_order", None)
    return [] if named is None else list(named())


def units_of(piece: nn.Module) -> Units:
    """What of a piece is gathered apart from the rest under ZeRO-3.

    Args:
        piece: As an adapter builds it; its method `ends` names embedding and head.

    Returns:
        Its layers, and its ends where it names any.
    """
    ends = getattr(piece, "ends", None)
    first, last = (None, None) if ends is None else ends()
    return Units(first, layers_of(piece), last)


class ShardedPiece:
    """A piece that `fully_shard` has cut, with the moments at which its ranks meet."""

    def __init__(
        self,
        piece: nn.Module,
        mesh: DeviceMesh,
        zero: int,
        takes_hidden: bool,
        compute_dtype: torch.dtype | None = None,
        reduce_dtype: torch.dtype | None = None,
    ) -> None:
        """Cuts the parameters, in place. Every rank of the mesh must call it.

        Args:
            piece: Whole, and equal on all ranks of the mesh. What does not train has `requires_grad` False.
            mesh: Ranks among which it is cut: one dimension, or (copies, shards).
            zero: 1, 2 or 3.
            takes_hidden: Whether it is called with features or hidden states; the encoder is not.
            compute_dtype: That layers compute in; none: that of the parameters.
            reduce_dtype: That gradients are summed in; none: that of the gradients.
        """
        self.piece = piece
        self._is_gathered_once = zero < PARAMETERS
        units = Units(None, layers_of(piece), None) if self._is_gathered_once else units_of(piece)
        policy = MixedPrecisionPolicy(compute_dtype, reduce_dtype, cast_forward_inputs=False)
        # Before FSDP2's own hooks: its parameters must still be whole there.
        if not self._is_gathered_once and not takes_hidden:
            tie_unused(piece, units.layers)
            if hasattr(piece, "runs_all_layers"):
                cast("Any", piece).runs_all_layers = True
        for unit in (*units.in_order(), piece):
            fully_shard(unit, mesh=mesh, reshard_after_forward=not self._is_gathered_once, mp_policy=policy)
        if units.first is not None:
            # The gradient of an embedding is made without the embedding.
            cast("FSDPModule", units.first).set_unshard_in_backward(False)
        if units.last is not None:
            gather_for_loss(units.last)
        self._units = [cast("FSDPModule", unit) for unit in (piece, *units.in_order())]
        for unit in self._units:
            unit.set_gradient_divide_factor(1.0)
            # A sum that multiplies on its way is NCCL's alone.
            unit.set_force_sum_reduction_for_comms(True)
        self._root = cast("FSDPModule", piece)
        # PyTorch 2.11 sums in `reduce_dtype` only what a backward without a meeting has left. A gradient that
        # comes first in the meeting itself has another type, and it refuses two types in one sum.
        sums_wider = compute_dtype is not None and reduce_dtype not in (None, compute_dtype)
        self._fills_first = sums_wider and not hasattr(FSDPParam, "unsharded_grad_dtype")
        self._set_meeting(not self._is_gathered_once)
        self.nothing = NothingPass(piece, units, takes_hidden)
        """What a rank does in a microbatch of which it has no sample (ZeRO-3)."""

    def _set_meeting(self, is_meeting: bool) -> None:
        """Whether a backward sums gradients over ranks and cuts what was gathered."""
        self._root.set_requires_gradient_sync(is_meeting)
        self._root.set_reshard_after_backward(is_meeting)

    def gather(self) -> None:
        """Gathers all parameters (ZeRO-1, 2), if they are not whole already; blocks until they are.

        Every rank of the mesh must call it before its first action of a step.
        """
        if self._is_gathered_once:
            for unit in self._units:
                unit.unshard()

    def release(self) -> None:
        """Frees what was gathered: the module's parameters are the cut ones again. No rank waits."""
        for unit in self._units:
            unit.reshard()

    def reduce(self) -> None:
        """Sums the gradients of the step over all ranks, and cuts them; blocks until it is done.

        Every rank of the mesh must call it after its last action. A rank whose samples did not reach a
        parameter has zeros to add.
        """
        if self._is_gathered_once:
            if self._fills_first:
                self.nothing.finish()
            # A backward in which every unit takes part on every rank, whatever each rank has computed.
            self._set_meeting(True)
            self.nothing.finish()
            self._set_meeting(False)
            self.release()
        for parameter in self.piece.parameters():
            if parameter.requires_grad and parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)


def local(tensor: torch.Tensor) -> torch.Tensor:
    """What this rank has of a tensor: its shard, or all of it where it is not cut."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def is_first_copy(mesh: DeviceMesh) -> bool:
    """Whether this rank's shards count where each is to count once."""
    coordinate: Any = mesh.get_coordinate()
    return mesh.ndim == 1 or coordinate[0] == 0
