"""Buckets of time differences: clamp(floor(ln(max(|d| / unit, 1)) / divisor), 0, count - 1), exactly as float64 computes it.

A fast logarithm is not exact at a bucket's edge, where implementations would then disagree. So the edges are integers, bisected
out of the float64 formula once, and a bucket is found by comparisons alone: exponent and leading bits of the difference as a
float32 name a cell; nearly always a cell lies in one bucket or holds one edge.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor

_DROPPED_BITS = 15
"""Of a float32, whose remaining bits name its cell: 256 cells an octave, so that integers up to 512 have cells of their own."""


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
    return _smallest(wanted, lambda gaps: ((gaps.double() / unit).clamp(min=1).log() / divisor).floor())


def _smallest(wanted: Tensor, rising: Callable[[Tensor], Tensor]) -> Tensor:
    """The smallest positive int64 for which a rising function reaches each wanted value; the largest int64 where none does."""
    below, reached = torch.zeros_like(wanted), torch.full_like(wanted, torch.iinfo(torch.int64).max)
    while bool((reached - below > 1).any()):
        middle = below + (reached - below) // 2
        reaches = rising(middle) >= wanted
        reached, below = torch.where(reaches, middle, reached), torch.where(reaches, below, middle)
    return reached


def _cell(gaps: Tensor) -> Tensor:
    """int32 cell of each integer difference >= 0."""
    return gaps.float().view(torch.int32) >> _DROPPED_BITS


@lru_cache(maxsize=1)
def _cell_starts() -> Tensor:
    """Smallest difference of each cell, int64; the last cell is that of the largest int64."""
    last = int(_cell(torch.tensor(torch.iinfo(torch.int64).max)))
    starts = _smallest(torch.arange(last + 1), _cell)
    starts[0] = 0
    return starts


@dataclass(frozen=True)
class TimeBucketing:
    """Finds buckets in PyTorch.

    Attributes:
        thresholds: `bucket_thresholds`, int32 or int64 like the differences.
        lowest: int32, bucket of each cell's smallest difference; None where a cell may hold several edges (narrow buckets).
        edge: from which difference on a cell is in the next bucket, likewise.
    """

    thresholds: Tensor
    lowest: Tensor | None
    edge: Tensor | None

    @classmethod
    def of(cls, count: int, unit: float, divisor: float, like: Tensor) -> TimeBucketing:
        """For integer times with the dtype and device of `like`, whose differences are below the dtype's maximum."""
        return _bucketing(count, unit, divisor, like.dtype, like.device)

    def __call__(self, gaps: Tensor) -> Tensor:
        """int32 buckets of integer differences, any shape."""
        gaps = gaps.abs()
        if self.lowest is None or self.edge is None:
            return torch.bucketize(gaps, self.thresholds, right=True, out_int32=True)
        cells = _cell(gaps).view(-1)
        buckets = self.lowest.index_select(0, cells)
        buckets += gaps.view(-1) >= self.edge.index_select(0, cells)
        return buckets.view(gaps.shape)


@lru_cache(maxsize=64)
def _bucketing(count: int, unit: float, divisor: float, dtype: torch.dtype, device: torch.device) -> TimeBucketing:
    thresholds, starts = bucket_thresholds(count, unit, divisor), _cell_starts()
    largest = torch.iinfo(dtype).max
    lowest, highest = (
        torch.bucketize(gaps, thresholds, right=True, out_int32=True)
        for gaps in (starts, torch.cat([starts[1:] - 1, starts.new_tensor([torch.iinfo(torch.int64).max])]))
    )
    here = thresholds.clamp(max=largest).to(device, dtype)
    if bool((highest - lowest > 1).any()):
        return TimeBucketing(here, None, None)
    inside = torch.cat([thresholds, thresholds.new_tensor([largest])]).index_select(0, lowest)
    edge = torch.where(highest > lowest, inside, largest).clamp(max=largest)
    return TimeBucketing(here, lowest.to(device), edge.to(device, dtype))
