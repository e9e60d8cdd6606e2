"""Sequence parallelism as Megatron has it: between the cut maps of a layer each rank has a part of the rows.

    x_RD --norm--> --(all-gather)--> x_TD --cut maps, attention--> summand_TD --(reduce-scatter)--> y_RD

The backward has a reduce-scatter in place of each all-gather, and an all-gather in place of each
reduce-scatter. The two together send as many bytes as the all-reduce of plain tensor parallelism, where each
rank has all rows. On n ranks, norms and residuals take 1/n of the time and of the memory.

Gathered rows are not kept for the backward. There the first map that needs them gathers them again, and the
other maps read the same copy.

Each rank has R = ceil(T / n) rows. Rows past T are padding: they are zeros, and their results are not used.
Each rank computes the gradient of a norm from its own rows only. So these gradients are summed over the ranks
at the end of the step (`LayerPlan.between`).

*References*: Korthikanti et al., "Reducing Activation Recomputation in Large Transformer Models", arXiv
2205.05198, section 4.2.

Shape letters: see `adapter.py`; R rows of a rank.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import nn

from dflop.models.recompute import is_keeping, is_replaying, recomputes

if TYPE_CHECKING:
    from collections.abc import Sequence

    from dflop.models.sums import Sums


def rows_of_rank(num_rows: int, degree: int) -> int:
    """Rows that each rank has between the cut maps, padding included.

    Args:
        num_rows: of the pack.
        degree: ranks.

    Returns:
        ceil(num_rows / degree).
    """
    return -(-num_rows // degree)


def own_rows(whole_TD: torch.Tensor, sums: Sums) -> torch.Tensor:
    """This rank's part of rows that all ranks have. In the backward each rank gets the gradient of all rows.

    Every rank must call it; the forward sends nothing, the backward gathers and blocks.

    Args:
        whole_TD: [T, D].
        sums: over the ranks.

    Returns:
        [R, D].
    """
    return _OwnRows.apply(whole_TD, sums)


def all_rows(own_RD: torch.Tensor, num_rows: int, sums: Sums) -> torch.Tensor:
    """The rows of all ranks, for a result whose gradient is the same on all ranks.

    Every rank must call it; the forward gathers and blocks, the backward sends nothing.

    Args:
        own_RD: [R, D], of this rank.
        num_rows: T; 0: nothing is sent.
        sums: over the ranks.

    Returns:
        [T, D], equal on all ranks.
    """
    return own_RD if num_rows == 0 else _AllRows.apply(own_RD, num_rows, sums)


def share_rows(
    layer: nn.Module, entries: Sequence[str], readers: Sequence[str], exits: Sequence[str], sums: Sums
) -> None:
    """Makes a cut layer take this rank's rows and give this rank's rows, by hooks.

    Args:
        layer: as `cut_layer` left it; changed in place. It is called with `position_embeddings` of all rows,
            or with linear attention with `segment_tokens`, the rows of each sample.
        entries: modules that read all rows, attention first.
        readers: linear maps that read rows which an entry gathered. Nothing else may be kept in them: code
            that counts saved bytes does not see it.
        exits: modules whose results are summands.
        sums: over the ranks.
    """
    shared = _SharedRows(sums)
    for path in entries:
        if any(reader.startswith(f"{path}.") for reader in readers):
            shared.read.add(layer.get_submodule(path))
        layer.get_submodule(path).register_forward_pre_hook(shared.enter, with_kwargs=True)
    for path in readers:
        layer.get_submodule(path).register_forward_pre_hook(shared.watch)
        layer.get_submodule(path).register_forward_hook(shared.unwatch, always_call=True)
    for path in exits:
        layer.get_submodule(path).register_forward_hook(shared.leave)


def _padded(whole_TD: torch.Tensor, degree: int) -> torch.Tensor:
    missing = -whole_TD.shape[0] % degree
    return F.pad(whole_TD, (0, 0, 0, missing)) if missing else whole_TD


def _part(whole_TD: torch.Tensor, sums: Sums) -> torch.Tensor:
    num_own = rows_of_rank(whole_TD.shape[0], sums.degree)
    # A copy, since a view would keep the memory of all rows.
    return _padded(whole_TD, sums.degree).narrow(0, sums.rank * num_own, num_own).clone()


class _OwnRows(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, whole_TD: torch.Tensor, sums: Sums) -> torch.Tensor:
        ctx.sums, ctx.num_rows = sums, whole_TD.shape[0]
        return _part(whole_TD, sums)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, None]:
        return ctx.sums.gather(gradients[0])[: ctx.num_rows], None


class _AllRows(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, own_RD: torch.Tensor, num_rows: int, sums: Sums) -> torch.Tensor:
        ctx.sums = sums
        return sums.gather(own_RD)[:num_rows]

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        return _part(gradients[0], ctx.sums), None, None


class _Gather(torch.autograd.Function):
    """Forward: the rows of all ranks; backward: this rank's rows of the sum of their gradients."""

    @staticmethod
    def forward(ctx: Any, own_1RD: torch.Tensor, num_rows: int, sums: Sums, is_kept: bool) -> torch.Tensor:
        ctx.sums = sums
        if is_kept:
            # Kept for maps that gather these rows again in the backward. Autograd saves them, instead of an
            # attribute, so that code that counts saved bytes sees them.
            ctx.save_for_backward(own_1RD)
        return sums.gather(own_1RD[0])[None, :num_rows]

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, None, None, None]:
        return ctx.sums.scatter(_padded(gradients[0][0], ctx.sums.degree))[None], None, None, None


class _Scatter(torch.autograd.Function):
    """Forward: this rank's rows of the sum over all ranks; backward: the gradients of all rows.

    Recomputation in mode `selective` keeps the result of a linear map. Here the forward writes this rank's
    rows of the sum into the first rows of that result, so the replay finds them there and sends nothing. The
    result of a map with LoRA adapters is not kept, so it is summed again.
    """

    @staticmethod
    def forward(ctx: Any, summand_1TD: torch.Tensor, sums: Sums, is_linear: bool) -> torch.Tensor:
        num_rows = summand_1TD.shape[1]
        ctx.sums, ctx.num_rows = sums, num_rows
        num_own = rows_of_rank(num_rows, sums.degree)
        if not (is_linear and is_replaying()):
            own_RD = sums.scatter(_padded(summand_1TD[0], sums.degree))
            if not (is_linear and is_keeping()):
                return own_RD[None]
            # Written through `.data`, which autograd does not notice, just like an in-place all-reduce.
            summand_1TD.data[0, :num_own].copy_(own_RD)
        return summand_1TD[:, :num_own].clone()

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        return ctx.sums.gather(gradients[0][0])[None, : ctx.num_rows], None, None


class _Gathered:
    """Gathered rows of which only this rank's are kept; the backward gathers the others again when needed."""

    def __init__(self, own_1RD: torch.Tensor, whole_1TD: torch.Tensor, sums: Sums) -> None:
        # `_Gather` keeps this rank's rows. If nothing before it needs a gradient, they are kept here.
        self._gather: Any = whole_1TD.grad_fn
        self._own_1RD = own_1RD.detach() if self._gather is None else None
        self._sums = sums
        self._pointer = whole_1TD.untyped_storage().data_ptr()
        self._whole: torch.Tensor | None = None
        self._num_kept = self._num_left = 0

    def pack(self, tensor: torch.Tensor) -> Any:
        """What autograd keeps instead of a tensor: for a view of the gathered rows, only how to view them."""
        if tensor.untyped_storage().data_ptr() != self._pointer:
            return tensor
        self._num_kept += 1
        return self, tensor.shape, tensor.stride(), tensor.storage_offset()

    def take(self, shape: Any, stride: Any, offset: int) -> torch.Tensor:
        """A view of the rows; the first map in a backward gathers them. Every rank must call it; blocks."""
        if self._whole is None:
            own_1RD = self._gather.saved_tensors[0] if self._own_1RD is None else self._own_1RD
            self._whole = self._sums.gather(own_1RD[0].detach())
            self._num_left = self._num_kept
        whole = self._whole
        self._num_left -= 1
        if self._num_left <= 0:
            self._whole = None
        return whole.as_strided(shape, stride, offset)


def _unpack(packed: Any) -> torch.Tensor:
    if isinstance(packed, torch.Tensor):
        return packed
    gathered, *how = packed
    return gathered.take(*how)


class _SharedRows:
    """The hooks by which one layer shares its rows with the other ranks."""

    def __init__(self, sums: Sums) -> None:
        self._sums = sums
        self._num_rows = 0
        self.read: set[nn.Module] = set()
        """Entries in which a map reads gathered rows."""
        self._gathered: _Gathered | None = None
        self._watching: torch.autograd.graph.saved_tensors_hooks | None = None

    def enter(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Before attention and before the MLP: gathers all rows. Attention comes first and knows how many."""
        if "position_embeddings" in kwargs:
            self._num_rows = kwargs["position_embeddings"][0].shape[-2]
        elif "segment_tokens" in kwargs:
            # Linear attention, which knows no positions.
            self._num_rows = sum(kwargs["segment_tokens"])
        own_1RD: torch.Tensor = args[0] if args else kwargs["hidden_states"]
        if own_1RD.dim() == 2:
            # Experts beside an MLP: rows, and what the router gave for each. Nothing of them is kept.
            return tuple(self._all_of(own_R) for own_R in args), kwargs
        # Layers that recompute keep nothing of this: their backward runs this forward again.
        is_kept = torch.is_grad_enabled() and not recomputes() and module in self.read
        whole_1TD: torch.Tensor = _Gather.apply(own_1RD, self._num_rows, self._sums, is_kept)
        self._gathered = _Gathered(own_1RD, whole_1TD, self._sums) if is_kept else None
        if args:
            return (whole_1TD, *args[1:]), kwargs
        return args, {**kwargs, "hidden_states": whole_1TD}

    def _all_of(self, own_R: torch.Tensor) -> torch.Tensor:
        return _Gather.apply(own_R[None], self._num_rows, self._sums, False)[0]

    def watch(self, _: nn.Module, __: tuple[Any, ...]) -> None:
        """Before a map that reads gathered rows: from here on, what autograd keeps goes through `pack`."""
        if self._gathered is not None:
            self._watching = torch.autograd.graph.saved_tensors_hooks(self._gathered.pack, _unpack)
            self._watching.__enter__()

    def unwatch(self, _: nn.Module, __: tuple[Any, ...], ___: Any) -> None:
        """After such a map: ends that."""
        if self._watching is not None:
            self._watching.__exit__()
            self._watching = None

    def leave(self, module: nn.Module, _: tuple[Any, ...], summand_1TD: torch.Tensor) -> torch.Tensor:
        """After a module that gives a summand: gives this rank's rows of the sum over the ranks."""
        # No longer needed here: the autograd graph holds it.
        self._gathered = None
        if summand_1TD.dim() == 2:
            return _Scatter.apply(summand_1TD[None], self._sums, False)[0]
        return _Scatter.apply(summand_1TD, self._sums, isinstance(module, nn.Linear))
