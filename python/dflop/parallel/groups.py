"""Which ranks sum a gradient together, and among which of them it is cut into shards.

holders of a parameter   0 1 2 3
copies (ZeRO-0)          one group:   0 1 2 3
shards (ZeRO-1 to 3)     one group:   0 1 2 3
hybrid, shard_ranks 2    shards:      0 1 | 2 3      copies of a shard:   0 2 | 1 3

A head tied to the embedding, on another stage than it: 0 1 hold the one, 4 5 the other
copies (ZeRO-0)          one group:   0 1 4 5
shards (ZeRO-1, 2)       each stage:  0 1 | 4 5      ends of a shard:     0 4 | 1 5

Experts dealt out over 2 of 4 ranks: 0 2 hold some, 1 3 the others; two sets of holders, beside 0 1 2 3
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Sequence
    from datetime import timedelta

Ranks = tuple[int, ...]


@dataclass(frozen=True)
class HolderGroups:
    """The groups of the ranks that hold the same parameters, as this rank needs them."""

    whole: dist.ProcessGroup | None
    """All holders, where each has all of the parameters; none where they are cut, or this rank is alone."""
    shards: DeviceMesh | None
    """All holders, where the parameters are cut: one dimension, or (copies, shards); else none."""
    ends: dist.ProcessGroup | None = None
    """Where several stages hold the parameters, each cut among its own ranks: this rank, and those of the
    other stages with the same shard; else none."""


def holder_groups(
    holders: Iterable[Ranks],
    cut: Collection[Ranks],
    rank: int,
    shard_degree: int | None,
    device: torch.device,
    timeout: timedelta,
) -> dict[Ranks, HolderGroups]:
    """The groups of each set of holders. Every rank must call it; blocks until all have.

    Args:
        holders: Each set of ranks that hold the same parameters, on every rank alike.
        cut: The sets whose parameters are cut, if only into one shard. One of `holders` may be several of
            them together.
        rank: This one.
        shard_degree: Among how many of its holders a parameter is cut, those that follow each other; it
            divides their number. None: among all.
        device: Of this rank.
        timeout: Of each collective.

    Returns:
        By set: the groups of this rank; none for sets that it is not in.
    """
    found: dict[Ranks, HolderGroups] = {}
    for ranks in sorted({*holders, *cut}):
        parts = [part for part in cut if len(part) > 1 and set(part) < set(ranks)]
        if parts and ranks not in cut:
            # Each part is cut into the same shards, in the order of its ranks.
            ends = own_group(zip(*sorted(parts), strict=True), rank, timeout)
            connect_group(ends, device)
            found[ranks] = HolderGroups(None, None, ends)
            continue
        if ranks not in cut:
            # Collective over all ranks, those outside the group too.
            group = dist.new_group(list(ranks), timeout=timeout) if len(ranks) > 1 else None
            whole = group if isinstance(group, dist.ProcessGroup) else None
            connect_group(whole, device)
            found[ranks] = HolderGroups(whole, None)
            continue
        width = shard_degree or len(ranks)
        rows = [ranks[start : start + width] for start in range(0, len(ranks), width)]
        shards = own_group(rows, rank, timeout)
        copies = own_group(zip(*rows, strict=True), rank, timeout) if len(rows) > 1 else None
        connect_group(shards, device)
        connect_group(copies, device)
        if shards is None:
            found[ranks] = HolderGroups(None, None)
        elif copies is None:
            found[ranks] = HolderGroups(None, DeviceMesh.from_group(shards, device.type))
        else:
            grid = DeviceMesh.from_group(
                [copies, shards], device.type, mesh=torch.tensor(rows), mesh_dim_names=("copies", "shards")
            )
            found[ranks] = HolderGroups(None, grid)
    return found


def connect_group(group: dist.ProcessGroup | None, device: torch.device) -> None:
    """Lets the ranks of a group meet once. NCCL takes its memory then, while there is some.

    Args:
        group: every rank of it must call this; none: nothing is done.
        device: of this rank; on a CPU nothing is done.
    """
    if group is not None and device.type == "cuda":
        dist.all_reduce(torch.zeros(1, device=device), group=group)


def own_group(sets: Iterable[Sequence[int]], rank: int, timeout: timedelta) -> dist.ProcessGroup | None:
    """A group of each set, all made on every rank. Every rank must call it; blocks until all have.

    Args:
        sets: Of ranks, on every rank alike; none is in two.
        rank: This one.
        timeout: Of each collective.

    Returns:
        The group that this rank is in; none if it is in none.
    """
    own: dist.ProcessGroup | None = None
    for ranks in sets:
        group = dist.new_group(list(ranks), timeout=timeout)
        if rank in ranks:
            assert isinstance(group, dist.ProcessGroup)
            own = group
    return own
