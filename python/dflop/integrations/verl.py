"""A drop-in for verl's `get_seqlen_balanced_partitions`: same arguments and promises, more even loads.

    import dflop.integrations.verl
    verl.utils.seqlen_balancing.get_seqlen_balanced_partitions = (
        dflop.integrations.verl.get_seqlen_balanced_partitions
    )

It needs neither verl nor torch.
"""

from __future__ import annotations

from heapq import heapify, heappop, heappush
from typing import TYPE_CHECKING

from dflop._native import balance

if TYPE_CHECKING:
    from collections.abc import Sequence

_MAX_SWEEPS = 200
"""Rounds of swaps between two partitions of equal size, each better than none; a few suffice."""


def get_seqlen_balanced_partitions(
    seqlen_list: Sequence[int], k_partitions: int, equal_size: bool
) -> list[list[int]]:
    """Positions of sequences in `k_partitions` lists whose sums of lengths are even.

    Args:
        seqlen_list: lengths, or any other cost in integers.
        k_partitions: how many lists, at most as many as sequences.
        equal_size: whether each list has as many sequences; then `k_partitions` divides their number.

    Returns:
        The lists, ascending, none empty; each position stands in one of them.

    Raises:
        AssertionError: the numbers do not allow it, as verl has it.
    """
    lengths = [int(length) for length in seqlen_list]
    if len(lengths) < k_partitions:
        message = f"number of items:[{len(lengths)}] < k_partitions:[{k_partitions}]"
        raise AssertionError(message)
    if equal_size and len(lengths) % k_partitions:
        message = f"{len(lengths)} % {k_partitions} != 0"
        raise AssertionError(message)
    if equal_size:
        return sorted(sorted(part) for part in _equal_sizes(lengths, k_partitions))
    parts: list[list[int]] = [[] for _ in range(k_partitions)]
    # A length of zero weighs nothing and may lie anywhere.
    for position, part in enumerate(balance([0] * len(lengths), lengths, k_partitions).assignment):
        parts[part].append(position)
    for part in parts:
        if not part:
            fullest = max(parts, key=len)
            part.append(fullest.pop(min(range(len(fullest)), key=lambda at: lengths[fullest[at]])))
    return sorted(sorted(part) for part in parts)


def _equal_sizes(lengths: list[int], num_parts: int) -> list[list[int]]:
    """Differencing by rounds of one sequence a part, then swaps between the heaviest part and others."""
    parts = _difference(lengths, num_parts)
    loads = [sum(lengths[i] for i in part) for part in parts]
    for _ in range(_MAX_SWEEPS):
        heavy = max(range(num_parts), key=loads.__getitem__)
        swap = _best_swap(lengths, parts, loads, heavy)
        if swap is None:
            break
        light, at, other = swap
        moved = lengths[parts[heavy][at]] - lengths[parts[light][other]]
        parts[heavy][at], parts[light][other] = parts[light][other], parts[heavy][at]
        loads[heavy] -= moved
        loads[light] += moved
    return parts


def _best_swap(
    lengths: list[int], parts: list[list[int]], loads: list[int], heavy: int
) -> tuple[int, int, int] | None:
    """(part, position in the heaviest, position in that part) after which the heavier of both is lightest."""
    best: tuple[int, tuple[int, int, int]] | None = None
    for light in sorted(range(len(parts)), key=loads.__getitem__):
        gap = loads[heavy] - loads[light]
        if gap <= 0 or (best is not None and (loads[heavy] + loads[light] + 1) // 2 >= best[0]):
            # Lighter parts come first: from here on none can do better.
            break
        for at, mine in enumerate(parts[heavy]):
            for other, theirs in enumerate(parts[light]):
                moved = lengths[mine] - lengths[theirs]
                if 0 < moved < gap:
                    load = max(loads[heavy] - moved, loads[light] + moved)
                    if best is None or load < best[0]:
                        best = (load, (light, at, other))
    return None if best is None else best[1]


def _difference(lengths: list[int], num_parts: int) -> list[list[int]]:
    """The largest differencing method on rounds of `num_parts` sequences of neighbouring lengths.

    Two partial answers are joined heavy to light, those that differ most first, until one is left.
    """
    order = sorted(range(len(lengths)), key=lengths.__getitem__, reverse=True)
    heap: list[tuple[int, int, list[tuple[int, list[int]]]]] = []
    for start in range(0, len(order), num_parts):
        answer = [(lengths[i], [i]) for i in order[start : start + num_parts]]
        heap.append((answer[-1][0] - answer[0][0], start, answer))
    heapify(heap)
    while len(heap) > 1:
        _, first, mine = heappop(heap)
        _, _, theirs = heappop(heap)
        joined = [
            (load + other, part + more)
            for (load, part), (other, more) in zip(mine, reversed(theirs), strict=True)
        ]
        joined.sort(key=lambda pair: -pair[0])
        heappush(heap, (joined[-1][0] - joined[0][0], first, joined))
    return [part for _, part in heap[0][2]]
