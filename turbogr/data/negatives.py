"""Negative items, drawn so that a sample's draws depend on (seed, epoch, sample, position) and on nothing else.

Everything random about the data is a hash of counters, not the state of a generator: no worker, rank, batch size or stopping
point can change what a sample gets. The hash is SplitMix64 (Steele, Lea, Flood, "Fast Splittable Pseudorandom Number
Generators", OOPSLA 2014), which passes BigCrush and which NumPy computes for a whole batch at once, three times as fast as one
Philox generator a sample.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import Protocol

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from turbogr.errors import ConfigurationError

Int64Array = npt.NDArray[np.int64]
UInt64Array = npt.NDArray[np.uint64]

ORDER = 1
"""Purpose of `stream_keys`: the order of samples in an epoch."""
NEGATIVES = 2
"""Purpose of `stream_keys`: the negatives of a sample."""
LENGTH = 3
"""Purpose of `stream_keys`: whose histories stay whole under stochastic length."""
THINNING = 4
"""Purpose of `stream_keys`: which tokens of a thinned history stay."""

LOW = np.uint64(0xFFFFFFFF)
"""The lower half of a word."""

_GOLDEN = 0x9E3779B97F4A7C15  # 2^64 / golden ratio, odd: SplitMix64's step between two counters
_MASK = (1 << 64) - 1
_LOW_HALF = 0 if sys.byteorder == "little" else 1
_NONE = np.empty(0, dtype=np.int64)
_CHUNK = 1 << 14  # words hashed at a time: two buffers of 128 KiB stay in the cache
_RETRY = 1 << 40  # counters of redraws start here, beyond every first draw


class NegativeSampler(Protocol):
    """Draws the negatives of a batch. Must be picklable, and a pure function of its arguments.

    Others than uniform draws are in `turbogr.data.distributions`.
    """

    num_negatives: int

    def draw(self, samples: Int64Array, lengths: Int64Array, epoch: int, targets: Tensor) -> Tensor:
        """Draw negatives for every token of a batch.

        Args:
            samples: int64 [B], the identity of each sample: its user row.
            lengths: int64 [B], tokens of each sample; T is their sum.
            epoch: of the data, from 0.
            targets: int64 [T], item row of each token's target; only who draws within the batch looks at it.

        Returns:
            int64 [T, R], item rows; equal arguments give equal draws, whatever else the batch holds, unless they are drawn
            within it.
        """
        ...


class UniformNegatives:
    """R draws per token, uniform over the whole catalogue, with replacement (a draw may be the token's own target).

    Args:
        num_items: V, 1..2^32.
        num_negatives: R, 1..V.
        seed: 0..2^64 - 1.

    Raises:
        ConfigurationError: a number is out of its range.
    """

    def __init__(self, num_items: int, num_negatives: int, seed: int) -> None:
        if not 1 <= num_items <= 1 << 32:
            raise ConfigurationError(f"a catalogue of {num_items} items cannot be drawn from; it needs 1 to 2^32")
        if not 1 <= num_negatives <= num_items:
            raise ConfigurationError(
                f"num_negatives is {num_negatives}; it must lie between 1 and the size of the catalogue, {num_items}"
            )
        self.num_items = num_items
        self.num_negatives = num_negatives
        self.seed = check_seed(seed)

    def draw(self, samples: Int64Array, lengths: Int64Array, epoch: int, targets: Tensor | None = None) -> Tensor:
        """Draw negatives for every token of a batch; see `NegativeSampler.draw`."""
        draws = self.num_negatives
        starts = token_streams(self.seed, epoch, samples, lengths, draws)
        out = np.empty((len(starts), draws), dtype=np.uint64)
        rejected = [_NONE]
        # Lemire, "Fast Random Integer Generation in an Interval" (2019): x V / 2^32 is unbiased once the x whose product leaves
        # less than 2^32 mod V below are rejected. That is a share of V / 2^32: almost none, so they are redrawn together.
        excess = np.uint32((1 << 32) % self.num_items)
        for rows, words in hashed(starts, (draws + 1) // 2):  # one 64-bit word gives two draws
            product = out[rows]
            product[...] = words.view(np.uint32)[:, :draws]
            product *= np.uint64(self.num_items)
            if excess:
                bad = product.view(np.uint32)[:, _LOW_HALF::2] < excess
                if bad.any():
                    rejected.append(np.flatnonzero(bad) + rows.start * draws)
            product >>= np.uint64(32)
        self._redraw(out, np.concatenate(rejected), starts)
        return torch.from_numpy(out.view(np.int64))

    def _redraw(self, out: UInt64Array, rejected: Int64Array, starts: UInt64Array) -> None:
        """Replace the rejected draws, given as indices into the flattened `out`, until none is rejected."""
        excess, attempt = (1 << 32) % self.num_items, 0
        while rejected.size:
            attempt += 1
            row, column = np.divmod(rejected, self.num_negatives)
            z = starts[row] + (column.astype(np.uint64) + np.uint64(attempt * _RETRY)) * np.uint64(_GOLDEN)
            product = (mix(z, np.empty_like(z)) & LOW) * np.uint64(self.num_items)
            out[row, column] = product >> np.uint64(32)
            rejected = rejected[(product & LOW) < excess]


def stream_keys(seed: int, epoch: int, samples: Int64Array, purpose: int) -> UInt64Array:
    """Hash (seed, purpose, epoch, sample) to the start of a stream of random words.

    Each step is a bijection of 64 bits, so different samples never share a key within an epoch.

    Args:
        seed: 0..2^64 - 1.
        epoch: from 0.
        samples: int64 [B], identity of each sample.
        purpose: `ORDER`, `NEGATIVES`, `LENGTH` or `THINNING`: two uses of one (seed, epoch, sample) must not be correlated.

    Returns:
        uint64 [B].
    """
    key = np.array([seed], dtype=np.uint64)
    for value in (purpose, epoch):
        key += np.uint64((value + 1) * _GOLDEN & _MASK)
        mix(key, np.empty_like(key))
    keys = key + (samples.astype(np.uint64) + np.uint64(1)) * np.uint64(_GOLDEN)
    return mix(keys, np.empty_like(keys))


def token_streams(seed: int, epoch: int, samples: Int64Array, lengths: Int64Array, draws: int) -> UInt64Array:
    """Where each token's stream of random words starts.

    Args:
        seed: 0..2^64 - 1.
        epoch: from 0.
        samples: int64 [B], identity of each sample.
        lengths: int64 [B], tokens of each sample; T is their sum.
        draws: words that a token may use at most.

    Returns:
        uint64 [T], for `hashed`: by (seed, epoch, sample, position) alone.
    """
    first = np.cumsum(lengths) - lengths
    # A token's counters start at its position times `draws`, so those of two positions, and their redraws, never meet.
    positions = (np.arange(int(lengths.sum())) - np.repeat(first, lengths)).astype(np.uint64)
    starts = np.repeat(stream_keys(seed, epoch, samples, NEGATIVES), lengths)
    starts += positions * np.uint64(draws * _GOLDEN & _MASK)
    return starts


def hashed(starts: UInt64Array, words: int) -> Iterator[tuple[slice, UInt64Array]]:
    """The first words of each stream, some streams at a time: so many that two buffers of them stay in the cache.

    Args:
        starts: uint64 [T], from `token_streams`.
        words: W, of each stream.

    Yields:
        Rows of `starts`, and uint64 [rows, W], which the next step overwrites and the caller may, too.
    """
    steps = np.arange(words, dtype=np.uint64) * np.uint64(_GOLDEN)
    rows = max(1, _CHUNK // words)
    word, scratch = np.empty((rows, words), np.uint64), np.empty((rows, words), np.uint64)
    for start in range(0, len(starts), rows):
        chunk = slice(start, min(start + rows, len(starts)))
        z = np.add(starts[chunk, None], steps, out=word[: chunk.stop - start])
        yield chunk, mix(z, scratch[: chunk.stop - start])


def mix(z: UInt64Array, scratch: UInt64Array) -> UInt64Array:
    """SplitMix64's finaliser (variant 13 of Stafford's), in place.

    Args:
        z: uint64 words of any shape, replaced by their hashes.
        scratch: like `z`, overwritten.

    Returns:
        `z`.
    """
    for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):
        np.right_shift(z, np.uint64(shift), out=scratch)
        np.bitwise_xor(z, scratch, out=z)
        np.multiply(z, np.uint64(factor), out=z)
    np.right_shift(z, np.uint64(31), out=scratch)
    return np.bitwise_xor(z, scratch, out=z)


def check_seed(seed: int) -> int:
    """Return `seed` if it fits the hash.

    Raises:
        ConfigurationError: it does not.
    """
    if not 0 <= seed <= _MASK:
        raise ConfigurationError(f"seed is {seed}; it must lie between 0 and 2^64 - 1")
    return seed
