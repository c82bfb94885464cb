"""HR@K, NDCG@K and MRR of one relevant item a user, from the ranks that `turbogr.ops.catalogue.target_ranks` gives.

No score and no list of ranks is kept. HitRate and NDCG count how often each rank below the largest K occurred, which gives
every K at once; MRR sums its terms in fixed point. All are whole numbers, whose sums do not depend on the order of batches or
on how users are shared out: several processes give the very numbers of one.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence

import torch
from torch import Tensor
from torchmetrics import Metric, MetricCollection

from turbogr.errors import ConfigurationError


class _RankHistogram(Metric):
    """Counts of ranks 0..max(top_k)-1, and of all worse ones together in the last place."""

    higher_is_better = True
    full_state_update = False
    name: str
    histogram: Tensor

    def __init__(self, top_k: Sequence[int] = (10,), across_ranks: bool = True) -> None:
        super().__init__(sync_on_compute=across_ranks)
        self.top_k = _checked_top_k(top_k)
        self.add_state("histogram", torch.zeros(self.top_k[-1] + 1, dtype=torch.int64), dist_reduce_fx="sum")

    def update(self, ranks: Tensor) -> None:
        """Adds users.

        Args:
            ranks: int64 [B], rank of each user's target, 0 is best.
        """
        _check_ranks(ranks)
        # Not in place: a state reset in inference mode (trainer.validate) may not be written to outside it (trainer.fit).
        self.histogram = self.histogram.scatter_add(0, ranks.clamp(max=self.top_k[-1]), torch.ones_like(ranks))

    def compute(self) -> dict[str, Tensor]:
        """The means over all users so far.

        Returns:
            One float32 scalar per K in ascending order, named like "HR@10". Without any user all are 0, and torchmetrics
            warns that `compute` came before `update`.
        """
        gains = (self.histogram[:-1] * self._gains()).cumsum(0) / self.histogram.sum().clamp(min=1)
        return {f"{self.name}@{k}": gains[k - 1].float() for k in self.top_k}

    @abstractmethod
    def _gains(self) -> Tensor:
        """Float64 [K]: what a target at rank 0..K-1 is worth."""


class HitRate(_RankHistogram):
    """HR@K: the share of users whose target is among the first K items.

    Args:
        top_k: the Ks, positive and distinct.
        across_ranks: as in `retrieval_metrics`.

    Raises:
        ConfigurationError: a K that is not a positive integer, occurs twice, or no K at all.
    """

    name = "HR"

    def _gains(self) -> Tensor:
        return torch.ones(self.top_k[-1], dtype=torch.float64, device=self.histogram.device)


class NDCG(_RankHistogram):
    """NDCG@K with one relevant item a user: the mean of 1 / log2(rank + 2) where rank < K, else 0.

    Args:
        top_k: the Ks, positive and distinct.
        across_ranks: as in `retrieval_metrics`.

    Raises:
        ConfigurationError: a K that is not a positive integer, occurs twice, or no K at all.
    """

    name = "NDCG"

    def _gains(self) -> Tensor:
        return 1 / torch.arange(2, self.top_k[-1] + 2, dtype=torch.float64, device=self.histogram.device).log2()


_WORD = 26
"""Bits of each of the two words of MRR's sums; 2^37 users fit."""


class MRR(Metric):
    """Mean reciprocal rank over the whole catalogue: the mean of 1 / (rank + 1), each rounded to a multiple of 2^-52.

    Args:
        across_ranks: as in `retrieval_metrics`.
    """

    higher_is_better = True
    full_state_update = False
    words: Tensor  # int64 [2], upper and lower halves of the sum of 2^52 / (rank + 1)
    users: Tensor

    def __init__(self, across_ranks: bool = True) -> None:
        super().__init__(sync_on_compute=across_ranks)
        self.add_state("words", torch.zeros(2, dtype=torch.int64), dist_reduce_fx="sum")
        self.add_state("users", torch.zeros((), dtype=torch.int64), dist_reduce_fx="sum")

    def update(self, ranks: Tensor) -> None:
        """Adds users.

        Args:
            ranks: int64 [B], rank of each user's target, 0 is best.
        """
        _check_ranks(ranks)
        terms = (2.0 ** (2 * _WORD) / (ranks.double() + 1)).round().long()
        self.words = self.words + torch.stack([(terms >> _WORD).sum(), (terms & (2**_WORD - 1)).sum()])
        self.users = self.users + ranks.numel()

    def compute(self) -> dict[str, Tensor]:
        """The mean over all users so far.

        Returns:
            {"MRR": float32 scalar}; 0 without any user, with torchmetrics' warning.
        """
        upper, lower = self.words.double()
        return {"MRR": ((upper + lower / 2**_WORD) / 2**_WORD / self.users.clamp(min=1)).float()}


def retrieval_metrics(top_k: Sequence[int] = (10,), prefix: str | None = None, across_ranks: bool = True) -> MetricCollection:
    """HitRate, NDCG and MRR in one collection.

    Call it (or its `update`) with the ranks of each batch. At the end of an epoch
    `self.log_dict(metrics.compute()); metrics.reset()` logs every value under its own name. The collection itself cannot
    be handed to `log_dict`, as Lightning logs one value a metric and these have one a K.

    Args:
        top_k: the Ks of HR@K and NDCG@K, positive and distinct; 2000 costs no more than 10.
        prefix: put before every name, for example "val/".
        across_ranks: `compute` gathers the users of all ranks, so all ranks must call it; False where one rank computes alone.

    Returns:
        A collection whose `compute` gives {"val/HR@10": ..., "val/NDCG@10": ..., "val/MRR": ...}.

    Raises:
        ConfigurationError: a K that is not a positive integer, occurs twice, or no K at all.
    """
    return MetricCollection([HitRate(top_k, across_ranks), NDCG(top_k, across_ranks), MRR(across_ranks)], prefix=prefix)


def _checked_top_k(top_k: Sequence[int]) -> tuple[int, ...]:
    values = tuple(top_k)
    if not values:
        raise ConfigurationError("top_k is empty: name at least one K, for example [10]")
    for k in values:
        if isinstance(k, bool) or not isinstance(k, int) or k < 1:
            raise ConfigurationError(f"top_k contains {k!r}: every K must be an integer of at least 1")
    if len(set(values)) != len(values):
        raise ConfigurationError(f"top_k is {list(values)}: every K may occur once")
    return tuple(sorted(values))


def _check_ranks(ranks: Tensor) -> None:
    if ranks.dtype != torch.int64 or ranks.dim() != 1:
        raise ValueError(f"ranks are {ranks.dtype} {list(ranks.shape)}, expected torch.int64 [B]")
