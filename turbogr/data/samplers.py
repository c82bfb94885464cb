"""The order of training: an endless, numbered sequence of batches, and a loader that can start at any number.

Resuming exactly is then one fact: the number of batches already trained. Batch n is the same whoever asks for it, so it does
not matter how a run was stopped, how many batches the workers had prepared beyond it, or how the trainer counts its epochs.

Nor on how many ranks: batch n of W ranks is the batch n of one process with W times the batch size, and each rank takes its
share of it. All ranks have equally many batches; of a batch with few users a rank may have none at all.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset

from turbogr.batch import JaggedBatch
from turbogr.data.balance import cut_by_tokens
from turbogr.data.negatives import ORDER, Int64Array, check_seed, stream_keys
from turbogr.data.sharing import Sharing, TokensPerBatch, check_tokens_per_batch
from turbogr.data.stochastic_length import StochasticLength
from turbogr.errors import ConfigurationError


def share(count: int, rank: int, ranks: int) -> slice:
    """Which of `count` things fall to a rank: consecutive ones, one more for the first ranks where they come out uneven."""
    each, more = divmod(count, ranks)
    start = rank * each + min(rank, more)
    return slice(start, start + each + (rank < more))


class BatchKey(NamedTuple):
    """All that a worker needs to build a batch, so that it need not know where training stands.

    Attributes:
        epoch: of the data, from 0; keys the negatives.
        samples: int64 [B], user rows.
        kept: int64 [B], how many tokens of each history are trained on, where stochastic length thins them; None is all.
    """

    epoch: int
    samples: Int64Array
    kept: Int64Array | None = None


class EpochBatches:
    """The batches of every epoch, in an order that depends on (seed, epoch) alone.

    Plain Python: iterating gives one epoch's keys, `set_epoch` chooses which; `stream` gives all from a number on.

    A batch of all ranks together has `batch_size` users a rank, or, with `tokens_per_batch`, as many as make up so many tokens
    (TurboGR, section 4.1.3, token-aware dynamic batch scaling): every epoch is cut into the same number of batches,
    round(all tokens / (ranks x tokens_per_batch)), where the tokens so far pass its next equal part. Then `sharing` says which
    of its histories fall to which rank (same section, global token reallocation), from lengths alone, so that all ranks come
    to the same answer.

    Args:
        samples: int64 [N], user rows to train on, each once an epoch.
        batch_size: users per batch and rank, 1 or more.
        seed: 0..2^64 - 1.
        shuffle: False keeps the given order in every epoch.
        drop_last: drop the last batch of an epoch where it is smaller than the others, all ranks together.
        rank: whose shares of the batches are given, 0..ranks - 1.
        ranks: how many share each batch.
        lengths: int64 [N], tokens of each of `samples`; needed by what follows.
        tokens_per_batch: tokens per batch and rank, in the mean, instead of `batch_size`; "auto" is `batch_size` times the mean
            of `lengths`.
        sharing: who trains which history of a batch.
        stochastic_length: thins histories; its N is the largest of `lengths`.

    Raises:
        ConfigurationError: an option is out of range, or an epoch would have no batch.
    """

    def __init__(
        self,
        samples: Int64Array,
        batch_size: int,
        seed: int,
        shuffle: bool = True,
        drop_last: bool = False,
        rank: int = 0,
        ranks: int = 1,
        *,
        lengths: Int64Array | None = None,
        tokens_per_batch: TokensPerBatch | float = None,
        sharing: Sharing | None = None,
        stochastic_length: StochasticLength | None = None,
    ) -> None:
        if batch_size < 1:
            raise ConfigurationError(f"batch_size is {batch_size}; it must be 1 or more")
        check_tokens_per_batch(tokens_per_batch, drop_last)
        self.sharing = sharing or Sharing()
        if lengths is None and (tokens_per_batch is not None or stochastic_length is not None or self.sharing.by_tokens):
            raise ValueError("tokens_per_batch, sharing by cost and stochastic_length need lengths")
        if lengths is not None and len(lengths) != len(samples):
            raise ValueError(f"{len(samples)} samples have {len(lengths)} lengths")
        most = self.sharing.max_tokens
        if lengths is not None and most is not None and len(lengths) and lengths.max() > most:
            raise ConfigurationError(
                f"max_tokens_per_rank is {most}, but the longest history has {int(lengths.max())} tokens and is never cut; "
                "allow as many, or train shorter histories"
            )
        self.samples = samples
        self.lengths = lengths
        self.batch_size = batch_size
        self.tokens_per_batch = tokens_per_batch
        self.rank, self.ranks = rank, ranks
        self.seed = check_seed(seed)
        self.shuffle = shuffle
        self.stochastic_length = stochastic_length
        self._longest = 0 if stochastic_length is None or lengths is None else int(lengths.max())
        self.epoch = 0
        self._count = self._count_of(drop_last)

    def __len__(self) -> int:
        """Batches in an epoch; the same for all epochs and ranks."""
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

    def together(self, epoch: int, first: int = 0) -> Iterator[Int64Array]:
        """The batches of an epoch from number `first` on, of all ranks together: int64 [B] each, indices into `samples`."""
        # Sorting by a hash rather than shuffling by a generator: the order survives upgrades of NumPy.
        hashes = stream_keys(self.seed, epoch, self.samples, ORDER) if self.shuffle else None
        order = np.arange(len(self.samples)) if hashes is None else np.argsort(hashes, kind="stable")
        if self.tokens_per_batch is None:
            cuts = np.minimum(np.arange(len(self) + 1) * (self.batch_size * self.ranks), len(order))
        else:
            assert self.lengths is not None
            cuts = cut_by_tokens(self.lengths[order], len(self))
        for number in range(first, len(self)):
            yield order[cuts[number] : cuts[number + 1]]

    def shares(self, batch: Int64Array, name: str = "a batch") -> list[Int64Array]:
        """What falls to each rank of a batch of `together`: int64 [b] each, ascending indices into `batch`.

        Raises:
            ConfigurationError: some rank would have more tokens than allowed; the message calls the batch by `name`.
        """
        if self.lengths is None or not self.sharing.by_tokens:
            return np.array_split(np.arange(len(batch)), self.ranks)
        return self.sharing(self.lengths[batch], self.ranks, name)

    def plan(self, epoch: int, first: int = 0) -> Iterator[tuple[Int64Array, list[Int64Array]]]:
        """How long the histories of an epoch's batches are, and on which rank, from batch `first` on.

        Yields:
            A batch of all ranks: int64 [B], tokens of its histories, in order; and for each rank int64 [b], tokens of the
            histories that it trains, less where they are thinned.

        Raises:
            ValueError: lengths are not known.
        """
        if self.lengths is None:
            raise ValueError("a plan needs lengths")
        for number, batch in enumerate(self.together(epoch, first), first):
            shares = [batch[own] for own in self.shares(batch, f"batch {number} of epoch {epoch}")]
            kept = [self._kept(epoch, batch, own) for own in shares]
            trained = [self.lengths[own] if left is None else left for own, left in zip(shares, kept, strict=True)]
            yield self.lengths[batch], trained

    def _epoch(self, epoch: int, first: int) -> Iterator[BatchKey]:
        for number, batch in enumerate(self.together(epoch, first), first):
            own = batch[self.shares(batch, f"batch {number} of epoch {epoch}")[self.rank]]
            yield BatchKey(epoch, self.samples[own], self._kept(epoch, batch, own))

    def _kept(self, epoch: int, batch: Int64Array, own: Int64Array) -> Int64Array | None:
        """How many tokens of each of our histories stay; None is all."""
        if self.stochastic_length is None:
            return None
        assert self.lengths is not None
        target = self.stochastic_length.target(self.lengths[batch], self.ranks, self._longest)
        return self.stochastic_length.kept(self.lengths[own], self.samples[own], target, self._longest, self.seed, epoch)

    def _count_of(self, drop_last: bool) -> int:
        count, together = len(self.samples), self.batch_size * self.ranks
        on = f" on {self.ranks} ranks" if self.ranks > 1 else ""
        if self.tokens_per_batch is None:
            batches = count // together if drop_last else -(-count // together)
            options = f"batch_size {self.batch_size}{on}, drop_last {drop_last}"
        else:
            options = f"tokens_per_batch {self.tokens_per_batch}{on}"
            assert self.lengths is not None
            if isinstance(self.tokens_per_batch, str):
                wanted = count / together
            else:
                wanted = int(self.lengths.sum()) / (self.tokens_per_batch * self.ranks)
            batches = min(count, max(1, round(wanted)))
        if not batches:
            raise ConfigurationError(f"an epoch of {count} training users has no batch ({options})")
        return batches


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


class EvaluationBatches:
    """Users in the order of their rows, each once: a `batch_sampler` that gives one rank's slice of every batch.

    Args:
        num_users: U.
        batch_size: users per batch and rank, 1 or more.
        rank: whose slices are given, 0..ranks - 1.
        ranks: how many share each batch.
    """

    def __init__(self, num_users: int, batch_size: int, rank: int = 0, ranks: int = 1) -> None:
        self.num_users, self.batch_size, self.rank, self.ranks = num_users, batch_size, rank, ranks

    def __len__(self) -> int:
        """Batches, the same for all ranks."""
        together = self.batch_size * self.ranks
        return (self.num_users + together - 1) // together

    def __iter__(self) -> Iterator[list[int]]:
        """User rows of each batch, possibly none."""
        together = self.batch_size * self.ranks
        for start in range(0, self.num_users, together):
            batch = range(start, min(start + together, self.num_users))
            yield list(batch[share(len(batch), self.rank, self.ranks)])


class EvaluationLoader:
    """Loads the batches of `EvaluationBatches`, with any number of worker processes.

    This is not a `torch.utils.data.DataLoader`, as `TrainingLoader` is none: Lightning's sampler for several ranks would repeat
    users until every rank has equally many, and they would be counted twice.

    Args:
        collate: makes a batch of a list of user rows.
        batches: which rows.
        **options: of the inner `DataLoader` (`num_workers`, `pin_memory`, …).

    Attributes:
        loader: the inner `DataLoader`.
    """

    def __init__(self, collate: Callable[[list[int]], JaggedBatch], batches: EvaluationBatches, **options: Any) -> None:
        self.batches = batches
        self.loader: DataLoader[JaggedBatch] = DataLoader(
            range(batches.num_users),  # type: ignore[arg-type]
            batch_sampler=batches,
            collate_fn=collate,
            generator=torch.Generator(),  # of its own, so that iterating takes nothing from the global stream
            **options,
        )

    def __len__(self) -> int:
        """Batches, the same for all ranks."""
        return len(self.batches)

    def __iter__(self) -> Iterator[JaggedBatch]:
        """All batches, from the first."""
        return iter(self.loader)

    # Named as in DataLoader: Lightning shuts the workers down through this attribute when it is done.
    @property
    def _iterator(self) -> Any:
        return self.loader._iterator

    @_iterator.setter
    def _iterator(self, iterator: Any) -> None:
        self.loader._iterator = iterator


def _unchanged(batch: Any) -> Any:
    return batch
