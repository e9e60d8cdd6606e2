"""Measures links: all ranks run this file's code at the same time, message by message.

links x sizes --calibrate--> messages a turn --rounds, in the same order on all--> medians --max--> links
"""

from __future__ import annotations

import random
import statistics
import time
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from dflop.profiling.links import (
    ALL_GATHER,
    ALL_REDUCE,
    POINT_TO_POINT,
    Link,
    link_profile,
    links_of,
    sizes_of,
)

if TYPE_CHECKING:
    from collections.abc import Callable

_LARGEST_BYTES = {"cpu": 16 << 20, "cuda": 64 << 20}
_QUICK_LARGEST_BYTES = 4 << 20
_TURN_NS = 4e6
_MAX_MESSAGES = 50
_MIN_ROUNDS, _MAX_ROUNDS = 3, 50


class Exchange:
    """This rank's part in measuring; the default process group must exist."""

    def __init__(self, device: torch.device, ranks_per_node: int, *, is_quick: bool) -> None:
        """Makes the groups and buffers; all ranks at the same time.

        Args:
            device: of this rank.
            ranks_per_node: ranks on each node.
            is_quick: see `links_of`.
        """
        self._device = device
        self._rank = dist.get_rank()
        # The dtype that training sends on this device.
        dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
        largest = _QUICK_LARGEST_BYTES if is_quick else _LARGEST_BYTES[device.type]
        self._source = torch.zeros(largest // dtype.itemsize, dtype=dtype, device=device)
        self._target = torch.zeros_like(self._source)
        links = links_of(dist.get_world_size(), ranks_per_node, is_quick=is_quick)
        self._cases = [(link, size) for link in links for size in sizes_of(link, largest, dtype.itemsize)]
        self._handles = self._make_groups(links)

    def _make_groups(self, links: list[Link]) -> dict[tuple[int, ...], Any]:
        wanted = dict.fromkeys(group for link in links for group in link.groups)
        # Every rank must make all groups in the same order, also those that it is not in.
        made = {group: dist.new_group(list(group)) for group in wanted}
        return {group: handle for group, handle in made.items() if self._rank in group}

    def measure(self, budget_s: float) -> list[dict[str, Any]]:
        """Runs all cases in turns until the budget is spent; all ranks must call it at the same time.

        Args:
            budget_s: time to spend, in seconds; exceeded where `_MIN_ROUNDS` take longer.

        Returns:
            `LinkProfile`s, the same on every rank: of the ranks' medians over their messages, the largest.
        """
        start = time.monotonic()
        acts = {case: act for case in self._cases if (act := self._act(*case)) is not None}
        counts = {case: self._calibrate(acts.get(case)) for case in self._cases}
        times: dict[tuple[Link, int], list[float]] = {case: [] for case in acts}
        order = random.Random(0)
        for round_ in range(_MAX_ROUNDS):
            is_spent = self._agree(time.monotonic() - start) > budget_s
            if is_spent and round_ >= _MIN_ROUNDS:
                break
            for case in order.sample(self._cases, len(self._cases)):
                self._agree(0.0)
                if case in acts:
                    halves = 2 if case[0].collective == POINT_TO_POINT else 1
                    times[case] += [ns / halves for ns in self._turn(acts[case], counts[case])]
        slowest = self._slowest([statistics.median(times[c]) if c in times else 0.0 for c in self._cases])
        medians: dict[Link, list[tuple[int, float]]] = {}
        for (link, size), ns in zip(self._cases, slowest, strict=True):
            medians.setdefault(link, []).append((size, max(ns, 1.0)))
        return [link_profile(link, points) for link, points in medians.items()]

    def _act(self, link: Link, size: int) -> Callable[[], object] | None:
        """This rank's part in one message of this size; None for a rank that has no part in it."""
        ranks = next((group for group in link.groups if self._rank in group), None)
        if ranks is None:
            return None
        group = self._handles[ranks]
        count = size // self._source.element_size()
        source, target = self._source[:count], self._target[:count]
        if link.collective == POINT_TO_POINT:
            return lambda: self._ping_pong(source, ranks, group)
        if link.collective == ALL_REDUCE:
            return lambda: dist.all_reduce(source, group=group)
        part = count // len(ranks)
        if link.collective == ALL_GATHER:
            return lambda: dist.all_gather_into_tensor(target, source[:part], group=group)
        return lambda: dist.reduce_scatter_tensor(target[:part], source, group=group)

    def _ping_pong(self, message: torch.Tensor, ranks: tuple[int, ...], group: Any) -> None:
        first, second = ranks
        if self._rank == first:
            dist.send(message, second, group=group)
            dist.recv(message, second, group=group)
        else:
            dist.recv(message, first, group=group)
            dist.send(message, first, group=group)

    def _calibrate(self, act: Callable[[], object] | None) -> int:
        """How many messages a turn has, the same on all ranks. Trying this also sets up the connections."""
        self._agree(0.0)
        slowest_ns = 0.0
        if act is not None:
            for _ in range(2):
                slowest_ns = max(self._turn(act, 1))
        slowest_ns = self._agree(slowest_ns)
        return int(min(max(_TURN_NS / max(slowest_ns, 1.0), 2), _MAX_MESSAGES))

    def _turn(self, act: Callable[[], object], count: int) -> list[float]:
        """Times of `count` messages, in nanoseconds, after one that makes the ranks begin together.

        On a GPU all messages are timed together, as their mean: alone, a message is mostly its launch.
        """
        act()
        if self._device.type == "cuda":
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            begin.record()
            for _ in range(count):
                act()
            end.record()
            end.synchronize()
            return [begin.elapsed_time(end) * 1e6 / count]
        times: list[float] = []
        for _ in range(count):
            start = time.perf_counter_ns()
            act()
            times.append(float(time.perf_counter_ns() - start))
        return times

    def _agree(self, value: float) -> float:
        """The largest value of all ranks. It is a barrier, too."""
        return self._slowest([value])[0]

    def _slowest(self, values: list[float]) -> list[float]:
        tensor = torch.tensor(values, dtype=torch.float64, device=self._device)
        dist.all_reduce(tensor, op=dist.ReduceOp.MAX)
        return tensor.tolist()
