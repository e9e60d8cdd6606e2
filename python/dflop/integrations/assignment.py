"""Which rank encodes which unit: first the work is made even, then as few units as possible travel.

A unit is what an encoder can read alone: a tile of an image, a frame of a video, a window of sound.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from dflop._native import balance

if TYPE_CHECKING:
    from collections.abc import Sequence

_LARGEST_COST = 1_000_000
"""What the largest cost becomes: the scheduler counts in integers."""


def assign_units(costs: Sequence[Sequence[float]]) -> list[list[int]]:
    """The rank that encodes each unit, for the units of each rank; equal on all ranks for equal arguments.

    Units of one cost stay where they are as far as an even count allows. Others are balanced by
    `dflop.balance`, and each bucket goes to the rank that holds most of it.

    Args:
        costs: of the units of each rank, in any one unit, above zero.

    Returns:
        As `costs`, a rank for each number.
    """
    num_ranks = len(costs)
    flat = [cost for units in costs for cost in units]
    if not flat or num_ranks == 1:
        return [[0] * len(units) for units in costs]
    if min(flat) == max(flat):
        return _even_counts([len(units) for units in costs])
    largest = max(flat)
    whole = [max(1, round(cost / largest * _LARGEST_COST)) for cost in flat]
    buckets = balance([0] * len(whole), whole, num_ranks).assignment
    holders = [rank for rank, units in enumerate(costs) for _ in units]
    held: dict[tuple[int, int], int] = {}
    for bucket, holder, cost in zip(buckets, holders, whole, strict=True):
        held[bucket, holder] = held.get((bucket, holder), 0) + cost
    rank_of: dict[int, int] = {}
    taken: set[int] = set()
    for (bucket, holder), _ in sorted(held.items(), key=lambda pair: (-pair[1], pair[0])):
        if bucket not in rank_of and holder not in taken:
            rank_of[bucket] = holder
            taken.add(holder)
    free = [rank for rank in range(num_ranks) if rank not in taken]
    for bucket in range(num_ranks):
        if bucket not in rank_of:
            rank_of[bucket] = free.pop(0)
    owners = iter(rank_of[bucket] for bucket in buckets)
    return [[next(owners) for _ in units] for units in costs]


def _even_counts(counts: Sequence[int]) -> list[list[int]]:
    """Equal units: what is above the quota moves to the ranks below theirs, in order."""
    num_ranks = len(counts)
    quota, rest = divmod(sum(counts), num_ranks)
    # Those that hold most keep the one more: fewest units travel.
    order = sorted(range(num_ranks), key=lambda rank: -counts[rank])
    targets = [quota] * num_ranks
    for rank in order[:rest]:
        targets[rank] += 1
    room = [rank for rank in range(num_ranks) for _ in range(max(0, targets[rank] - counts[rank]))]
    moved = iter(room)
    return [
        [rank if index < targets[rank] else next(moved) for index in range(count)]
        for rank, count in enumerate(counts)
    ]
