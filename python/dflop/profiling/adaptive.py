"""Where to measure next: between which sizes a straight line is most likely wrong, and how much that matters.

Between measured sizes a curve is taken as a straight line. How far an inner point lies from the line through
its neighbours shows how wrong the lines on its two sides may be. Where the scatter of the measurements
explains that distance, more points would not help.

This file measures nothing and does not know what is measured.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

# For n normal values, the standard error of the median is 1.25 sigma / sqrt(n), and the quartiles are 1.35
# sigma apart.
_MEDIAN_ERROR = 1.25 / 1.35


@dataclass(frozen=True)
class Sample:
    """One measured size of a curve."""

    time_ns: float
    """Median of the runs."""
    spread_ns: float
    """Third minus first quartile."""
    repeats: int
    """Number of runs."""

    @property
    def noise_ns(self) -> float:
        """Standard error of the median, in nanoseconds."""
        return _MEDIAN_ERROR * self.spread_ns / math.sqrt(max(self.repeats, 1))


@dataclass(frozen=True)
class Gap:
    """Two neighbouring sizes of a curve, and what is expected between them."""

    low: int
    """The smaller size."""
    high: int
    """The larger size."""
    error: float
    """Largest expected distance of the curve from the line between them, relative to the time there."""
    noise: float
    """The part of `error` that the scatter of the measurements explains."""

    @property
    def significant_error(self) -> float:
        """The error beyond what scatter explains, at least 0."""
        return max(self.error - self.noise, 0.0)

    def priority(self, weight: float) -> float:
        """How much a point in this gap would help: the error, times the range of sizes that has it.

        Args:
            weight: share of this curve in the time of a step.

        Returns:
            At least 0; comparable with the priorities of other curves.
        """
        return weight * self.significant_error * math.log(self.high / self.low)


def strays_of(points: Mapping[int, Sample]) -> dict[int, tuple[float, float]]:
    """For each inner point: how far it lies from the line through its neighbours, and the noise of that.

    Args:
        points: by size.

    Returns:
        (distance, noise) by size, both in nanoseconds.
    """
    sizes = sorted(points)
    found: dict[int, tuple[float, float]] = {}
    for before, size, after in zip(sizes, sizes[1:], sizes[2:], strict=False):
        left, here, right = points[before], points[size], points[after]
        share = (size - before) / (after - before)
        expected = left.time_ns + share * (right.time_ns - left.time_ns)
        noise = here.noise_ns + (1.0 - share) * left.noise_ns + share * right.noise_ns
        found[size] = (abs(here.time_ns - expected), noise)
    return found


def gaps_of(points: Mapping[int, Sample]) -> list[Gap]:
    """The gaps between neighbouring sizes with the error to expect in each.

    Suppose that the slope of a curve changes at rate c. Then the point between gaps of widths g and h lies
    c g h / 2 off the line through its neighbours, and the line over gap h is wrong by c h h / 8 at most. That
    is the first distance times h / (4 g). Each end of a gap gives such an estimate; the smaller one counts.
    So where the time jumps within one gap, the gaps beside it are left alone.

    Args:
        points: by size. With fewer than three, nothing is known, and the error of a gap is taken as 1.

    Returns:
        By ascending size.
    """
    sizes = sorted(points)
    strays = strays_of(points)
    gaps = []
    for index, (low, high) in enumerate(zip(sizes, sizes[1:], strict=False)):
        time_ns = max(0.5 * (points[low].time_ns + points[high].time_ns), 1.0)
        seen = []
        if low in strays:
            seen.append((strays[low], low - sizes[index - 1]))
        if high in strays:
            seen.append((strays[high], sizes[index + 2] - high))
        scaled = [
            (stray_ns * (high - low) / (4.0 * other), noise_ns * (high - low) / (4.0 * other))
            for (stray_ns, noise_ns), other in seen
        ]
        error_ns, noise_ns = min(scaled, key=lambda end: end[0] - end[1], default=(time_ns, 0.0))
        gaps.append(Gap(low, high, error_ns / time_ns, noise_ns / time_ns))
    return gaps


def split_of(low: int, high: int, allowed: Callable[[int], int]) -> int | None:
    """The size to measure between two others: their geometric mean, or the nearest that may be measured.

    Args:
        low: the smaller one.
        high: the larger one.
        allowed: the size nearest to a given one that can be measured.

    Returns:
        A size strictly between; None if there is none.
    """
    # First the geometric mean, which halves the ratio; then the arithmetic one, which halves the distance.
    for wanted in (round(math.sqrt(low * high)), (low + high) // 2):
        size = allowed(wanted)
        if low < size < high:
            return size
    return None


def choose(
    gaps: Mapping[str, list[Gap]],
    weights: Mapping[str, float],
    allowed: Callable[[str, int], int],
    *,
    threshold: float,
    limit: int,
) -> list[tuple[str, int]]:
    """The sizes to measure next, the most useful first.

    Args:
        gaps: of each curve, by its name.
        weights: share of the step's time of each curve.
        allowed: for a curve, the size nearest to a given one that can be measured.
        threshold: a gap with a smaller significant error is left alone.
        limit: the most sizes to choose.

    Returns:
        Curve and size of each; none if all curves are good enough, or cannot be split further.
    """
    candidates = []
    for name, of_curve in gaps.items():
        for gap in of_curve:
            if gap.significant_error < threshold:
                continue
            size = split_of(gap.low, gap.high, lambda wanted, name=name: allowed(name, wanted))
            if size is not None:
                candidates.append((-gap.priority(weights.get(name, 0.0)), name, size))
    return [(name, size) for _, name, size in sorted(candidates)[:limit]]


def largest_error(gaps: Mapping[str, list[Gap]]) -> float:
    """The largest significant error of all gaps.

    Args:
        gaps: of each curve.

    Returns:
        Relative to the time; 0 if there are no gaps.
    """
    return max((gap.significant_error for of_curve in gaps.values() for gap in of_curve), default=0.0)
