"""One tower of a model, whose rows are encoded by all data-parallel ranks.

this rank's media --> rows sent by predicted cost --> the tower --> features sent back --> as before
                      sizes of all ranks (gloo, on the host)        their gradients: the same way
"""

from __future__ import annotations

import atexit
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import distributed
from torch.distributed.tensor import DTensor

from dflop.integrations.assignment import assign_units
from dflop.integrations.encoder_tiles import Media
from dflop.integrations.exchange import exchange
from dflop.integrations.idle import depend, pass_children, pass_module, reached
from dflop.models.sums import send_rows

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from torch import nn

    from dflop.integrations.encoder_tiles import TileTower

_DTYPES = (torch.float32, torch.float16, torch.bfloat16, torch.float64)
_MAX_DIMENSIONS = 6


class Absent:
    """The argument of a tower on a rank that has no media for this call."""


def _leave(group: Any) -> None:
    """Ends a group of gloo, whose threads may abort a process that ends before (PyTorch 2.15)."""
    if distributed.is_initialized():
        # It is gone where the trainer has ended its groups itself.
        with suppress(ValueError, RuntimeError):
            distributed.destroy_process_group(group)


class Ranks:
    """The data-parallel ranks, with groups of their own.

    The order of calls here does not depend on when DDP or FSDP call theirs. Sizes travel between hosts: a
    device would have to finish before they could be read.
    """

    def __init__(self, group: Any) -> None:
        """All ranks of `group`, a process group or a mesh of one dimension, call it; None: one rank."""
        self.count, self.own = 1, 0
        if group is None:
            return
        mesh_group = group.get_group() if hasattr(group, "get_group") else group
        ranks = distributed.get_process_group_ranks(mesh_group)
        self.count = len(ranks)
        self.own = distributed.get_rank(mesh_group)
        backend = distributed.get_backend(mesh_group)
        self.rows: Any = distributed.new_group(ranks, backend=backend, use_local_synchronization=True)
        self._sizes: Any = distributed.new_group(ranks, backend="gloo", use_local_synchronization=True)
        atexit.register(_leave, self._sizes)

    def __deepcopy__(self, _: dict[int, Any]) -> Ranks:
        """Itself: a copy of the model meets the same ranks."""
        return self

    def gather(self, numbers: list[int]) -> list[list[int]]:
        """The numbers of every rank, as many from each; every rank calls it and waits."""
        sent = torch.tensor(numbers, dtype=torch.int64)
        arrived = [torch.empty_like(sent) for _ in range(self.count)]
        distributed.all_gather(arrived, sent, group=self._sizes)
        return [table.tolist() for table in arrived]


class SharedTower:
    """A tower whose rows other ranks encode too.

    Attributes:
        tower: the module; its `forward` is not replaced here.
    """

    def __init__(self, family: TileTower, ranks: Ranks, cost: Callable[[int], float] | None) -> None:
        """What `family` knows of the tower, and who shares its work."""
        self._family, self._ranks, self._cost = family, ranks, cost
        self.tower: Any = getattr(family.model, family.tower)
        self._forward = self.tower.forward
        # Parameters of the tower that no feature depends on, as the norm after the last layer that is read.
        self._unread: list[nn.Parameter] | None = None

    def as_it_was(self, *args: Any, **kwargs: Any) -> Any:
        """The tower's own `forward`."""
        return self._forward(*args, **kwargs)

    def pass_by(self) -> torch.Tensor:
        """Takes part in a call that this rank has no media for.

        Returns:
            Zero, a function of each parameter that trains.
        """
        model, family = self._family.model, self._family
        # The tower's own hooks run around it: FSDP's among them.
        features = self.tower(Absent())
        token = self._new_token() if features is None else features.sum()
        projector = None if family.projector is None else getattr(model, family.projector)
        # When no rank had media the tower did not run: what of it is whole is depended on here.
        if features is None:
            token = depend(token, self.tower.parameters())
            if projector is not None:
                token = depend(token, projector.parameters())
            token = self._forget(token)
        elif projector is not None:
            token = pass_module(projector, token)
        return depend(token, [getattr(model, name) for name in family.parameters])

    def _new_token(self) -> torch.Tensor:
        return torch.zeros((), device=next(self.tower.parameters()).device)

    def encode(self, *args: Any, **kwargs: Any) -> tuple[Any, tuple[list[float], list[float]] | None]:
        """What stands in for the tower's `forward` where it is shared.

        Every rank calls it equally often. It sends sizes between hosts and waits for those, and sends rows
        without waiting.

        Args:
            *args: of the tower, its media first; or an `Absent` alone.
            **kwargs: of the tower.

        Returns:
            What the tower gives, or the features alone where the rank has no media (None: no rank has), and
            the loads of the ranks, with and without sharing.
        """
        is_absent = bool(args) and isinstance(args[0], Absent)
        kwargs.pop("return_dict", None)
        family = self._family
        mine = Media(torch.empty(0, device=self._new_token().device))
        if not is_absent:
            mine = self._named(args, kwargs)
        shape, dtype, grids = self._gather_sizes(mine)
        if shape is None:
            return (None if is_absent else family.output(self._no_features(mine))), None
        rows = mine.rows.to(dtype) if mine.rows.numel() else mine.rows.new_empty(0, *shape, dtype=dtype)
        costs = [[self._cost_of(grid) for grid in units] for units in grids]
        owners = assign_units(costs)
        features = self._share(rows, grids, owners, mine.extra)
        return (features if is_absent else family.output(features)), _loads(costs, owners)

    def accompany(self, *args: Any, **kwargs: Any) -> tuple[Any, torch.Tensor | None]:
        """What stands in for the tower's `forward` where each rank encodes its own media.

        Every rank calls it equally often. It sends one number between hosts and waits for the others'.

        Args:
            *args: of the tower, or an `Absent` alone.
            **kwargs: of the tower.

        Returns:
            What the tower gives, and zero as a function of the parameters that no feature depends on. Of a
            rank without media a zero that depends on all parameters (None: no rank has media), and None.
        """
        is_absent = bool(args) and isinstance(args[0], Absent)
        has_media = any(number for (number,) in self._ranks.gather([int(not is_absent)]))
        if not is_absent:
            output = self._forward(*args, **kwargs)
            if not torch.is_grad_enabled():
                # In evaluation nothing depends on a parameter: what is remembered of it would be wrong later.
                return output, None
            return output, self._depend_on_unread(self._family.features(output))
        if not has_media:
            return None, None
        return self._pass_children(), None

    def _pass_children(self) -> torch.Tensor:
        """Zero, after each module of the tower was called in the order in which its `forward` calls them."""
        first = [getattr(self.tower, name) for name in self._family.called_first]
        unread = self._family.unread(self.tower)
        return self._forget(pass_children(self.tower, self._new_token(), unread, first))

    def _forget(self, token: torch.Tensor) -> torch.Tensor:
        """`token`; its backward leaves what no feature depends on without gradient, as the model does alone.

        DDP waits for a gradient of each parameter and gives it zeros. An optimizer would let weights decay by
        those, so they go when it has summed all.
        """
        unread = self._family.unread(self.tower)
        if token.requires_grad and unread:
            token.register_hook(partial(_drop_gradients, unread))
        return token

    def _depend_on_unread(self, features: torch.Tensor) -> torch.Tensor:
        """Zero, a function of each parameter that trains and that `features` do not depend on."""
        if self._unread is None:
            used = reached(features)
            self._unread = [p for p in self.tower.parameters() if id(p) not in used]
        return self._forget(depend(self._new_token(), self._unread))

    def _named(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Media:
        # Most models hand on what trainers give them for the loss.
        kwargs.pop("num_items_in_batch", None)
        names = ("pixel_values", "hidden_states", "input_features")
        rows = args[0] if args else next(kwargs.pop(name) for name in names if name in kwargs)
        by_place = dict(zip(self._family.positional, args[1:], strict=True)) if args[1:] else {}
        return self._family.media(rows, {**by_place, **kwargs})

    def _no_features(self, mine: Media) -> torch.Tensor:
        message = f"the tower was called with {tuple(mine.rows.shape)} rows, and no rank has any"
        raise ValueError(message)

    def _cost_of(self, grid: tuple[int, int] | None) -> float:
        if self._cost is None or grid is None or not self._family.is_of_patches:
            return self._family.cost(grid)
        return float(self._cost(self._family.rows_in(grid)))

    def _gather_sizes(
        self, mine: Media
    ) -> tuple[list[int] | None, torch.dtype, list[list[tuple[int, int] | None]]]:
        """Shape and type of a row, and the grids of all ranks' units; every rank calls it and waits."""
        num_units = len(mine.grids) if mine.grids is not None else mine.rows.shape[0]
        header = [0] * (3 + _MAX_DIMENSIONS)
        if num_units:
            tail = list(mine.rows.shape[1:])
            header = [num_units, _DTYPES.index(mine.rows.dtype), len(tail)]
            header += tail + [0] * (_MAX_DIMENSIONS - len(tail))
        headers = self._ranks.gather(header)
        present = [h for h in headers if h[0]]
        if not present:
            return None, torch.float32, []
        if any(h[1:] != present[0][1:] for h in present):
            rows = sorted({f"{_DTYPES[h[1]]} {tuple(h[3 : 3 + h[2]])}" for h in present})
            message = f"ranks give the tower rows of {', '.join(rows)}, must be of one type and shape"
            raise ValueError(message)
        _, dtype, num_dimensions, *tail = present[0]
        counts = [h[0] for h in headers]
        grids: list[list[tuple[int, int] | None]] = [[None] * count for count in counts]
        if self._family.has_grids:
            most = max(counts)
            flat = [number for grid in mine.grids or [] for number in grid]
            tables = self._ranks.gather(flat + [0] * (2 * most - len(flat)))
            grids = [
                [(table[2 * k], table[2 * k + 1]) for k in range(count)]
                for table, count in zip(tables, counts, strict=True)
            ]
        return tail[:num_dimensions], _DTYPES[dtype], grids

    def _share(
        self,
        rows: torch.Tensor,
        grids: list[list[tuple[int, int] | None]],
        owners: list[list[int]],
        extra: dict[str, Any],
    ) -> torch.Tensor:
        """Features of this rank's units, in their order."""
        family, rank, num_ranks = self._family, self._ranks.own, self._ranks.count

        def count(source: int, target: int, rows_of: Any) -> int:
            pairs = zip(grids[source], owners[source], strict=True)
            return sum(rows_of(grid) for grid, owner in pairs if owner == target)

        everyone = range(num_ranks)
        sent_in = [count(rank, other, family.rows_in) for other in everyone]
        received_in = [count(other, rank, family.rows_in) for other in everyone]
        sent_out = [count(other, rank, family.rows_out) for other in everyone]
        received_out = [count(rank, other, family.rows_out) for other in everyone]
        # Units by the rank they go to; among those of one rank, in order.
        order = sorted(range(len(owners[rank])), key=lambda unit: owners[rank][unit])
        sizes_in = [family.rows_in(grid) for grid in grids[rank]]
        arrived = send_rows(_pick(rows, sizes_in, order), sent_in, received_in, self._ranks.rows)
        todo = [
            grid
            for units, targets in zip(grids, owners, strict=True)
            for grid, owner in zip(units, targets, strict=True)
            if owner == rank
        ]
        has_idle = any(not any(rank in targets for targets in owners) for rank in everyone)
        features, token = self._run(Media(arrived, todo, extra), len(todo), has_idle)  # type: ignore[arg-type]
        back = exchange(features, token, sent_out, received_out, self._ranks.rows)
        sizes_out = [family.rows_out(grids[rank][unit]) for unit in order]
        return _pick(back, sizes_out, sorted(range(len(order)), key=order.__getitem__))

    def _run(self, media: Media, num_units: int, has_idle: bool) -> tuple[torch.Tensor, torch.Tensor]:
        """Features of what arrived, and a token that every parameter of the tower leads to."""
        features: torch.Tensor | None = None
        if num_units:
            features = self._family.features(self._family.encode(self._forward, media))
            token = self._depend_on_unread(features)
        else:
            token = self._pass_children()
        if has_idle:
            header = [0] * (2 + _MAX_DIMENSIONS)
            if features is not None:
                tail = list(features.shape[1:])
                header = [1 + _DTYPES.index(features.dtype), len(tail)]
                header += tail + [0] * (_MAX_DIMENSIONS - len(tail))
            dtype, num_dimensions, *tail = next(h for h in self._ranks.gather(header) if h[0])
            if features is None:
                features = token.new_empty(0, *tail[:num_dimensions], dtype=_DTYPES[dtype - 1])
        assert features is not None
        if token.requires_grad and not features.requires_grad:
            # The exchange of a rank that computed nothing has a backward too.
            features.requires_grad_()
        return features, token


def _drop_gradients(modules: Sequence[nn.Module], _: torch.Tensor) -> None:
    """Has the backward under way end with no gradient in these modules; FSDP gives their shards none."""
    engine: Any = torch.autograd.Variable._execution_engine  # noqa: SLF001

    def drop() -> None:
        for module in modules:
            for parameter in module.parameters():
                if not isinstance(parameter, DTensor):
                    parameter.grad = None

    # What is queued at the end of a backward runs after all that was queued in it, as DDP's own end.
    engine.queue_callback(lambda: engine.queue_callback(drop))


def _pick(rows: torch.Tensor, sizes: list[int], order: list[int]) -> torch.Tensor:
    """Rows of units of these sizes, in another order of the units; the same tensor where that is no other."""
    if order == sorted(order):
        return rows
    if set(sizes) == {1}:
        return rows[torch.tensor(order, device=rows.device)]
    units = rows.split(sizes)
    return torch.cat([units[unit] for unit in order])


def _loads(costs: list[list[float]], owners: list[list[int]]) -> tuple[list[float], list[float]]:
    shared = [0.0] * len(costs)
    for units, targets in zip(costs, owners, strict=True):
        for cost, owner in zip(units, targets, strict=True):
            shared[owner] += cost
    return shared, [sum(units) for units in costs]
