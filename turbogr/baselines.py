"""Popularity and random: what every trained model must beat, ranked by the same operator and counted by the same metrics."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Protocol, runtime_checkable

import numpy as np
import torch
from rich.console import Console
from rich.progress import track
from torch import Tensor

from turbogr.batch import NO_TARGET, JaggedBatch
from turbogr.errors import DataError
from turbogr.metrics import retrieval_metrics
from turbogr.ops.catalogue import target_ranks

RANDOM_WIDTH = 16
"""Width of the random baseline's vectors; enough that no two items tie."""


class TrainingCounts(Protocol):
    """What the popularity baseline needs of the prepared data."""

    def training_counts(self, protocol: str | None) -> np.ndarray:
        """int64 [V], how often each item occurs in training events under a protocol."""


@runtime_checkable
class EvaluationData(Protocol):
    """What a data module offers to be scored by baselines; `SequenceDataModule` does."""

    @property
    def protocol(self) -> str:
        """Which events are held out."""

    @property
    def num_items(self) -> int:
        """V, size of the catalogue."""

    @property
    def prepared(self) -> TrainingCounts:
        """The prepared data."""

    def test_dataloader(self) -> Iterable[JaggedBatch]:
        """Batches whose last target of each user is the held-out item."""


def evaluate_baselines(
    data: EvaluationData, top_k: Sequence[int] = (10,), seed: int = 0, device: torch.device | str = "cpu"
) -> dict[str, dict[str, float]]:
    """Test metrics of recommending what is popular, and of recommending at random.

    Popularity is a model whose every query is [1] and whose item vectors are the counts of the training events, so the most
    frequent unseen items come first. Random draws an unrelated direction for every user and every item: it scores about
    K / unseen items, whatever the data.

    Args:
        data: where test batches and counts come from.
        top_k: the Ks of HR@K and NDCG@K.
        seed: of the random vectors; equal seeds give equal metrics.
        device: where to rank; a progress bar on standard error shows how far it is.

    Returns:
        {"popularity": {"HR@10": ..., "NDCG@10": ..., "MRR": ...}, "random": {...}}.

    Raises:
        ConfigurationError: an impossible K.
        DataError: a test batch in which a user has no held-out item.
    """
    generator = torch.Generator().manual_seed(seed)
    # Counts above 2^24 are rounded to float32: items that differ by one in 16 million events may tie.
    counts = torch.from_numpy(np.asarray(data.prepared.training_counts(data.protocol))).float()[:, None].to(device)
    vectors = torch.randn(data.num_items, RANDOM_WIDTH, generator=generator).to(device)
    # Whoever calls this ranks all users, be it one rank of several.
    popularity, random = (retrieval_metrics(top_k, across_ranks=False).to(device) for _ in range(2))
    console = Console(stderr=True)
    for loaded in track(data.test_dataloader(), "Baselines", console=console, transient=True, disable=not console.is_terminal):
        targets = _held_out(loaded).to(device)
        # Drawn on the CPU, whose generator gives the same numbers for every device.
        queries = torch.randn(loaded.num_users, RANDOM_WIDTH, generator=generator).to(device)
        batch = loaded.to(device)
        ones = torch.ones(batch.num_users, 1, device=device)
        popularity.update(target_ranks(ones, counts, targets, batch.seen, batch.seen_offsets))
        random.update(target_ranks(queries, vectors, targets, batch.seen, batch.seen_offsets))
    return {
        name: {key: float(value) for key, value in metrics.compute().items()}
        for name, metrics in (("popularity", popularity), ("random", random))
    }


def _held_out(batch: JaggedBatch) -> Tensor:
    targets = batch.targets[batch.last]
    missing = (targets == NO_TARGET).nonzero()
    if len(missing):
        user = int(batch.user_ids[missing[0, 0]])
        raise DataError(f"user row {user} of the test batches has no held-out item: are these prediction batches?")
    return targets
