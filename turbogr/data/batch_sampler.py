"""BalancedBatchSampler: batches of equally many tokens, shared out to ranks by cost, for a `torch.utils.data.DataLoader`."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import islice

import numpy as np
from torch.utils.data import Sampler

from turbogr.data.balance import CostModel
from turbogr.data.negatives import Int64Array
from turbogr.data.samplers import EpochBatches
from turbogr.data.sharing import Balance, BalanceMethod, Sharing, TokensPerBatch
from turbogr.errors import ConfigurationError


class BalancedBatchSampler(Sampler[list[int]]):
    """What `SequenceDataModule` does with its users, for any map-style data set of which the lengths are known.

        sampler = BalancedBatchSampler(lengths, 32, tokens_per_batch="auto", balance="tokens", rank=rank, ranks=ranks)
        loader = DataLoader(dataset, batch_sampler=sampler, collate_fn=collate)
        for epoch in range(epochs):
            sampler.set_epoch(epoch)
            for batch in loader: ...

    Every index comes once an epoch, on one of the ranks, in an order that depends on (seed, epoch) alone; all ranks have
    equally many batches. Where a batch has fewer samples than there are ranks, a rank's share is an empty list, which
    `collate_fn` must take. Ranks have different numbers of samples: with DistributedDataParallel, which averages ranks as if
    they had equally many, multiply a mean loss by own samples x ranks / all samples.

    Under Lightning give `Trainer(use_distributed_sampler=False)`: it would put a sampler of its own in this one's place.

    Args:
        lengths: int64 [N], tokens of each sample, 1 or more.
        batch_size: samples per batch and rank; without effect where `tokens_per_batch` is a number.
        tokens_per_batch: as in `SequenceDataModule`, as are the options that follow.
        balance: what ranks have equally much of.
        balance_cost: of a sample, for balance "attention".
        balance_method: "greedy" or "karmarkar_karp".
        max_tokens_per_rank: most tokens of a batch on a rank.
        rank: whose batches are given, 0..ranks - 1.
        ranks: how many share each batch.
        seed: 0..2^64 - 1, the same on all ranks.
        shuffle: False keeps the order of the samples.
        drop_last: drop an epoch's last batch where it is smaller than the others.

    Raises:
        ConfigurationError: an option is out of range, or a sample has no tokens; while iterating, some rank would have more
            than `max_tokens_per_rank`.
    """

    def __init__(
        self,
        lengths: Sequence[int] | Int64Array,
        batch_size: int,
        *,
        tokens_per_batch: TokensPerBatch = None,
        balance: Balance = "tokens",
        balance_cost: CostModel | None = None,
        balance_method: BalanceMethod = "greedy",
        max_tokens_per_rank: int | None = None,
        rank: int = 0,
        ranks: int = 1,
        seed: int = 0,
        shuffle: bool = True,
        drop_last: bool = False,
    ) -> None:
        if not 0 <= rank < ranks:
            raise ConfigurationError(f"rank is {rank}, ranks is {ranks}; rank must lie between 0 and ranks - 1")
        tokens = np.asarray(lengths, dtype=np.int64)
        if len(tokens) and tokens.min() < 1:
            raise ConfigurationError(
                f"sample {int(tokens.argmin())} has {int(tokens.min())} tokens; every sample needs 1 or more"
            )
        self._batches = EpochBatches(
            np.arange(len(tokens)),
            batch_size,
            seed,
            shuffle,
            drop_last,
            rank,
            ranks,
            lengths=tokens,
            tokens_per_batch=tokens_per_batch,
            sharing=Sharing.of(balance, balance_cost, balance_method, max_tokens_per_rank),
        )
        self._position, self._restored = 0, False

    def __len__(self) -> int:
        """Batches of an epoch; the same for all epochs and ranks."""
        return len(self._batches)

    def __iter__(self) -> Iterator[list[int]]:
        """Indices of each batch, from the position to the end of its epoch; after that the next epoch's turn comes."""
        self._restored = False
        for key in islice(self._batches.stream(self._position), len(self) - self._position % len(self)):
            self._position += 1
            yield key.samples.tolist()

    def set_epoch(self, epoch: int) -> None:
        """Go to the start of an epoch; a position within it that was just restored stays."""
        if not (self._restored and self._position // len(self) == epoch):
            self._position = epoch * len(self)

    def state_dict(self) -> dict[str, int]:
        """The position: {"batches": batches drawn, in all epochs}.

        A loader with workers draws some batches before it hands them out. With one, count those trained and save
        {"batches": epoch x len(sampler) + batches of the epoch} instead.
        """
        return {"batches": self._position}

    def load_state_dict(self, state: dict[str, int]) -> None:
        """Continue from a saved position."""
        self._position, self._restored = state["batches"], True
