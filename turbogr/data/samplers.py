"""The order of training: an endless, numbered sequence of batches, and a loader that can start at any number.

Resuming exactly is then one fact: the number of batches already trained. Batch n is the same whoever asks for it, so it does
not matter how a run was stopped, how many batches the workers had prepared beyond it, or how the trainer counts its epochs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset

from turbogr.batch import JaggedBatch
from turbogr.data.negatives import ORDER, Int64Array, check_seed, stream_keys
from turbogr.errors import ConfigurationError


class BatchKey(NamedTuple):
    """All that a worker needs to build a batch, so that it need not know where training stands.

    Attributes:
        epoch: of the data, from 0; keys the negatives.
        samples: int64 [B], user rows.
    """

    epoch: int
    samples: Int64Array


class EpochBatches:
    """The batches of every epoch, in an order that depends on (seed, epoch) alone.

    Plain Python: iterating gives one epoch's keys, `set_epoch` chooses which; `stream` gives all from a number on.

    Args:
        samples: int64 [N], user rows to train on, each once an epoch.
        batch_size: users per batch, 1 or more.
        seed: 0..2^64 - 1.
        shuffle: False keeps the given order in every epoch.
        drop_last: drop the last batch of an epoch where it is smaller than the others.

    Raises:
        ConfigurationError: an option is out of range, or an epoch would have no batch.
    """

    def __init__(self, samples: Int64Array, batch_size: int, seed: int, shuffle: bool = True, drop_last: bool = False) -> None:
        if batch_size < 1:
            raise ConfigurationError(f"batch_size is {batch_size}; it must be 1 or more")
        count = len(samples) // batch_size if drop_last else -(-len(samples) // batch_size)
        if not count:
            raise ConfigurationError(
                f"an epoch of {len(samples)} training users has no batch (batch_size {batch_size}, drop_last {drop_last})"
            )
        self.samples = samples
        self.batch_size = batch_size
        self.seed = check_seed(seed)
        self.shuffle = shuffle
        self.epoch = 0
        self._count = count

    def __len__(self) -> int:
        """Batches in an epoch; the same for all epochs."""
        return self._count

    def __iter__(self) -> Iterator[BatchKey]:
        """The batches of the current epoch."""
        return self._epoch(self.epoch, 0)

    def set_epoch(self, epoch: int) -> None:
        """Choose the epoch that the next iteration gives."""
        self.epoch = epoch

    def stream(self, number: int) -> Iterator[BatchKey]:
        """Batches `number`, `number` + 1, … without end; batch n is batch n mod len(self) of epoch n // len(self)."""
        epoch, first = divmod(number, len(self))
        while True:
            yield from self._epoch(epoch, first)
            epoch, first = epoch + 1, 0

    def _epoch(self, epoch: int, first: int) -> Iterator[BatchKey]:
        samples = self.samples
        if self.shuffle:
            # Sorting by a hash rather than shuffling by a generator: the order survives upgrades of NumPy.
            samples = samples[np.argsort(stream_keys(self.seed, epoch, samples, ORDER), kind="stable")]
        for start in range(first * self.batch_size, len(self) * self.batch_size, self.batch_size):
            yield BatchKey(epoch, samples[start : start + self.batch_size])


class TrainingLoader:
    """Loads the numbered batches with any number of worker processes; each iteration gives one epoch.

    The position is read when an iteration hands out its first batch, not when it is created: Lightning creates the iterator
    before it has settled where a resumed run stands. Within Lightning the position is the trainer's own count (`trained`);
    elsewhere it is the count of batches handed out, saved and restored by `state_dict` and `load_state_dict`.

    Worker processes live from epoch to epoch and prepare batches across epoch boundaries and validation; they are started anew
    only where the position jumps. No random state is consumed.

    This is not a `torch.utils.data.DataLoader`, which Lightning would take apart to inject a sampler of its own.

    Args:
        dataset: maps a `BatchKey` to a `JaggedBatch`.
        batches: the order.
        trained: called as an iteration hands out its first batch, gives the number of batches trained so far, in all epochs;
            None counts those handed out.
        **options: of the inner `torch.utils.data.DataLoader` (`num_workers`, `pin_memory`, …).
    """

    def __init__(
        self,
        dataset: Dataset[JaggedBatch],
        batches: EpochBatches,
        trained: Callable[[], int] | None = None,
        **options: Any,
    ) -> None:
        self.dataset = dataset
        self.batches = batches
        self._trained = trained
        self._options = options
        self._position = 0
        # Named as in DataLoader: Lightning shuts the workers down through this attribute when training ends.
        self._iterator: Iterator[JaggedBatch] | None = None
        self._next = 0

    def __len__(self) -> int:
        """Batches in an epoch, also where an iteration will give only the rest of one."""
        return len(self.batches)

    def __iter__(self) -> Iterator[JaggedBatch]:
        """One epoch's batches from the position on.

        Within Lightning, which ends its epochs by counting, that is as many batches as an epoch has; elsewhere the iteration
        ends with the epoch.
        """
        if self._trained is not None:
            number = self._trained()
            end = number + len(self)
        else:
            number = self._position
            end = number + len(self) - number % len(self)
        while number < end:
            batch = self._load(number)
            number += 1
            self._position = number
            yield batch

    def set_epoch(self, epoch: int) -> None:
        """Go to the start of an epoch (outside Lightning)."""
        self._position = epoch * len(self)

    def state_dict(self) -> dict[str, int]:
        """The position: {"batches": number of batches handed out, in all epochs}."""
        return {"batches": self._position}

    def load_state_dict(self, state: dict[str, int]) -> None:
        """Continue from a saved position (within Lightning the trainer's count, restored with it, takes precedence)."""
        self._position = state["batches"]

    def _load(self, number: int) -> JaggedBatch:
        if self._iterator is None or self._next != number:
            self._iterator = iter(
                DataLoader(
                    self.dataset,
                    sampler=self.batches.stream(number),
                    batch_size=None,
                    collate_fn=_unchanged,
                    # Of its own, so that creating the iterator takes nothing from the global stream.
                    generator=torch.Generator(),
                    **self._options,
                )
            )
            self._next = number
        batch = next(self._iterator)
        self._next += 1
        return batch


def _unchanged(batch: Any) -> Any:
    return batch
