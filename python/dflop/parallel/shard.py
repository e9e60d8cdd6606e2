"""A piece of the model whose parameters, gradients and optimizer states are cut among ranks: PyTorch's FSDP2.

    ZeRO   parameters during a step       gradients                        ranks meet
    1, 2   gathered once, kept whole      whole; cut once, at the end      once a step
    3      gathered unit by unit          cut after each microbatch        in each unit of each microbatch

In between, all three are cut, and that is what the optimizer updates. Gradients are summed, not averaged: the
loss is divided by the label tokens of the global batch before. 1 and 2 run the same code: FSDP2 has no whole
gradients after the sum, so 1 needs no more memory than 2.

Experts that are dealt out (`expert_ranks.py`) are a unit of their own inside their layer. They are cut among
the ranks that have the same ones, if it is one rank alone. Ranks then meet in each layer under 1 and 2, too.

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

from dflop.models.expert_ranks import dealt_experts
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
        expert_mesh: DeviceMesh | None = None,
    ) -> None:
        """Cuts the parameters, in place. Every rank of the mesh must call it.

        Args:
            piece: Whole but for dealt experts, and equal on all ranks of the mesh. What does not train has
                `requires_grad` False.
            mesh: Ranks among which it is cut: one dimension, or (copies, shards).
            zero: 1, 2 or 3.
            takes_hidden: Whether it is called with features or hidden states; the encoder is not.
            compute_dtype: That layers compute in; none: that of the parameters.
            reduce_dtype: That gradients are summed in; none: that of the gradients.
            expert_mesh: Ranks that have the same experts; none: experts are not dealt out.
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
        dealt = [experts for layer in units.layers if (experts := dealt_experts(layer)) is not None]
        meshes = [expert_mesh] * len(dealt) + [mesh] * (len(units.in_order()) + 1)
        # What is inside comes first: it is no part of the unit around it.
        for unit, among in zip((*dealt, *units.in_order(), piece), meshes, strict=True):
            fully_shard(unit, mesh=among, reshard_after_forward=not self._is_gathered_once, mp_policy=policy)
        for layer in units.layers:
            _gather_experts_for_backward(layer)
        if units.first is not None:
            # The gradient of an embedding is made without the embedding.
            cast("FSDPModule", units.first).set_unshard_in_backward(False)
        if units.last is not None:
            gather_for_loss(units.last)
        self._units = [cast("FSDPModule", unit) for unit in (piece, *units.in_order(), *dealt)]
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
        self.meets = not self._is_gathered_once or bool(dealt)
        """Whether ranks meet in each unit of each microbatch."""
        self.nothing = NothingPass(piece, units, takes_hidden, gives_zeros=not self._is_gathered_once)
        """What a rank does in a microbatch of which it has no sample, where ranks meet."""

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


def _gather_experts_for_backward(layer: nn.Module) -> None:
    """From now on dealt experts are whole when the backward of their layer begins, as the rest of it is.

    Else a layer that recomputes would gather them in the midst of that, where its backward needs what comes
    after the experts first: once more, and not on a rank without samples. Ranks would meet in another order.

    Args:
        layer: Sharded, with its experts as a unit of their own.
    """
    experts = dealt_experts(layer)
    if experts is None:
        return
    state = cast("FSDPModule", experts)._get_fsdp_state()

    def hook(_: nn.Module, __: Any, output: torch.Tensor) -> None:
        if output.requires_grad:
            # After the layer's own, which is registered before.
            output.register_hook(state._pre_backward)

    layer.register_forward_hook(hook)


def local(tensor: torch.Tensor) -> torch.Tensor:
    """What this rank has of a tensor: its shard, or all of it where it is not cut."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def is_first_copy(mesh: DeviceMesh) -> bool:
    """Whether this rank's shards count where each is to count once."""
    coordinate: Any = mesh.get_coordinate()
    return mesh.ndim == 1 or coordinate[0] == 0
