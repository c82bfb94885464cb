"""What seeds alone explain."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence

STUDENT = {2: 4.303, 4: 2.776, 6: 2.447, 8: 2.306}
"""Degrees of freedom -> 97.5 % quantile of Student's t: how many standard errors seeds alone explain."""


def standard_error(groups: Sequence[Sequence[float]]) -> float:
    """Standard error of the difference between two groups' means, from the spread of seeds pooled over all groups.

    Args:
        groups: of each group a value for every seed, equally many.

    Returns:
        nan where there is one seed only.
    """
    freedom = sum(len(group) - 1 for group in groups)
    if freedom < 1:
        return math.nan
    squares = sum(sum((x - statistics.fmean(group)) ** 2 for x in group) for group in groups)
    return math.sqrt(squares / freedom * 2 / len(groups[0]))
