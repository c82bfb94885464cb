"""Buckets of time differences: clamp(floor(ln(max(|d| / unit, 1)) / divisor), 0, count - 1), exactly as float64 computes it.

A fast logarithm is not exact at a bucket's edge, where implementations would then disagree. So the edges are integers, bisected
out of the float64 formula once; a rough logarithm finds the bucket or its neighbour, and two comparisons settle which.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor


@lru_cache(maxsize=64)
def bucket_thresholds(count: int, unit: float, divisor: float) -> Tensor:
    """The smallest integer time difference of each bucket from 1 on.

    Found by bisection of the formula itself, so that counting the thresholds that a difference reaches gives the formula's
    bucket for every difference.

    Args:
        count: buckets, that is rows of the time-bias table.
        unit: ticks per unit of the formula.
        divisor: width of a bucket in natural logarithms.

    Returns:
        int64 [count - 1], rising; the largest int64 stands for a bucket that no difference reaches.
    """
    wanted = torch.arange(1, count, dtype=torch.int64)
    below, reached = torch.zeros_like(wanted), torch.full_like(wanted, torch.iinfo(torch.int64).max)
    while bool((reached - below > 1).any()):
        middle = below + (reached - below) // 2
        bucket = ((middle.double() / unit).clamp(min=1).log() / divisor).floor()
        reaches = bucket >= wanted
        reached, below = torch.where(reaches, middle, reached), torch.where(reaches, below, middle)
    return reached


@dataclass(frozen=True)
class TimeBucketing:
    """Finds buckets in PyTorch.

    Attributes:
        first: smallest difference of each bucket, [count], int32 or int64 like the differences.
        last: largest difference of each bucket, [count].
        unit: ticks per unit of the formula.
        divisor: width of a bucket in natural logarithms.
    """

    first: Tensor
    last: Tensor
    unit: float
    divisor: float

    @classmethod
    def of(cls, count: int, unit: float, divisor: float, like: Tensor) -> TimeBucketing:
        """For integer times with the dtype and device of `like`, whose differences are below the dtype's maximum."""
        thresholds = bucket_thresholds(count, unit, divisor)
        limit = torch.iinfo(like.dtype).max
        first = torch.cat([thresholds.new_zeros(1), thresholds]).clamp(max=limit)
        last = torch.cat([thresholds - 1, thresholds.new_tensor([limit])]).clamp(max=limit)
        return cls(first.to(like), last.to(like), unit, divisor)

    def __call__(self, gaps: Tensor) -> Tensor:
        """int32 buckets of integer differences, any shape."""
        gaps = gaps.abs()
        rough = gaps.float().mul_(1 / self.unit).clamp_(min=1.0).log_().mul_(1 / self.divisor)
        buckets = rough.clamp_(max=len(self.first) - 1).int()
        flat = buckets.view(-1)
        flat += (gaps.view(-1) > self.last.index_select(0, flat)).int()
        flat -= (gaps.view(-1) < self.first.index_select(0, flat)).int()
        return buckets
