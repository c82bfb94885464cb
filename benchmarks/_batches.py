"""Training batches for benchmarks: of a prepared folder, or synthetic ones with the lengths of MovieLens."""

from __future__ import annotations

import itertools
import statistics
import time
from dataclasses import dataclass
from pathlib import Path

import torch

from turbogr.batch import JaggedBatch
from turbogr.data.datamodule import SequenceDataModule

NEGATIVES = 128


@dataclass(frozen=True)
class Lengths:
    """A log-normal of history lengths (mean and deviation of the logarithm, least) and the catalogue's size."""

    mean: float
    deviation: float
    least: int
    num_items: int


def real_batches(folder: Path, users: int, max_length: int, count: int) -> tuple[list[JaggedBatch], int]:
    """The first `count` training batches of a prepared folder in a shuffled order, and the size of its catalogue.

    Raises:
        SystemExit: if an epoch has no whole batch.
    """
    data = SequenceDataModule(folder, users, max_length, NEGATIVES, num_workers=0, seed=0, drop_last=True)
    batches: list[JaggedBatch] = []
    while len(batches) < count:
        before = len(batches)
        batches += data.train_dataloader()
        if len(batches) == before:
            raise SystemExit(f"{folder}: has no {users} users to train on")
    return batches[:count], data.num_items


def synthetic_batches(lengths: Lengths, users: int, max_length: int, count: int) -> tuple[list[JaggedBatch], int]:
    """Histories with those lengths, popular items more often, and log-normal gaps in seconds; and the catalogue's size."""
    return [_synthetic(lengths, users, max_length, seed) for seed in range(count)], lengths.num_items


def _synthetic(lengths: Lengths, users: int, max_length: int, seed: int) -> JaggedBatch:
    g = torch.Generator().manual_seed(seed)
    draw = torch.empty(users).log_normal_(lengths.mean, lengths.deviation, generator=g)
    offsets = torch.cat([torch.zeros(1, dtype=torch.int64), draw.long().clamp(lengths.least, max_length).cumsum(0)])
    tokens = int(offsets[-1])
    items = (torch.rand(tokens + users, generator=g) ** 2 * lengths.num_items).long()
    gaps = torch.empty(tokens + users).log_normal_(3.0, 3.0, generator=g).long()
    keep = torch.ones(tokens + users, dtype=torch.bool)
    keep[offsets[1:] + torch.arange(users)] = False  # a user's last event is a target only
    times = 10**9 + gaps.cumsum(0)
    return JaggedBatch(
        values=items[keep],
        offsets=offsets,
        timestamps=times[keep],
        targets=items[1:][keep[:-1]],
        target_times=times[1:][keep[:-1]],
        user_ids=torch.arange(users),
        max_length=max_length,
        negatives=torch.randint(0, lengths.num_items, (tokens, NEGATIVES), generator=g),
    )


def first_users(batch: JaggedBatch, users: int) -> JaggedBatch:
    """A batch of its first users."""
    tokens = int(batch.offsets[users])
    assert batch.negatives is not None
    return JaggedBatch(
        values=batch.values[:tokens],
        offsets=batch.offsets[: users + 1],
        timestamps=batch.timestamps[:tokens],
        targets=batch.targets[:tokens],
        target_times=batch.target_times[:tokens],
        user_ids=batch.user_ids[:users],
        max_length=batch.max_length,
        negatives=batch.negatives[:tokens],
    )


def building_time(folder: Path, users: int, max_length: int) -> float:
    """Seconds in which the loader builds a batch in this process: the median of an epoch's batches."""
    loader = SequenceDataModule(folder, users, max_length, NEGATIVES, num_workers=0, seed=0, drop_last=True).train_dataloader()
    stamps = [time.perf_counter()]
    for _ in loader:
        stamps.append(time.perf_counter())
    return statistics.median(b - a for a, b in itertools.pairwise(stamps))
