"""Which links are measured, and the two numbers that describe each: latency and bandwidth.

    time of a message = latency + bytes on the wire / bandwidth

Bytes on the wire are those that cross each rank's link if the ranks form a ring. In a point-to-point message
they are the bytes of the tensor. Over n ranks they are 2 (n - 1) / n of these in an all-reduce, and
(n - 1) / n in an all-gather or a reduce-scatter.
"""

from __future__ import annotations

import statistics
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Sequence

POINT_TO_POINT = "point_to_point"
ALL_REDUCE = "all_reduce"
ALL_GATHER = "all_gather"
REDUCE_SCATTER = "reduce_scatter"
COLLECTIVES = (ALL_REDUCE, ALL_GATHER, REDUCE_SCATTER)
NODE, CLUSTER = "node", "cluster"

_SMALLEST_BYTES = 1 << 10
_SIZE_RATIO = 4
# Huber's rule: residuals larger than this times the usual residual get smaller weights.
_HUBER = 1.345
_HUBER_ROUNDS = 20


@dataclass(frozen=True)
class Link:
    """One kind of communication, which some groups of ranks do at the same time."""

    collective: str
    """As in `Collective` of the model profile."""
    span: str
    """`node` or `cluster`."""
    groups: tuple[tuple[int, ...], ...]
    """Ranks of each group. Groups have no rank in common, and equal sizes."""

    @property
    def num_ranks(self) -> int:
        """Ranks of a group."""
        return len(self.groups[0])


def links_of(num_ranks: int, ranks_per_node: int, *, is_quick: bool = False) -> list[Link]:
    """What can be measured among these ranks, numbered node by node.

    These are:

    - point-to-point messages between two neighbours;
    - collectives within a node, of two ranks and of all its ranks, on every node at once;
    - collectives across nodes: of one rank of each node (all such groups at once, since in training they
      share the node's wire, too), of two nodes, and of all ranks.

    Args:
        num_ranks: ranks in all, at least 2.
        ranks_per_node: ranks on each node; divides `num_ranks`.
        is_quick: only point to point within a node.

    Returns:
        The links; no two alike in collective, span and number of ranks.
    """
    starts = range(0, num_ranks, ranks_per_node)
    num_nodes = len(starts)
    links: list[Link] = []
    if ranks_per_node > 1:
        pairs = tuple((start, start + 1) for start in starts)
        links.append(Link(POINT_TO_POINT, NODE, pairs))
        if is_quick:
            return links
        links += [Link(collective, NODE, pairs) for collective in COLLECTIVES]
        if ranks_per_node > 2:
            whole = tuple(tuple(range(start, start + ranks_per_node)) for start in starts)
            links += [Link(collective, NODE, whole) for collective in COLLECTIVES]
    if num_nodes > 1:
        links.append(Link(POINT_TO_POINT, CLUSTER, ((0, ranks_per_node),)))
        if is_quick:
            return links

        def across(nodes: int) -> tuple[tuple[int, ...], ...]:
            return tuple(tuple(local + start for start in starts[:nodes]) for local in range(ranks_per_node))

        groups = [across(2)]
        if num_nodes > 2:
            groups.append(across(num_nodes))
        if ranks_per_node > 1:
            groups.append((tuple(range(num_ranks)),))
        links += [Link(collective, CLUSTER, group) for group in groups for collective in COLLECTIVES]
    return links


def sizes_of(link: Link, largest_bytes: int, item_bytes: int) -> list[int]:
    """Message sizes to measure, growing by a factor.

    Args:
        link: the link.
        largest_bytes: the last size.
        item_bytes: bytes of an element.

    Returns:
        Bytes of the whole tensor, rounded down so that each rank has whole elements.
    """
    unit = item_bytes * (1 if link.collective == POINT_TO_POINT else link.num_ranks)
    sizes: list[int] = []
    size = _SMALLEST_BYTES
    while size <= largest_bytes:
        cut = max(size // unit, 1) * unit
        if not sizes or cut > sizes[-1]:
            sizes.append(cut)
        size *= _SIZE_RATIO
    return sizes


def wire_ratio(collective: str, num_ranks: int) -> float:
    """Bytes that cross the link of each rank, for each byte of the tensor.

    Args:
        collective: as in `Link`.
        num_ranks: ranks that take part.

    Returns:
        The ratio for a ring.
    """
    if collective == POINT_TO_POINT:
        return 1.0
    ratio = (num_ranks - 1) / num_ranks
    return 2 * ratio if collective == ALL_REDUCE else ratio


def fit(points: Sequence[tuple[float, float]]) -> tuple[float, float]:
    """Latency and slope of a line through measured times.

    The fit minimises squares of relative residuals, so that a microsecond in a short time counts as much as a
    millisecond in a long one. Huber's rule gives outliers less weight, so that one disturbed size does not
    turn the line. Neither number is negative: a best line with negative latency is replaced by the best one
    through the origin, and a falling line by a flat one.

    Args:
        points: (bytes on the wire, time in nanoseconds above 0), at least one.

    Returns:
        (latency in nanoseconds, nanoseconds a byte).

    Raises:
        ValueError: there is no point, or a time is not above 0.
    """
    if not points or any(ns <= 0 for _, ns in points):
        message = f"{len(points)} points, must be one or more with times above 0"
        raise ValueError(message)
    weights = [1.0] * len(points)
    line = (0.0, 0.0)
    for _ in range(_HUBER_ROUNDS):
        line = _least_squares(points, weights)
        residuals = [abs((line[0] + line[1] * x) / ns - 1) for x, ns in points]
        usual = max(statistics.median(residuals) * 1.4826, 1e-9)
        weights = [min(1.0, _HUBER * usual / max(residual, 1e-12)) for residual in residuals]
    return line


def _least_squares(points: Sequence[tuple[float, float]], weights: Sequence[float]) -> tuple[float, float]:
    # Over u = 1 / t and v = x / t: latency * u + slope * v = 1.
    uu = uv = vv = u = v = 0.0
    for (x, ns), weight in zip(points, weights, strict=True):
        a, b = 1 / ns, x / ns
        uu, uv, vv = uu + weight * a * a, uv + weight * a * b, vv + weight * b * b
        u, v = u + weight * a, v + weight * b
    determinant = uu * vv - uv * uv
    if determinant > 1e-12 * uu * vv:
        latency, slope = (u * vv - v * uv) / determinant, (v * uu - u * uv) / determinant
        if latency >= 0 and slope >= 0:
            return latency, slope
        if slope >= 0:
            return 0.0, v / vv
    return (u / uu, 0.0)


def link_profile(link: Link, medians: Sequence[tuple[int, float]]) -> dict[str, Any]:
    """The fields of `LinkProfile`.

    Args:
        link: what was measured.
        medians: (bytes, nanoseconds above 0), by ascending bytes.

    Returns:
        Latency and bandwidth fitted to the points, and the points. A line that does not rise says nothing
        about bandwidth: then it is computed from the largest message, latency included.
    """
    ratio = wire_ratio(link.collective, link.num_ranks)
    latency_ns, slope = fit([(ratio * size, ns) for size, ns in medians])
    if slope <= 0:
        size, ns = medians[-1]
        slope = ns / (ratio * size)
    return {
        "collective": link.collective,
        "span": link.span,
        "num_ranks": link.num_ranks,
        "latency_ns": max(1, round(latency_ns)),
        "bandwidth_bytes_per_s": max(1, round(1e9 / slope)),
        "points": [{"bytes": size, "ns": max(1, round(ns))} for size, ns in medians],
    }
