"""Tensor parallelism as Megatron has it: heads and the width of the MLP are cut over the ranks.

    x --(entry)--> q, k, v of own heads --> attention --> output projection of own heads --(sum)--> y
    x --(entry)--> own rows of the MLP's first maps --> own columns of its last --(sum)--> y

A cut layer alone gives one summand of its result. `add_collectives` makes the ranks sum: an all-reduce at
each (sum) in the forward, one at each (entry) in the backward. What stands between (norms, residual) runs
whole on every rank, or on a part of the rows (`sequence.py`). What a rank has of a parameter is its `Slice`:
so it is filled, saved and exported.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import nn

from dflop.models.errors import profile_error
from dflop.models.recompute import is_replaying
from dflop.models.sequence import share_rows

if TYPE_CHECKING:
    from collections.abc import Iterable

    from dflop.models.sums import Sums


@dataclass(frozen=True)
class TensorRank:
    """Which of the ranks that share layers this one is."""

    degree: int = 1
    """Ranks; 1: layers are whole."""
    rank: int = 0
    """From 0."""


WHOLE = TensorRank()
"""A rank that has layers whole."""


@dataclass(frozen=True)
class Slice:
    """Which part of a whole parameter a rank holds: runs of indices of one dimension."""

    dim: int
    shape: tuple[int, ...]
    """Of the whole parameter."""
    runs: tuple[tuple[int, int], ...]
    """(first index, number of them), ascending."""

    def take(self, whole: torch.Tensor) -> torch.Tensor:
        """The part.

        Args:
            whole: the parameter, or what is of its shape.

        Returns:
            A copy, or a view where there is one run.
        """
        parts = [whole.narrow(self.dim, first, count) for first, count in self.runs]
        return parts[0] if len(parts) == 1 else torch.cat(parts, self.dim)


def slices_of(piece: nn.Module) -> dict[str, Slice]:
    """The parameters of a piece that are parts of whole ones.

    Args:
        piece: as `cut_layer` and `cut_vocabulary` left it.

    Returns:
        By the parameter's name in the piece.
    """
    found: dict[str, Slice] = {}
    for path, module in piece.named_modules():
        slices: dict[str, Slice] = getattr(module, "tensor_slices", {})
        found |= {f"{path}.{kind}" if path else kind: one for kind, one in slices.items()}
    return found


@dataclass(frozen=True)
class Cut:
    """How one linear map is cut."""

    path: str
    """Of the `nn.Linear`, inside its layer."""
    field: str
    """The configuration's field that counts the parts."""
    num_parts: int
    """Parts that stay whole: heads, or rows of the MLP."""
    by_input: bool = False
    """Whether the inputs are cut (the ranks' results are summands) rather than the outputs."""
    num_blocks: int = 1
    """Maps laid behind each other in the one: 3 where it gives queries, keys and values."""
    may_repeat: bool = False
    """Whether several ranks may hold the same part: heads of keys and values, where there are few."""

    def of_rank(self, degree: int, rank: int) -> range:
        """The parts of one rank.

        Args:
            degree: ranks.
            rank: from 0.

        Returns:
            At least one part.

        Raises:
            ProfileError: the parts cannot be dealt evenly.
        """
        if self.num_parts % degree == 0:
            each = self.num_parts // degree
            return range(rank * each, (rank + 1) * each)
        if self.may_repeat and degree % self.num_parts == 0:
            part = rank * self.num_parts // degree
            return range(part, part + 1)
        message = (
            f"`{self.field}` is {self.num_parts}, must be a multiple of the tensor parallel degree {degree}"
        )
        raise profile_error(message)


@dataclass(frozen=True)
class LayerPlan:
    """How a layer is cut."""

    cuts: tuple[Cut, ...]
    """Every linear map of the layer."""
    entries: tuple[str, ...]
    """Modules that read what all ranks have: the gradients of their inputs are summed."""
    counts: tuple[tuple[str, str], ...] = ()
    """(module, attribute): numbers that the module's code reads, to be divided by the degree."""
    between: tuple[str, ...] = ()
    """Modules between the cut ones (norms), where each rank has a part of the rows there: the gradient of
    what they hold has a summand on each. Empty: all ranks have all rows."""


def heads_of_rank(num_heads: int, num_key_value_heads: int, degree: int) -> tuple[int, int]:
    """Heads of queries, and of keys and values, of one rank.

    Args:
        num_heads: of the layer.
        num_key_value_heads: of the layer.
        degree: ranks; the layer can be cut over so many.

    Returns:
        At least 1 each.
    """
    return num_heads // degree, max(1, num_key_value_heads // degree)


def _slice(tensor: torch.Tensor, dim: int, cut: Cut, parts: range) -> Slice:
    block = tensor.shape[dim] // cut.num_blocks
    size = block // cut.num_parts
    firsts = (index * block + parts.start * size for index in range(cut.num_blocks))
    return Slice(dim, tuple(tensor.shape), tuple((first, len(parts) * size) for first in firsts))


def take_slice(module: nn.Module, kind: str, part: Slice) -> None:
    """Leaves of a module's own parameter a part, and notes which.

    Args:
        module: changed in place.
        kind: `weight` or `bias`.
        part: what is left.
    """
    whole = module.get_parameter(kind)
    own = part.take(whole.detach()).contiguous()
    module.register_parameter(kind, nn.Parameter(own, requires_grad=whole.requires_grad))
    owner = cast("Any", module)
    owner.tensor_slices = {**getattr(module, "tensor_slices", {}), kind: part}


def cut_layer(layer: nn.Module, plan: LayerPlan, degree: int, rank: int = 0) -> None:
    """Leaves of a layer the part of one rank.

    A bias beside cut inputs stays whole, and the first rank alone has it: it is added once.

    Args:
        layer: changed in place; on any device.
        plan: how.
        degree: ranks; 1 changes nothing.
        rank: whose part.

    Raises:
        ProfileError: heads or widths cannot be dealt evenly; the message names the field.
    """
    if degree == 1:
        return
    chosen = [(cut, cut.of_rank(degree, rank)) for cut in plan.cuts]
    for cut, parts in chosen:
        linear = cast("nn.Linear", layer.get_submodule(cut.path))
        take_slice(linear, "weight", _slice(linear.weight, int(cut.by_input), cut, parts))
        linear.out_features, linear.in_features = linear.weight.shape
        if linear.bias is not None and not cut.by_input:
            take_slice(linear, "bias", _slice(linear.bias, 0, cut, parts))
        elif linear.bias is not None and rank > 0:
            # Added once: by the first rank.
            linear.register_parameter("bias", None)
    for path, attribute in plan.counts:
        module = layer.get_submodule(path)
        setattr(module, attribute, getattr(module, attribute) // degree)
    for path in plan.between:
        module = cast("Any", layer.get_submodule(path))
        # All of it, shared by the ranks: as they share what is whole beside cut maps.
        module.tensor_slices = {
            kind: Slice(0, tuple(p.shape), ((0, p.shape[0]),))
            for kind, p in module.named_parameters(recurse=False)
        }
    # Where `add_collectives` finds it.
    cast("Any", layer).tensor_parallel_plan = plan


class Sum(torch.autograd.Function):
    """Forward: the sum over the ranks; backward: nothing.

    Where a layer is computed again in mode `selective`, the result of the linear map was kept, and with it
    the sum that took its place. That of a map with adapters beside it was not: it is summed again.
    """

    @staticmethod
    def forward(ctx: Any, summand: torch.Tensor, sums: Sums, is_kept: bool = True) -> torch.Tensor:
        """The sum, in the place of the summand."""
        del ctx
        # In place, as Megatron does: nothing keeps the result of a linear map for its backward.
        total = summand.contiguous()
        if not (is_kept and is_replaying()):
            sums.add(total)
        return total

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        """Each summand's gradient is that of the sum."""
        del ctx
        return gradients[0], None, None


class Enter(torch.autograd.Function):
    """Forward: nothing; backward: the sum over the ranks."""

    @staticmethod
    def forward(ctx: Any, states: torch.Tensor, sums: Sums) -> torch.Tensor:
        """The states."""
        ctx.sums = sums
        return states.view_as(states)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, None]:
        """The gradients of all ranks together."""
        total = gradients[0].contiguous()
        ctx.sums.add(total)
        return total, None


def _enter_hook(sums: Sums) -> Any:
    def hook(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        # The layers hand the states over by place or by name.
        if args:
            return (Enter.apply(args[0], sums), *args[1:]), kwargs
        return args, {**kwargs, "hidden_states": Enter.apply(kwargs["hidden_states"], sums)}

    return hook


def _sum_hook(sums: Sums) -> Any:
    def hook(module: nn.Module, _: tuple[Any, ...], output: torch.Tensor) -> Any:
        return Sum.apply(output, sums, isinstance(module, nn.Linear))

    return hook


class _EmbeddingHooks:
    """Around the rows of an embedding that a rank has: other ids give zeros, and the ranks sum."""

    def __init__(self, rows: nn.Embedding, sums: Sums) -> None:
        self._rows, self._sums = rows, sums
        self._is_own = torch.empty(0)

    def register(self) -> None:
        """From now on the embedding gives what the whole one gives."""
        self._rows.register_forward_pre_hook(self._enter)
        self._rows.register_forward_hook(self._sum)

    def _enter(self, _: nn.Module, args: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
        self._is_own, local = own_rows(args[0], self._rows)
        return (local,)

    def _sum(self, _: nn.Module, __: tuple[Any, ...], output: torch.Tensor) -> torch.Tensor:
        return Sum.apply(output.masked_fill(~self._is_own[..., None], 0), self._sums)


def own_rows(ids: torch.Tensor, owner: nn.Module) -> tuple[torch.Tensor, torch.Tensor]:
    """Which ids are of a rank's rows.

    Args:
        ids: of the whole vocabulary.
        owner: embedding or head, as `cut_vocabulary` left it.

    Returns:
        A mask, and the ids counted from the first of the rows, 0 for others.
    """
    cut: Any = owner
    local = ids - cut.first_row
    is_own = (local >= 0) & (local < cut.weight.shape[0])
    return is_own, local.masked_fill(~is_own, 0)


def add_collectives(module: nn.Module, sums: Sums) -> int:
    """Makes cut layers, embeddings and heads give the whole result, on every rank of a group.

    The gradient of a head of keys and values that several ranks hold is a summand on each of them.

    Args:
        module: holds layers that `cut_layer` cut over as many ranks as the group has, each rank its part;
            changed in place.
        sums: of the ranks; each must run forward and backward of the same layers with the same inputs.

    Returns:
        Layers found.
    """
    for part in module.modules():
        if hasattr(part, "row_sums"):
            cast("Any", part).row_sums = sums
        if hasattr(part, "first_row"):
            cast("Any", part).vocabulary_sums = sums
        if hasattr(part, "first_row") and isinstance(part, nn.Embedding):
            _EmbeddingHooks(part, sums).register()
    layers = list(_cut_layers(module))
    for layer, plan in layers:
        if plan.between:
            share_rows(layer, plan.entries, {cut.path: cut.by_input for cut in plan.cuts}, sums)
            continue
        for path in plan.entries:
            layer.get_submodule(path).register_forward_pre_hook(_enter_hook(sums), with_kwargs=True)
        for cut in plan.cuts:
            if cut.by_input:
                layer.get_submodule(cut.path).register_forward_hook(_sum_hook(sums))
    return len(layers)


def _cut_layers(module: nn.Module) -> Iterable[tuple[nn.Module, LayerPlan]]:
    for layer in module.modules():
        plan = getattr(layer, "tensor_parallel_plan", None)
        if plan is not None:
            yield layer, plan
