"""Load-balanced stochastic length: long histories are thinned at random, so that the ranks of a step have equal loads.

Stochastic length (Zhai et al., "Actions Speak Louder than Words", ICML 2024, section 3.2) trains on a history of n tokens whole
with probability N^alpha / n^2, N the length of the longest, and otherwise on a random N^(alpha / 2) of them. Where every rank
decides by itself, their loads differ. ULTRA-HSTU ("Bending the Scaling Law Curve in Large-Scale Recommendation Systems", 2026)
defines a rank's load as the sum of n^gamma over its histories, and lets each rank fill up to one target for all: it goes
through its long histories in the order of a weighted sampling without replacement and takes them whole while they fit.

This changes what is trained on, unlike `turbogr.data.balance`, which changes who trains it.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from turbogr.data.negatives import LENGTH, THINNING, Int64Array, mix, stream_keys
from turbogr.errors import ConfigurationError

_GOLDEN = np.uint64(0x9E3779B97F4A7C15)


@dataclass(frozen=True)
class StochasticLength:
    """How long histories are thinned.

    Our reading of what the papers leave open: the target is the load that stochastic length without the balancing would have
    in the mean, over this step's ranks; the weights of the sampling are its probabilities of a whole history; and the first
    history that no longer fits is cut to what does, so that the target is met but for a part of one token. A rank stays below
    it where all its histories whole are less, and above it where its histories at their shortest are more: histories of up to
    N^(alpha / 2) tokens are never thinned.

    Attributes:
        alpha: in (0, 2]; a thinned history has N^(alpha / 2) tokens. 2 thins nothing.
        gamma: more than 0; a history of n tokens is a load of n^gamma: 1 balances tokens, 2 attention.

    Raises:
        ConfigurationError: one of them is out of range.
    """

    alpha: float = 1.7
    gamma: float = 2.0

    def __post_init__(self) -> None:
        if not 0 < self.alpha <= 2:
            raise ConfigurationError(f"stochastic_length.alpha is {self.alpha}; it must lie above 0 and be 2 or less")
        if not 0 < self.gamma < float("inf"):
            raise ConfigurationError(f"stochastic_length.gamma is {self.gamma}; it must be more than 0")

    def shortest(self, longest: int) -> int:
        """Tokens that a thinned history has at least, N^(alpha / 2); `longest` is N."""
        return max(1, min(longest, round(longest ** (self.alpha / 2))))

    def whole(self, tokens: Int64Array, longest: int) -> npt.NDArray[np.float64]:
        """float64 [B], probability with which plain stochastic length takes a history whole: N^alpha / n^2, at most 1."""
        return np.minimum(1.0, longest**self.alpha / np.maximum(tokens, 1).astype(np.float64) ** 2)

    def target(self, tokens: Int64Array, ranks: int, longest: int) -> float:
        """Load that each rank is to have: the mean, over the step's ranks, of what plain stochastic length expects.

        Args:
            tokens: int64 [B], of all histories of a step, on all ranks together.
            ranks: how many share them.
            longest: N.

        Returns:
            A sum of n^gamma.
        """
        whole = self.whole(tokens, longest)
        loads = whole * self._load(tokens) + (1 - whole) * self._load(np.minimum(tokens, self.shortest(longest)))
        return float(loads.sum()) / ranks

    def kept(self, tokens: Int64Array, samples: Int64Array, target: float, longest: int, seed: int, epoch: int) -> Int64Array:
        """How many tokens of each of a rank's histories are trained on.

        Args:
            tokens: int64 [B], of the rank's histories.
            samples: int64 [B], identity of each: its user row. With seed and epoch it decides who comes first.
            target: from `target`.
            longest: N.
            seed: 0..2^64 - 1.
            epoch: from 0.

        Returns:
            int64 [B], `shortest(longest)`..tokens, or tokens where that is less.
        """
        kept = np.minimum(tokens, self.shortest(longest))
        room = target - float(self._load(kept).sum())
        candidates = np.flatnonzero(tokens > kept)
        # Weighted sampling without replacement: ascending -log(U) / weight (Efraimidis and Spirakis, 2006).
        uniform = (stream_keys(seed, epoch, samples[candidates], LENGTH) >> np.uint64(11)).astype(np.float64) + 0.5
        keys = -np.log(uniform * 2.0**-53) / self.whole(tokens[candidates], longest)
        for place in candidates[np.argsort(keys, kind="stable")]:
            least = float(self._load(kept[place : place + 1])[0])
            more = float(self._load(tokens[place : place + 1])[0]) - least
            if more > room:
                if room > 0:
                    kept[place] = max(kept[place], int((room + least) ** (1 / self.gamma)))
                break
            kept[place] = tokens[place]
            room -= more
        return kept

    def _load(self, tokens: Int64Array) -> npt.NDArray[np.float64]:
        return tokens.astype(np.float64) ** self.gamma


def thinned(tokens: Int64Array, kept: Int64Array, samples: Int64Array, seed: int, epoch: int) -> Int64Array:
    """Which tokens of thinned histories stay: any `kept` of them with equal chance, in their order.

    Args:
        tokens: int64 [B], of each whole history.
        kept: int64 [B], 0..tokens, how many stay.
        samples: int64 [B], identity of each: its user row.
        seed: 0..2^64 - 1.
        epoch: from 0.

    Returns:
        int64 [kept.sum()], positions within each history, ascending, one history after the other.
    """
    starts = np.cumsum(tokens) - tokens
    total = int(tokens.sum())
    history = np.repeat(np.arange(len(tokens)), tokens)
    positions = np.arange(total) - starts[history]
    words = stream_keys(seed, epoch, samples, THINNING)[history] + positions.astype(np.uint64) * _GOLDEN
    mix(words, np.empty_like(words))
    order = np.lexsort((words, history))  # the histories stay where they are, each in an order of its own
    chosen = np.zeros(total, dtype=np.bool_)
    chosen[order[positions < np.repeat(kept, tokens)]] = True
    return positions[chosen]
