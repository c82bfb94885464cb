"""Negatives that are not drawn uniformly, and log q, by which the loss corrects its logits for how they were drawn.

A sampled softmax whose candidates were drawn with probability q(item) is an estimate of the full one where log q(item) is
subtracted from every candidate's logit, the target's too (Bengio and Senécal, "Adaptive Importance Sampling to Accelerate
Training of a Neural Probabilistic Language Model", 2008; Yi et al., "Sampling-Bias-Corrected Neural Modeling for Large Corpus
Item Recommendations", RecSys 2019; TensorFlow's `sampled_softmax_loss`). Uniform draws subtract one number from all, which
changes nothing, and so have no log q.
"""

from __future__ import annotations

import math
from typing import Literal, get_args

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from turbogr.data.negatives import (
    LOW,
    Int64Array,
    NegativeSampler,
    UInt64Array,
    UniformNegatives,
    check_seed,
    hashed,
    token_streams,
)
from turbogr.errors import ConfigurationError

Float64Array = npt.NDArray[np.float64]

NegativeSampling = Literal["uniform", "log_uniform", "popularity", "in_batch"]
"""What negatives are drawn from: see `probabilities`."""

POPULARITY_EXPONENT = 1.0
"""The default of popularity's exponent."""

_CELL = 1 << 32
_MOST_ITEMS = (1 << 31) - 1
_HALF = np.uint64(32)


def check_sampling(sampling: NegativeSampling, exponent: float) -> None:
    """Refuse impossible options.

    Args:
        sampling: how negatives are drawn.
        exponent: of popularity.

    Raises:
        ConfigurationError: no such sampling, an exponent that is negative or not finite, or one without effect.
    """
    if sampling not in get_args(NegativeSampling):
        raise ConfigurationError(f"negative_sampling is {sampling!r}; choose one of {', '.join(get_args(NegativeSampling))}")
    if not 0 <= exponent < math.inf:
        raise ConfigurationError(f"popularity_exponent is {exponent}; it must be 0 or more, and finite")
    if sampling != "popularity" and exponent != POPULARITY_EXPONENT:
        raise ConfigurationError(
            f'popularity_exponent is {exponent}, an option of negative_sampling "popularity", but that is "{sampling}"; leave '
            "one of them out"
        )


def probabilities(sampling: NegativeSampling, counts: Int64Array, exponent: float = POPULARITY_EXPONENT) -> Float64Array | None:
    """How likely each item is to be a given draw.

    - log_uniform: ln((rank + 2) / (rank + 1)) / ln(V + 1), rank from 0 by falling count, equal counts by row: Zipf's law, as
      TensorFlow's `log_uniform_candidate_sampler` has it;
    - popularity: in proportion to (count + 1)^exponent. The one more lets items that are no target of training be drawn;
      exponent 0.75 is word2vec's;
    - in_batch: an item's share of the targets. Items that are no target are never drawn; theirs is given as that of a single
      one, so that its logarithm is finite.

    Args:
        sampling: how negatives are drawn.
        counts: int64 [V], how often each item is a target of training.
        exponent: of popularity.

    Returns:
        float64 [V], more than 0 everywhere; None for uniform draws.
    """
    if sampling == "uniform":
        return None
    if sampling == "log_uniform":
        ranks = np.empty(len(counts))
        ranks[np.argsort(-counts, kind="stable")] = np.arange(len(counts))
        return np.log1p(1 / (ranks + 1)) / math.log(len(counts) + 1)
    if sampling == "in_batch":
        return np.maximum(counts, 1) / max(1, int(counts.sum()))
    # Divided first: a large power of a large count would not be finite.
    weights = ((counts + 1) / (int(counts.max()) + 1)) ** exponent
    return np.maximum(weights / weights.sum(), 1 / (_CELL * len(counts)))  # no less than what an alias table can give


def negative_sampler(
    sampling: NegativeSampling, chances: Float64Array | None, num_items: int, num_negatives: int, seed: int
) -> NegativeSampler:
    """Make the sampler of the data module's options.

    Args:
        sampling: how negatives are drawn.
        chances: float64 [V], from `probabilities`.
        num_items: V.
        num_negatives: R, 1..V.
        seed: 0..2^64 - 1.

    Raises:
        ConfigurationError: a number is out of its range.
    """
    if sampling == "in_batch":
        return InBatchNegatives(num_negatives, seed)
    return (
        UniformNegatives(num_items, num_negatives, seed) if chances is None else WeightedNegatives(chances, num_negatives, seed)
    )


class WeightedNegatives:
    """R draws per token with the probabilities given, with replacement (a draw may be the token's own target).

    Every draw takes the same time, by an alias table (Walker 1977): V cells of equal chance, each shared by its own item and
    one other. Shares are whole numbers of 2^-32 of a cell, so that what is drawn differs from what was asked for by at most
    2^-32 / V, and draws are the same on every machine. The table takes 8 bytes an item.

    Args:
        chances: float64 [V], V 1..2^31 - 1, more than 0, in proportion to the probabilities.
        num_negatives: R, 1..V.
        seed: 0..2^64 - 1.

    Raises:
        ConfigurationError: a number is out of its range.
    """

    def __init__(self, chances: Float64Array, num_negatives: int, seed: int) -> None:
        if not 1 <= len(chances) <= _MOST_ITEMS:
            raise ConfigurationError(
                f"a catalogue of {len(chances)} items cannot be drawn from by weight; it needs 1 to 2^31 - 1"
            )
        if not 1 <= num_negatives <= len(chances):
            raise ConfigurationError(
                f"num_negatives is {num_negatives}; it must lie between 1 and the size of the catalogue, {len(chances)}"
            )
        self.num_negatives = num_negatives
        self.seed = check_seed(seed)
        self.table = alias_table(chances)

    def draw(self, samples: Int64Array, lengths: Int64Array, epoch: int, targets: Tensor | None = None) -> Tensor:
        """Draw negatives for every token of a batch; see `NegativeSampler.draw`."""
        starts = token_streams(self.seed, epoch, samples, lengths, self.num_negatives)
        out = np.empty((len(starts), self.num_negatives), dtype=np.int64)
        for rows, words in hashed(starts, self.num_negatives):
            place = _scaled(words, len(self.table))
            cell = (place >> _HALF).view(np.int64)
            place &= LOW
            entry = self.table[cell]
            own = place < entry >> _HALF
            entry &= LOW
            np.copyto(out[rows], entry.view(np.int64))
            np.copyto(out[rows], cell, where=own)
        return torch.from_numpy(out)


class InBatchNegatives:
    """R draws per token from the targets of the batch's other tokens, uniform and with replacement; never its own position.

    No further rows are looked up. Which of the other tokens a draw takes depends on (seed, epoch, sample, position), but who
    they are depends on the batch by nature: on its users, their order, and on several ranks on who is on the rank. It does not
    depend on workers. A batch of a single token has no others and gets its target, which the loss masks.

    Args:
        num_negatives: R, 1 or more.
        seed: 0..2^64 - 1.

    Raises:
        ConfigurationError: a number is out of its range.
    """

    def __init__(self, num_negatives: int, seed: int) -> None:
        if num_negatives < 1:
            raise ConfigurationError(f"num_negatives is {num_negatives}; it must be 1 or more")
        self.num_negatives = num_negatives
        self.seed = check_seed(seed)

    def draw(self, samples: Int64Array, lengths: Int64Array, epoch: int, targets: Tensor) -> Tensor:
        """Draw negatives for every token of a batch; see `NegativeSampler.draw`."""
        starts = token_streams(self.seed, epoch, samples, lengths, self.num_negatives)
        tokens = len(starts)
        items = targets.numpy()
        out = np.empty((tokens, self.num_negatives), dtype=np.int64)
        for rows, words in hashed(starts, self.num_negatives):
            further = (_scaled(words, max(1, tokens - 1)) >> _HALF).view(np.int64)
            further += np.arange(rows.start + 1, rows.stop + 1)[:, None]
            out[rows] = items[further % tokens]
        return torch.from_numpy(out)


def alias_table(chances: Float64Array) -> UInt64Array:
    """Walker's alias table, all cells at once instead of one after the other.

    A cell is 2^32 units. Items of less than a cell (light) are filled up by those of more (heavy), both in their order: a heavy
    item fills light ones until it has less than a cell left itself, and is then filled up by the next heavy one (the sweep of
    Hübschle-Schneider and Sanders, "Parallel Weighted Random Sampling", 2019). So who fills whom follows from the running sums
    of what is lacking and what is over.

    Args:
        chances: float64 [V], V 1..2^31 - 1, more than 0, in proportion to the probabilities.

    Returns:
        uint64 [V]; of each cell the units that are its own item's in the upper 32 bits, whose the others are in the lower.
    """
    count = len(chances)
    scaled = chances * (count * _CELL / chances.sum())
    units = np.maximum(np.rint(scaled).astype(np.int64), 1)
    # Rounding leaves a few units too many or too few; the largest can bear them.
    units[np.argmax(units)] += count * _CELL - int(units.sum())

    light, heavy = np.flatnonzero(units < _CELL), np.flatnonzero(units >= _CELL)
    lacking, over = np.cumsum(_CELL - units[light]), np.cumsum(units[heavy] - _CELL)
    own, other = np.zeros(count, dtype=np.int64), np.arange(count)
    own[light] = units[light]
    filled_before = np.concatenate([np.zeros(1, dtype=np.int64), lacking])[:-1]
    other[light] = heavy[np.searchsorted(over, filled_before, side="right")]
    # A heavy item that is left with exactly a cell, as the last one is, keeps own 0 and other itself.
    overdrawn = np.append(lacking, 0)[np.searchsorted(lacking, over[:-1])] - over[:-1]
    owes = np.flatnonzero(overdrawn)
    own[heavy[owes]] = _CELL - overdrawn[owes]
    other[heavy[owes]] = heavy[owes + 1]
    return own.astype(np.uint64) << _HALF | other.astype(np.uint64)


def _scaled(words: UInt64Array, count: int) -> UInt64Array:
    """words * count / 2^32, rounded down: one of `count` cells in the upper half, the place within it in the lower.

    Args:
        words: uint64 of any shape, overwritten.
        count: 1..2^32.

    Returns:
        Like `words`.
    """
    low = words & LOW
    low *= np.uint64(count)
    low >>= _HALF
    words >>= _HALF
    words *= np.uint64(count)
    words += low
    return words
