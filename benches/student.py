"""Student's t for 95 % intervals."""

from __future__ import annotations

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
