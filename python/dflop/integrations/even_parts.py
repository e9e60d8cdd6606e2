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
    for _ in range(_MAX_SWAPS):
        if not _swap(work, parts):
            break
    return sorted(sorted(part) for part in parts.tolist())


def _check(count: int, num_parts: int) -> None:
    if count < num_parts:
        message = f"number of items:[{count}] < k_partitions:[{num_parts}]"
        raise AssertionError(message)


def _swap(work: np.ndarray, parts: np.ndarray) -> bool:
    """Does the best swap of a sample of a heaviest part with one of another; whether there was one.

    What is made small is the heaviest encoder load and the heaviest LLM load, added up.
    """
    loads = work[:, parts].sum(axis=2)
    before = loads.max(axis=1).sum()
    best: tuple[float, tuple[int, int, int, int]] | None = None
    num_parts, size = parts.shape
    for heavy in {int(component.argmax()) for component in loads}:
        others = np.delete(np.arange(num_parts), heavy)
        if not len(others):
            return False
        mine, theirs = work[:, parts[heavy]], work[:, parts[others]]
        # [component, mine, other part, theirs]: what moves to the heavy part.
        moved = theirs[:, None] - mine[:, :, None, None]
        after = np.maximum(loads[:, heavy, None, None, None] + moved, loads[:, None, others, None] - moved)
        rest = np.asarray(
            [np.delete(loads, [heavy, other], axis=1).max(axis=1, initial=0) for other in others]
        )
        found = np.maximum(after, rest.T[:, None, :, None]).sum(axis=0)
        at = int(found.argmin())
        if best is None or found.flat[at] < best[0]:
            own, other, its = np.unravel_index(at, (size, len(others), size))
            best = float(found.flat[at]), (heavy, int(own), int(others[other]), int(its))
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
