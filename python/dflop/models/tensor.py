"""Tensor parallelism as Megatron has it: heads and the width of the MLP are cut over the ranks.

    x --(entry)--> q, k, v of own heads --> attention --> output projection of own heads --(sum)--> y
    x --(entry)--> own rows of the MLP's first maps --> own columns of its last --(sum)--> y
    x --(entry)--> whole router --> own part of each expert's width --> shares' sum --(sum)--> y
    x --(entry)--> q, k, v, gates of own heads --> linear attention --> output projection --(sum)--> y

A cut layer by itself gives only one summand of the result. `add_collectives` makes the ranks sum: by an
all-reduce at each (sum) in the forward, and one at each (entry) in the backward. Norms and residuals between
the cut maps run on all rows on every rank, or on a part of the rows (`sequence.py`). A `Slice` says which
part of a parameter a rank has: by it parameters are filled, saved and exported.
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
    """How many ranks share the layers, and which of them this one is."""

    degree: int = 1
    """How many ranks share the layers; 1: layers are whole."""
    rank: int = 0
    """This rank's position among them, from 0."""


WHOLE = TensorRank()
"""A rank that has layers whole."""


@dataclass(frozen=True)
class Slice:
    """Which part of a whole parameter a rank holds: runs of indices of one dimension."""

    dim: int
    shape: tuple[int, ...]
    """Tensor shape of the whole parameter."""
    runs: tuple[tuple[int, int], ...]
    """(first index, number of indices) of each run, ascending."""

    def take(self, whole: torch.Tensor) -> torch.Tensor:
        """The part.

        Args:
            whole: the parameter, or a tensor of its tensor shape.

        Returns:
            A copy, or a view where there is one run.
        """
        parts = [whole.narrow(self.dim, first, count) for first, count in self.runs]
        return parts[0] if len(parts) == 1 else torch.cat(parts, self.dim)


def slices_of(piece: nn.Module) -> dict[str, Slice]:
    """The parameters of a piece that are parts of whole parameters.

    Args:
        piece: as `cut_layer` and `cut_vocabulary` left it.

    Returns:
        The slice of each, by the parameter's name in the piece.
    """
    found: dict[str, Slice] = {}
    for path, module in piece.named_modules():
        slices: dict[str, Slice] = getattr(module, "tensor_slices", {})
        found |= {f"{path}.{kind}" if path else kind: one for kind, one in slices.items()}
    return found


@dataclass(frozen=True)
class Cut:
    """How one parameter is cut: that of a linear map, of the maps of all experts, or of single columns."""

    path: str
    """Path inside the layer: of the `nn.Linear`, or of the module that has the parameter."""
    field: str
    """Field of the configuration that says how many parts there are; errors name it."""
    num_parts: int
    """How many parts there are to deal out, each of which stays whole: heads, or rows of the MLP."""
    by_input: bool = False
    """Whether the inputs of the map are cut, so that each rank gives a summand; else its outputs are cut."""
    num_blocks: int = 1
    """How many maps this one joins, one after the other: 3 where it gives queries, keys and values."""
    may_repeat: bool = False
    """Whether several ranks may hold the same part: heads of keys and values, if fewer than ranks."""
    kind: str = "weight"
    """Name of the parameter in its module. Its last two dimensions are outputs and inputs of the map."""
    blocks: tuple[int, ...] = ()
    """Outputs of each map that this one joins, where they differ; a rank has its parts of each."""
    keeps_all_rows: bool = False
    """Whether a router keeps whole the rows that the map reads: then this map keeps them too, at no cost."""
    dim: int | None = None
    """The dimension that is cut, of a parameter that belongs to no map: a number for each column or head."""

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
    """How each linear map of the layer is cut."""
    entries: tuple[str, ...]
    """Modules at which cut maps begin. Their input is the same on all ranks, which sum its gradient."""
    counts: tuple[tuple[str, str], ...] = ()
    """(module, attribute) of numbers that the module's code reads, such as heads; divided by the degree."""
    between: tuple[str, ...] = ()
    """Modules between the cut maps (norms), if each rank has only a part of the rows there (sequence
    parallelism). Then each rank has a summand of their gradients. Empty: all ranks have all rows."""
    partial: tuple[str, ...] = ()
    """Whole modules whose results meet a rank's own part alone, so that each rank has a summand of their
    gradients: norms over own heads, routers between entry and sum."""
    exits: tuple[str, ...] = ()
    """Modules around several cut maps whose inputs are cut: the ranks sum what such a module gives, once, and
    not what each of its maps gives. Each is an entry, too."""

    def sums_at(self) -> tuple[str, ...]:
        """Paths of the modules whose results are summands, which the ranks sum."""
        inner = tuple(f"{path}." for path in self.exits)
        maps = (cut.path for cut in self.cuts if cut.by_input and not cut.path.startswith(inner))
        return (*maps, *self.exits)

    def reads_at(self) -> tuple[str, ...]:
        """Paths of the linear maps that read what an entry gives.

        Routers, and copies of rows for experts, are not among them: those that a router keeps it keeps whole.
        """
        maps = (cut for cut in self.cuts if cut.kind == "weight" and cut.dim is None)
        return tuple(cut.path for cut in maps if not cut.by_input and not cut.keeps_all_rows)


def heads_of_rank(num_heads: int, num_key_value_heads: int, degree: int) -> tuple[int, int]:
    """Heads of queries, and of keys and values, of one rank.

    Args:
        num_heads: of the layer.
        num_key_value_heads: of the layer.
        degree: number of ranks; the layer can be cut over so many.

    Returns:
        At least 1 each.
    """
    return num_heads // degree, max(1, num_key_value_heads // degree)


def _slice(tensor: torch.Tensor, cut: Cut, parts: range, dim: int | None = None) -> Slice:
    """The part of a tensor that some parts of a cut make up, along the cut's own dimension or `dim`."""
    if dim is None:
        dim = tensor.dim() - 2 + int(cut.by_input) if cut.dim is None else cut.dim
    length = tensor.shape[dim]
    runs, first = [], 0
    for block in cut.blocks or (length // cut.num_blocks,) * cut.num_blocks:
        size = block // cut.num_parts
        runs.append((first + parts.start * size, len(parts) * size))
        first += block
    return Slice(dim, tuple(tensor.shape), tuple(runs))


def take_slice(module: nn.Module, kind: str, part: Slice) -> None:
    """Replaces a parameter of a module by a part of it, and notes in the module which part.

    Args:
        module: changed in place.
        kind: name of the parameter, such as `weight` or `bias`.
        part: what is left.
    """
    whole = module.get_parameter(kind)
    own = part.take(whole.detach()).contiguous()
    module.register_parameter(kind, nn.Parameter(own, requires_grad=whole.requires_grad))
    owner = cast("Any", module)
    owner.tensor_slices = {**getattr(module, "tensor_slices", {}), kind: part}


def cut_layer(layer: nn.Module, plan: LayerPlan, degree: int, rank: int = 0) -> None:
    """Reduces a layer to the part of one rank.

    Where the inputs of a map are cut, its bias stays whole and only the first rank keeps it: the ranks'
    results are summed, so the bias must be added once.

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
        owner = layer.get_submodule(cut.path)
        take_slice(owner, cut.kind, _slice(owner.get_parameter(cut.kind), cut, parts))
        if not isinstance(owner, nn.Linear):
            # Experts, and numbers for columns or heads: the code reads the width from the parameters.
            continue
        linear = owner
        linear.out_features, linear.in_features = linear.weight.shape
        if linear.bias is not None and not cut.by_input:
            take_slice(linear, "bias", _slice(linear.bias, cut, parts, dim=0))
        elif linear.bias is not None and rank > 0:
            # Only the first rank adds the bias.
            linear.register_parameter("bias", None)
    for path, attribute in plan.counts:
        module = layer.get_submodule(path)
        setattr(module, attribute, getattr(module, attribute) // degree)
    for path in (*plan.between, *plan.partial):
        module = cast("Any", layer.get_submodule(path))
        # Noted as a slice of everything: a part that all ranks hold, so that its gradients are summed.
        module.tensor_slices = {
            kind: Slice(0, tuple(p.shape), ((0, p.shape[0]),))
            for kind, p in module.named_parameters(recurse=False)
        }
    # `add_collectives` finds the plan here.
    cast("Any", layer).tensor_parallel_plan = plan


class Sum(torch.autograd.Function):
    """Forward: the sum over the ranks; backward: passes the gradient on.

    Recomputation in mode `selective` keeps the result of a linear map. The sum is written in its place, so
    the replay finds the sum there and sends nothing. The result of a map with LoRA adapters is not kept, so
    it is summed again.
    """

    @staticmethod
    def forward(ctx: Any, summand: torch.Tensor, sums: Sums, is_kept: bool = True) -> torch.Tensor:
        """The sum, written in place of the summand."""
        del ctx
        # Summing in place is safe, as in Megatron: no backward needs the result of this linear map.
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
    """Forward: passes the states on; backward: the sum of the gradients over the ranks."""

    @staticmethod
    def forward(ctx: Any, states: torch.Tensor, sums: Sums) -> torch.Tensor:
        """The states, unchanged."""
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
        # Layers pass the hidden states as the first argument or by name.
        if args:
            return (Enter.apply(args[0], sums), *args[1:]), kwargs
        return args, {**kwargs, "hidden_states": Enter.apply(kwargs["hidden_states"], sums)}

    return hook


def _sum_hook(sums: Sums) -> Any:
    def hook(module: nn.Module, _: tuple[Any, ...], output: torch.Tensor) -> Any:
        return Sum.apply(output, sums, isinstance(module, nn.Linear))

    return hook


class _EmbeddingHooks:
    """Hooks for an embedding of which a rank has some rows: other ids give zeros, and the ranks sum."""

    def __init__(self, rows: nn.Embedding, sums: Sums) -> None:
        self._rows, self._sums = rows, sums
        self._is_own = torch.empty(0)

    def register(self) -> None:
        """Registers the hooks: from now on the embedding gives what the whole one would."""
        self._rows.register_forward_pre_hook(self._enter)
        self._rows.register_forward_hook(self._sum)

    def _enter(self, _: nn.Module, args: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
        self._is_own, local = own_rows(args[0], self._rows)
        return (local,)

    def _sum(self, _: nn.Module, __: tuple[Any, ...], output: torch.Tensor) -> torch.Tensor:
        return Sum.apply(output.masked_fill(~self._is_own[..., None], 0), self._sums)


def own_rows(ids: torch.Tensor, owner: nn.Module) -> tuple[torch.Tensor, torch.Tensor]:
    """Which ids belong to the rows of a rank.

    Args:
        ids: of the whole vocabulary.
        owner: embedding or head, as `cut_vocabulary` left it.

    Returns:
        A mask of these ids; and the ids, counted from the rank's first row, with 0 for all others.
    """
    cut: Any = owner
    local = ids - cut.first_row
    is_own = (local >= 0) & (local < cut.weight.shape[0])
    return is_own, local.masked_fill(~is_own, 0)


def add_collectives(module: nn.Module, sums: Sums) -> int:
    """Makes cut layers, embeddings and heads give the whole result, on every rank of a group.

    Where several ranks hold the same head of keys and values, each gets only a summand of its gradient; the
    runtime adds these up.

    Args:
        module: holds layers that `cut_layer` cut over as many ranks as the group has, each rank its part;
            changed in place.
        sums: over the ranks. All of them must run the same layers, forward and backward, on the same inputs.

    Returns:
        Number of cut layers that were found.
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
            share_rows(layer, plan.entries, plan.reads_at(), plan.sums_at(), sums)
            continue
        for path in plan.entries:
            layer.get_submodule(path).register_forward_pre_hook(_enter_hook(sums), with_kwargs=True)
        for path in plan.sums_at():
            layer.get_submodule(path).register_forward_hook(_sum_hook(sums))
    return len(layers)


def _cut_layers(module: nn.Module) -> Iterable[tuple[nn.Module, LayerPlan]]:
    for layer in module.modules():
        plan = getattr(layer, "tensor_parallel_plan", None)
        if plan is not None:
            yield layer, plan
