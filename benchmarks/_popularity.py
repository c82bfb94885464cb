"""Ids as KuaiRand-27K has them: drawn by the published exposures of every video (`turbogr.data.kuairand_statistics`)."""

from __future__ import annotations

import math

import numpy as np
import torch
from torch import Tensor

from turbogr.data.kuairand_statistics import VIDEOS_WITH_AT_LEAST

_STRIDE = 2_654_435_761  # Knuth's multiplicative hash: a prime, so that multiples of it visit every row once


class Popularity:
    """The videos that were exposed at least so often, as rows in an order that has nothing to do with popularity.

    Popularity by rank falls with slopes 0.25 (rank 10 to 1k), 0.48 (to 100k) and 1.0 (to 10M); 54 % of all videos were exposed
    once.

    Args:
        exposures: that a video must have.
        multiple: the catalogue is cut to a multiple of this many rows, so that it divides evenly over ranks.

    Attributes:
        rows: V.
    """

    def __init__(self, exposures: int, multiple: int = 1) -> None:
        at_least, ranks = np.array(VIDEOS_WITH_AT_LEAST, dtype=np.float64).T
        counts = np.arange(at_least[-1], exposures - 1, -1)
        bounds = np.exp(np.interp(np.log(counts), np.log(at_least), np.log(ranks)))  # videos with at least that many
        classes = np.diff(bounds, prepend=0.0)
        self.rows = round(bounds[-1]) // multiple * multiple
        self._mass = torch.from_numpy(np.cumsum(classes * counts))
        self._first, self._size = torch.from_numpy(bounds - classes), torch.from_numpy(classes)
        assert math.gcd(_STRIDE, self.rows) == 1

    def draw(self, count: int, generator: torch.Generator) -> Tensor:
        """int64 [count]: every exposure equally likely."""
        where = torch.rand(count, generator=generator, dtype=torch.float64) * self._mass[-1]
        level = torch.searchsorted(self._mass, where).clamp_(max=len(self._mass) - 1)
        within = torch.rand(count, generator=generator, dtype=torch.float64)
        rank = (self._first[level] + within * self._size[level]).long().clamp_(max=self.rows - 1)
        return rank * _STRIDE % self.rows
