"""The second line: all data-parallel ranks encode the media of a microbatch, each as much as the others.

    this rank's media --> rows sent by predicted cost --> the tower --> features sent back --> as before
                          sizes of all ranks (gloo, on the host)        their gradients: the same way

The model's own code runs on, before and after its tower; only the tower's `forward` reads other rows. A rank
with media of fewer kinds than others (text alone, images where others have videos) takes part without a row,
in the same place, so that all ranks make the same calls in forward and backward.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import distributed

from dflop.integrations.assignment import assign_units
from dflop.integrations.encoder_families import find_family
from dflop.integrations.encoder_tiles import Media
from dflop.integrations.exchange import exchange, send_rows
from dflop.integrations.idle import depend, pass_children, pass_module, reached

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import nn
    from torch.distributed import ProcessGroup
    from torch.distributed.device_mesh import DeviceMesh

_DTYPES = (torch.float32, torch.float16, torch.bfloat16, torch.float64)
_MAX_DIMENSIONS = 6


class _Absent:
    """The argument of a tower on a rank that has no media for this call."""


class BalancedEncoder:
    """A model whose encoder is shared out; made by `balance_encoder`.

    Attributes:
        loads: predicted work of each rank in the last call of the tower, and what it was without sharing:
            two lists, in the unit of the cost.
    """

    def __init__(
        self,
        model: nn.Module,
        group: ProcessGroup | DeviceMesh | None,
        cost: Callable[[int], float] | None,
    ) -> None:
        """See `balance_encoder`."""
        self._family = find_family(model)
        self._model: Any = self._family.model
        self._tower: Any = getattr(self._model, self._family.tower)
        self._cost = cost
        self._num_ranks, self._rank = 1, 0
        if distributed.is_available() and distributed.is_initialized():
            self._join(distributed.group.WORLD if group is None else group)
        self.loads: tuple[list[float], list[float]] = ([], [])
        self._next_call = 0
        self._num_calls = max(1, len(self._family.methods))
        self._is_in_method = False
        self._token: torch.Tensor | None = None
        # Parameters of the tower that no feature depends on, as the norm after the last layer that is read.
        self._unread: list[nn.Parameter] | None = None
        self._hooks: list[Any] = []
        self._replaced: list[tuple[Any, str]] = []
        self._wrap()

    def _join(self, group: Any) -> None:
        mesh_group = group.get_group() if hasattr(group, "get_group") else group
        ranks = distributed.get_process_group_ranks(mesh_group)
        self._num_ranks = len(ranks)
        self._rank = distributed.get_rank(mesh_group)
        # Own groups: the order of calls here does not depend on when DDP or FSDP call theirs. Sizes travel
        # between hosts: a device would have to finish before they could be read.
        backend = distributed.get_backend(mesh_group)
        self._rows: Any = distributed.new_group(ranks, backend=backend, use_local_synchronization=True)
        self._sizes: Any = distributed.new_group(ranks, backend="gloo", use_local_synchronization=True)

    def remove(self) -> None:
        """The model is as before."""
        for hook in self._hooks:
            hook.remove()
        for owner, name in self._replaced:
            del owner.__dict__[name]
        self._hooks, self._replaced = [], []

    def _wrap(self) -> None:
        if getattr(self._tower, "_dflop_is_shared", False):
            message = "the encoder of this model is shared out already"
            raise ValueError(message)
        self._forward = self._tower.forward
        self._replace(self._tower, "forward", self._encode)
        self._replace(self._tower, "_dflop_is_shared", True)
        for position, name in enumerate(self._family.methods):
            self._replace(self._model, name, self._call(position, getattr(self._model, name)))
        self._hooks.append(self._model.register_forward_pre_hook(self._begin))
        self._backbone = getattr(self._model, self._family.backbone)
        self._end_hook = self._backbone.register_forward_pre_hook(self._end, with_kwargs=True, prepend=True)
        self._hooks.append(self._end_hook)

    def _replace(self, owner: Any, name: str, value: Any) -> None:
        owner.__dict__[name] = value
        self._replaced.append((owner, name))

    @property
    def _is_on(self) -> bool:
        # Outside of training ranks need not call the model equally often: generation, evaluation.
        return self._num_ranks > 1 and self._model.training

    def _begin(self, *_: Any) -> None:
        self._next_call = 0
        self._token = None
        # FSDP puts its hook before those it finds. The calls of absent media must come before it gathers the
        # backbone, as the tower's calls do on other ranks.
        self._backbone._forward_pre_hooks.move_to_end(self._end_hook.id, last=False)

    def _call(self, position: int, method: Any) -> Any:
        def call(*args: Any, **kwargs: Any) -> Any:
            # Qwen3-VL's method for videos calls that for images: the outer one says which turn it is.
            if self._is_on and not self._is_in_method:
                self._absent_until(position)
                self._next_call = position
                self._is_in_method = True
                try:
                    return method(*args, **kwargs)
                finally:
                    self._is_in_method = False
            return method(*args, **kwargs)

        return call

    def _end(self, module: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        del module
        if not self._is_on:
            return None
        self._absent_until(self._num_calls)
        token, self._token = self._token, None
        embeddings = kwargs.get("inputs_embeds")
        if token is None or embeddings is None:
            return None
        return args, {**kwargs, "inputs_embeds": embeddings + token.to(embeddings.dtype)}

    def _absent_until(self, position: int) -> None:
        """Takes part in the calls before `position` that this rank has no media for."""
        while self._next_call < position:
            # The tower's own hooks run around it: FSDP's among them.
            features = self._tower(_Absent())
            token = self._new_token() if features is None else features.sum()
            # When no rank had media the tower did not run: what of it is whole is depended on here.
            if features is None:
                token = depend(token, self._tower.parameters())
                if self._family.projector is not None:
                    token = depend(token, getattr(self._model, self._family.projector).parameters())
            elif self._family.projector is not None:
                token = pass_module(getattr(self._model, self._family.projector), token)
            token = depend(token, [getattr(self._model, name) for name in self._family.parameters])
            if token.requires_grad:
                self._token = token if self._token is None else self._token + token

    def _new_token(self) -> torch.Tensor:
        return torch.zeros((), device=next(self._tower.parameters()).device)

    def _encode(self, *args: Any, **kwargs: Any) -> Any:
        """What stands in for the tower's `forward`.

        Every rank calls it equally often. It sends sizes between hosts and waits for those, and sends rows
        without waiting.
        """
        is_absent = bool(args) and isinstance(args[0], _Absent)
        if not is_absent and not self._is_on:
            return self._forward(*args, **kwargs)
        kwargs.pop("return_dict", None)
        family = self._family
        mine = Media(torch.empty(0, device=self._new_token().device))
        if not is_absent:
            mine = self._named(args, kwargs)
        self._next_call += 1
        shape, dtype, grids = self._gather_sizes(mine)
        if shape is None:
            return None if is_absent else family.output(self._no_features(mine))
        rows = mine.rows.to(dtype) if mine.rows.numel() else mine.rows.new_empty(0, *shape, dtype=dtype)
        costs = [[self._cost_of(grid) for grid in units] for units in grids]
        owners = assign_units(costs)
        self.loads = _loads(costs, owners)
        features = self._share(rows, grids, owners, mine.extra)
        return features if is_absent else family.output(features)

    def _named(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Media:
        names = ("pixel_values", "hidden_states", "input_features")
        rows = args[0] if args else next(kwargs.pop(name) for name in names if name in kwargs)
        return self._family.media(rows, kwargs)

    def _no_features(self, mine: Media) -> torch.Tensor:
        message = f"the tower was called with {tuple(mine.rows.shape)} rows, and no rank has any"
        raise ValueError(message)

    def _cost_of(self, grid: tuple[int, int] | None) -> float:
        if self._cost is None or grid is None:
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
        headers = self._gather(header)
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
            tables = self._gather(flat + [0] * (2 * most - len(flat)))
            grids = [
                [(table[2 * k], table[2 * k + 1]) for k in range(count)]
                for table, count in zip(tables, counts, strict=True)
            ]
        return tail[:num_dimensions], _DTYPES[dtype], grids

    def _gather(self, numbers: list[int]) -> list[list[int]]:
        """The numbers of every rank, as many from each."""
        sent = torch.tensor(numbers, dtype=torch.int64)
        arrived = [torch.empty_like(sent) for _ in range(self._num_ranks)]
        distributed.all_gather(arrived, sent, group=self._sizes)
        return [table.tolist() for table in arrived]

    def _share(
        self,
        rows: torch.Tensor,
        grids: list[list[tuple[int, int] | None]],
        owners: list[list[int]],
        extra: dict[str, Any],
    ) -> torch.Tensor:
        """Features of this rank's units, in their order."""
        family, rank, num_ranks = self._family, self._rank, self._num_ranks

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
        arrived = send_rows(_pick(rows, sizes_in, order), sent_in, received_in, self._rows)
        todo = [
            grid
            for units, targets in zip(grids, owners, strict=True)
            for grid, owner in zip(units, targets, strict=True)
            if owner == rank
        ]
        has_idle = any(not any(rank in targets for targets in owners) for rank in everyone)
        features, token = self._run(Media(arrived, todo, extra), len(todo), has_idle)  # type: ignore[arg-type]
        back = exchange(features, token, sent_out, received_out, self._rows)
        sizes_out = [family.rows_out(grids[rank][unit]) for unit in order]
        return _pick(back, sizes_out, sorted(range(len(order)), key=order.__getitem__))

    def _run(self, media: Media, num_units: int, has_idle: bool) -> tuple[torch.Tensor, torch.Tensor]:
        """Features of what arrived, and a token that every parameter of the tower leads to."""
        features: torch.Tensor | None = None
        if num_units:
            features = self._family.features(self._family.encode(self._forward, media))
            if self._unread is None:
                used = reached(features)
                self._unread = [p for p in self._tower.parameters() if id(p) not in used]
            token = depend(self._new_token(), self._unread)
        else:
            token = pass_children(self._tower, self._new_token(), self._family.unread(self._tower))
        if has_idle:
            header = [0] * (2 + _MAX_DIMENSIONS)
            if features is not None:
                tail = list(features.shape[1:])
                header = [1 + _DTYPES.index(features.dtype), len(tail)]
                header += tail + [0] * (_MAX_DIMENSIONS - len(tail))
            dtype, num_dimensions, *tail = next(h for h in self._gather(header) if h[0])
            if features is None:
                features = token.new_empty(0, *tail[:num_dimensions], dtype=_DTYPES[dtype - 1])
        assert features is not None
        if token.requires_grad and not features.requires_grad:
            # The exchange of a rank that computed nothing has a backward too.
            features.requires_grad_()
        return features, token


def balance_encoder(
    model: nn.Module,
    group: ProcessGroup | DeviceMesh | None = None,
    cost: Callable[[int], float] | None = None,
) -> BalancedEncoder:
    """Shares the encoder's work of each microbatch out over the data-parallel ranks; call it on each of them.

    In training mode the tiles, frames or windows of all ranks' media are divided by predicted cost; features
    and their gradients come back by all-to-all. Gradients are those of the model as it was. A microbatch of
    text alone takes part and hangs nobody, under DDP and FSDP2; no picture is made up for it. Call it
    before or after `fully_shard`, and on the model inside DDP.

    Every rank of `group` must call the model equally often in training mode, as DDP and FSDP demand anyway.
    In evaluation mode the model is as before.

    Args:
        model: LLaVA 1.5, LLaVA-NeXT, LLaVA-OneVision, InternVL, Qwen2-VL, Qwen2.5-VL, Qwen3-VL, Qwen2-Audio,
            GLM-4.1V, GLM-4.6V, Audio Flamingo 3, Idefics3, SmolVLM or Mistral3 of transformers.
        group: the data-parallel ranks, or a mesh of one dimension; None: all ranks. Without a process group,
            or of one rank, there is nothing to share and the model runs as it was.
        cost: work of a unit by its number of patches, in any one unit; None: its multiplications. Only the
            vision towers of Qwen, GLM and Mistral3 ask: units of the others are all equal.

    Returns:
        A handle: `loads` says what was shared, `remove()` undoes it.

    Raises:
        ValueError: the model is of no such family, or its encoder is shared out already.
    """
    return BalancedEncoder(model, group, cost)


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
