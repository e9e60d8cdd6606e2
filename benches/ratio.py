"""A ratio of times that were measured in rounds, and how sure it is."""

from __future__ import annotations

import math
import statistics

STUDENT = {
    1: 12.71,
    2: 4.30,
    3: 3.18,
    4: 2.78,
    5: 2.57,
    6: 2.45,
    7: 2.36,
    8: 2.31,
    9: 2.26,
    10: 2.23,
    12: 2.18,
}
"""97.5 % quantile by degrees of freedom; above the last the normal distribution's."""


def ratio_of(theirs: list[float], ours: list[float]) -> tuple[float, float, float]:
    """Ratio of the geometric means and its 95 % interval, over paired rounds."""
    logs = [math.log(a / b) for a, b in zip(theirs, ours, strict=True)]
    mean = statistics.fmean(logs)
    freedom = len(logs) - 1
    student = next((t for n, t in STUDENT.items() if n >= freedom), 1.96)
    half = student * statistics.stdev(logs) / math.sqrt(len(logs))
    return math.exp(mean), math.exp(mean - half), math.exp(mean + half)
