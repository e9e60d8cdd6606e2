"""Lists of samples with even work, as many as asked for: of equal counts, or under a cap on tokens."""

from __future__ import annotations

from heapq import heapify, heappop, heappush
from typing import TYPE_CHECKING

import numpy as np

from dflop._native import balance

if TYPE_CHECKING:
    from collections.abc import Sequence

_MAX_SWAPS = 200
"""Swaps between two parts of equal counts, each better than none; a few suffice."""

_LEAST_GAIN = 1e-5
"""A swap that makes the heaviest load lighter by a smaller share ends the search."""

_EVEN = 1.005
"""Heaviest load over the mean at which a component is even enough."""

_MAX_TRIED = 48
"""Samples of a part that are tried in a swap: of thousands, as of large batches, pairs would take minutes."""

_MAX_OTHERS = 12
"""Parts that are tried in a swap with a heaviest one: those with the least of its component."""


def even_parts(
    encoder: Sequence[int],
    llm: Sequence[int],
    num_parts: int,
    tokens: Sequence[int] | None = None,
    max_tokens: int | None = None,
) -> list[list[int]]:
    """Positions of samples in lists whose encoder work is even, and whose LLM work is even.

    Args:
        encoder: work of each sample in the encoder.
        llm: the same in the LLM, in the same unit.
        num_parts: how many lists, at most as many as samples.
        tokens: of each sample, where there is a cap on them.
        max_tokens: that no list may have more of.

    Returns:
        The lists, ascending, none empty; each position stands in one of them.

    Raises:
        AssertionError: there are fewer samples than lists.
        ScheduleError: no lists were found that keep the cap.
    """
    _check(len(llm), num_parts)
    parts: list[list[int]] = [[] for _ in range(num_parts)]
    found = balance(encoder, llm, num_parts, meets="phase", tokens=tokens, bucket_tokens_max=max_tokens)
    for position, part in enumerate(found.assignment):
        parts[part].append(position)
    for part in parts:
        if not part:
            fullest = max(parts, key=len)
            lightest = min(range(len(fullest)), key=lambda at: encoder[fullest[at]] + llm[fullest[at]])
            part.append(fullest.pop(lightest))
    return sorted(sorted(part) for part in parts)


def equal_parts(encoder: Sequence[int], llm: Sequence[int], num_parts: int) -> list[list[int]]:
    """The same of lists that have equally many samples.

    Args:
        encoder: work of each sample in the encoder.
        llm: the same in the LLM, in the same unit.
        num_parts: how many lists; it divides the number of samples.

    Returns:
        The lists, ascending; each position stands in one of them.

    Raises:
        AssertionError: `num_parts` does not divide the number of samples, or there are none.
    """
    _check(len(llm), num_parts)
    if len(llm) % num_parts:
        message = f"{len(llm)} % {num_parts} != 0"
        raise AssertionError(message)
    work = np.asarray([encoder, llm], dtype=np.float64)
    parts = np.asarray(_difference([int(one) for one in work.sum(axis=0)], num_parts))
    for turn in range(_MAX_SWAPS):
        if not _swap(work, parts, turn):
            break
    return sorted(sorted(part) for part in parts.tolist())


def _check(count: int, num_parts: int) -> None:
    if count < num_parts:
        message = f"number of items:[{count}] < k_partitions:[{num_parts}]"
        raise AssertionError(message)


def _swap(work: np.ndarray, parts: np.ndarray, turn: int) -> bool:
    """Does the best swap of a sample of a heaviest part with one of another; whether there was one.

    What is made small is the heaviest encoder load and the heaviest LLM load, added up.
    """
    loads = work[:, parts].sum(axis=2)
    uneven = loads.max(axis=1) > _EVEN * loads.mean(axis=1)
    before = loads.max(axis=1).sum()
    best: tuple[float, tuple[int, int, int, int]] | None = None
    num_parts, size = parts.shape
    # Of large parts other samples in each turn.
    count = min(size, _MAX_TRIED)
    tried = (np.arange(count) * size // count + turn) % size
    for component in loads[uneven]:
        heavy = int(component.argmax())
        others = np.argsort(component, kind="stable")[:_MAX_OTHERS]
        others = others[others != heavy]
        if not len(others):
            return False
        mine, theirs = work[:, parts[heavy, tried]], work[:, parts[np.ix_(others, tried)]]
        # [component, mine, other part, theirs]: what moves to the heavy part.
        moved = theirs[:, None] - mine[:, :, None, None]
        after = np.maximum(loads[:, heavy, None, None, None] + moved, loads[:, None, others, None] - moved)
        rest = np.asarray(
            [np.delete(loads, [heavy, other], axis=1).max(axis=1, initial=0) for other in others]
        )
        found = np.maximum(after, rest.T[:, None, :, None]).sum(axis=0)
        at = int(found.argmin())
        if best is None or found.flat[at] < best[0]:
            mine_at, other, its_at = np.unravel_index(at, (count, len(others), count))
            best = float(found.flat[at]), (heavy, int(tried[mine_at]), int(others[other]), int(tried[its_at]))
    if best is None or best[0] >= before * (1 - _LEAST_GAIN):
        return False
    heavy, own, other, its = best[1]
    parts[heavy, own], parts[other, its] = parts[other, its], parts[heavy, own]
    return True


def _difference(loads: list[int], num_parts: int) -> list[list[int]]:
    """The largest differencing method on rounds of `num_parts` samples of neighbouring loads.

    Two partial answers are joined heavy to light, those that differ most first, until one is left.
    """
    order = sorted(range(len(loads)), key=loads.__getitem__, reverse=True)
    heap: list[tuple[int, int, list[tuple[int, list[int]]]]] = []
    for start in range(0, len(order), num_parts):
        answer = [(loads[i], [i]) for i in order[start : start + num_parts]]
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
