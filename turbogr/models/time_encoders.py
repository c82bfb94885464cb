"""Time channels of FuXi: what weight the time between two events gives them, before their content is looked at."""

from __future__ import annotations

from abc import abstractmethod
from typing import Literal, get_args

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from turbogr.batch import JaggedBatch
from turbogr.errors import ConfigurationError
from turbogr.models.bias import BIAS_STD, TimeBuckets
from turbogr.ops.fuxi_attention import TimeChannel

RowTime = Literal["request", "event"]
"""Which time a token asks at. `request`: when the next event is asked for, which at inference is the query time. `event`: when
its own event happened."""

SECONDS_A_DAY = 86_400.0


class TimeEncoder(nn.Module):
    """Turns the times of a batch into the time channel of each block's attention."""

    @abstractmethod
    def allocate(self, num_blocks: int) -> None:
        """Creates what every block has of its own; the backbone calls it once."""

    @abstractmethod
    def channel(self, block: int, batch: JaggedBatch) -> TimeChannel:
        """The time arguments of `jagged_fuxi_attention` for block number `block`."""


class BucketedTime(TimeEncoder):
    """FuXi-alpha's: w_time[bucket(t_{i+1} - t_j)], a table for each block, N(0, 0.02).

    Args:
        buckets: how a time difference becomes a row of the table.
    """

    def __init__(self, buckets: TimeBuckets = TimeBuckets()) -> None:  # noqa: B008 (frozen)
        super().__init__()
        self.buckets = buckets

    def allocate(self, num_blocks: int) -> None:
        """See TimeEncoder."""
        self.tables = nn.ParameterList(torch.empty(self.buckets.count + 1).normal_(std=BIAS_STD) for _ in range(num_blocks))

    def channel(self, block: int, batch: JaggedBatch) -> TimeChannel:
        """See TimeEncoder."""
        return {
            "time_bias": self.tables[block],
            "query_times": batch.target_times,
            "key_times": batch.timestamps,
            "time_unit": self.buckets.unit,
            "time_divisor": self.buckets.divisor,
        }


class FunctionalTime(TimeEncoder):
    """FuXi-gamma's: alpha * gamma^(d^beta) of the time difference d, three numbers that all blocks share.

    The numbers start at alpha ~ U(-0.1, 0.1), beta ~ U(0.5, 2) and gamma ~ U(0.5, 0.99). They are kept as alpha, softplus^-1 of
    beta and logit of gamma, so that beta stays positive and gamma between 0 and 1 whatever an optimizer does.

    With d in seconds gamma^(d^beta) is 0 for nearly all pairs of a real history, and so is its gradient: d is meant in days.

    Args:
        unit: ticks of the data set's times in one unit of d: 86,400 for data in seconds and d in days, 86,400,000 for data in
            milliseconds.
        initial_decay: where gamma starts, instead of a draw; the paper takes 0.8 for video and 0.9 for music.
        row_time: the paper's d is |t_i - t_j| of both events, `event`. `request` takes the time t_{i+1} at which row i's
            recommendation is asked for, as the bucketed bias does: only so does the query time of a prediction count.

    Raises:
        ConfigurationError: if an option is out of range.
    """

    def __init__(self, unit: float = SECONDS_A_DAY, initial_decay: float | None = None, row_time: RowTime = "request") -> None:
        super().__init__()
        if unit <= 0:
            raise ConfigurationError(f"FunctionalTime: unit must be positive, got {unit}")
        if initial_decay is not None and not 0 < initial_decay < 1:
            raise ConfigurationError(f"FunctionalTime: initial_decay must lie in (0, 1), got {initial_decay}")
        if row_time not in get_args(RowTime):
            raise ConfigurationError(
                f"FunctionalTime: row_time must be one of {', '.join(get_args(RowTime))}, got {row_time!r}"
            )
        self.unit, self.row_time = unit, row_time
        exponent, decay = torch.empty(1).uniform_(0.5, 2.0), torch.empty(1).uniform_(0.5, 0.99)
        if initial_decay is not None:
            decay.fill_(initial_decay)
        self.amplitude = nn.Parameter(torch.empty(1).uniform_(-0.1, 0.1))
        self.raw_decay = nn.Parameter(torch.logit(decay))
        self.raw_exponent = nn.Parameter(exponent.expm1().log())

    def function(self) -> tuple[Tensor, Tensor, Tensor]:
        """alpha, gamma and beta, float [1] each."""
        return self.amplitude, torch.sigmoid(self.raw_decay), F.softplus(self.raw_exponent)

    def allocate(self, num_blocks: int) -> None:
        """Nothing: all blocks share one function."""

    def channel(self, block: int, batch: JaggedBatch) -> TimeChannel:
        """See TimeEncoder."""
        return {
            "time_function": self.function(),
            "query_times": batch.target_times if self.row_time == "request" else batch.timestamps,
            "key_times": batch.timestamps,
            "time_unit": self.unit,
        }
