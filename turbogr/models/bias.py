"""Relative attention bias: learned tables over positions and over bucketed time differences."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from turbogr.errors import ConfigurationError

BIAS_STD = 0.02


@dataclass(frozen=True)
class TimeBuckets:
    """How a time difference becomes a row of the time-bias table: clamp(floor(ln(max(|d| / unit, 1)) / divisor), 0, count).

    A divisor of 0.301 is the public HSTU code's. With it and seconds, 32 buckets end at 4.2 hours and 128 beyond any log; with
    milliseconds mistaken for seconds, 32 buckets end at 15 seconds. So all three are options.

    Attributes:
        count: largest bucket; the table has count + 1 rows.
        divisor: width of a bucket in natural logarithms.
        unit: ticks of the data set's times in one unit of the formula: 1 for data in seconds, 1000 for data in milliseconds
            that are bucketed in seconds.

    Raises:
        ConfigurationError: if a value is not positive.
    """

    count: int = 128
    divisor: float = 0.301
    unit: float = 1.0

    def __post_init__(self) -> None:
        if self.count < 1 or self.divisor <= 0 or self.unit <= 0:
            raise ConfigurationError(f"TimeBuckets: count, divisor and unit must be positive, got {self}")

    def buckets(self, gaps: Tensor) -> Tensor:
        """int64 buckets of integer time differences, any shape, in float64: what attention computes inside, to be looked at."""
        return (gaps.abs().double() / self.unit).clamp(min=1).log().div(self.divisor).floor().clamp(max=self.count).long()


class RelativeBias(nn.Module):
    """One block's bias tables, shared by its heads: w_pos[j - i] and w_time[bucket(t_{i+1} - t_j)].

    Args:
        max_length: longest history n; the position table has 2n - 1 entries as in the public code (j - i from 1 - n to
            n - 1), of which causal attention reads n.
        time: buckets of time differences, or None for position bias alone.
    """

    def __init__(self, max_length: int, time: TimeBuckets | None) -> None:
        super().__init__()
        self.max_length = max_length
        self.position = nn.Parameter(torch.empty(2 * max_length - 1).normal_(std=BIAS_STD))
        self.time = None if time is None else nn.Parameter(torch.empty(time.count + 1).normal_(std=BIAS_STD))

    def by_distance(self) -> Tensor:
        """float [max_length], the position bias of i - j = 0, 1, 2, ..."""
        return self.position[: self.max_length].flip(0)
