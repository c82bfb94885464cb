"""Who trains which history of a batch, so that all ranks have equally much to do (TurboGR, section 4.1.3).

Ranks wait for each other at every step, so a step lasts as long as that of the rank with most work. What a history costs is
known from its length before anything is computed. So every rank works out the whole plan from the lengths alone: without
communication, and with the same result everywhere, for all here are pure functions that settle ties by position.

Two plans follow each other. `cut_by_tokens` cuts an epoch's order of users into batches of equally many tokens (the paper's
token-aware batch scaling, but of the batch of all ranks). `assign` shares out a batch (the paper's global token reallocation).
Neither changes what a step trains on once the batch is cut: `assign` only says where.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, get_args

import numpy as np
import numpy.typing as npt

from turbogr.data.packing import Float64Array, Int64Array, differences, exchanged, fullest_first, longest_first
from turbogr.errors import ConfigurationError

Method = Literal["slices", "greedy", "karmarkar_karp"]
"""How `assign` shares out: consecutive users, equally many a rank; longest first; or by largest differences."""

_NO_LIMITS: Int64Array = np.empty(0, dtype=np.int64)


@dataclass(frozen=True)
class CostModel:
    """What a history of n tokens costs: `linear` n + `quadratic` n^2.

    The first part stands for whatever looks at each token once (look-ups, projections, the loss), the second for attention.
    Only their ratio matters to a plan. The default counts tokens.

    Attributes:
        linear: per token, 0 or more.
        quadratic: per pair of tokens, 0 or more.

    Raises:
        ConfigurationError: a coefficient is negative or not finite, or both are 0.
    """

    linear: float = 1.0
    quadratic: float = 0.0

    def __post_init__(self) -> None:
        values = (self.linear, self.quadratic)
        if not all(np.isfinite(v) and v >= 0 for v in values) or not any(values):
            raise ConfigurationError(
                f"the cost of a history is {self.linear} n + {self.quadratic} n^2; both coefficients must be 0 or more, and "
                "one of them above 0"
            )

    def __call__(self, tokens: Int64Array) -> Float64Array:
        """Costs of histories.

        Args:
            tokens: int64 [B], length of each.

        Returns:
            float64 [B], in the unit of the coefficients.
        """
        n = np.asarray(tokens).astype(np.float64)
        return self.linear * n + self.quadratic * n * n

    @classmethod
    def fitted(cls, tokens: Sequence[Int64Array], seconds: Sequence[float]) -> CostModel:
        """The coefficients, in seconds, that explain measured steps best.

        Non-negative least squares of seconds = constant + linear Σn + quadratic Σn^2. The constant is what a step takes
        whatever its batch; no plan can change it, so it is no part of the model.

        Args:
            tokens: lengths of the histories of each measured step.
            seconds: what each step took on one rank, without waiting for others.

        Raises:
            ValueError: not one time for every step.
            ConfigurationError: fewer than three steps, or their times do not grow with the tokens.
        """
        if len(tokens) != len(seconds):
            raise ValueError(f"{len(tokens)} batches, but {len(seconds)} times")
        if len(tokens) < 3:
            raise ConfigurationError(f"a cost model needs three measured steps or more, not {len(tokens)}")
        lengths = [np.asarray(batch).astype(np.float64) for batch in tokens]
        rows = np.array([[1.0, n.sum(), (n * n).sum()] for n in lengths])
        scale = np.maximum(rows.max(0), 1.0)
        wanted = np.asarray(seconds, dtype=np.float64)
        # With three unknowns every choice of those that are not 0 can be tried.
        best, least = np.zeros(3), np.inf
        for free in itertools.chain.from_iterable(itertools.combinations(range(3), k) for k in (1, 2, 3)):
            found = np.zeros(3)
            found[list(free)] = np.linalg.lstsq((rows / scale)[:, list(free)], wanted, rcond=None)[0]
            error = float(((rows / scale) @ found - wanted) @ ((rows / scale) @ found - wanted))
            # One that explains as well with fewer unknowns is preferred.
            if (found >= 0).all() and error < least * (1 - 1e-9):
                best, least = found / scale, error
        if not best[1:].any():
            raise ConfigurationError(
                "no cost model fits: the measured steps do not take longer with more tokens; measure steps of more various "
                "lengths, or give the coefficients"
            )
        return cls(float(best[1]), float(best[2]))


def cut_by_tokens(tokens: Int64Array, batches: int) -> Int64Array:
    """Cut an order of users into batches of equally many tokens.

    Batch b ends where the tokens so far come nearest to (b + 1) / batches of all: its tokens differ from the mean by half of
    the two histories at its ends at most, and errors do not add up. Where users are few, that gives way to: no batch is empty.

    Args:
        tokens: int64 [N], lengths in the (shuffled) order of users.
        batches: 1..N.

    Returns:
        int64 [batches + 1], from 0 to N: batch b has the users from cut b up to cut b + 1.

    Raises:
        ValueError: not 1..N batches.
    """
    count = len(tokens)
    if not 1 <= batches <= count:
        raise ValueError(f"{count} users cannot make {batches} batches of at least one user each")
    before = np.concatenate([[0], np.cumsum(tokens, dtype=np.int64)])
    # In units of 1 / batches of a token, so that all is exact.
    wanted = before[-1] * np.arange(batches + 1, dtype=np.int64)
    after = np.searchsorted(before * batches, wanted)
    earlier = np.maximum(after - 1, 0)
    cuts = np.where(wanted - before[earlier] * batches < before[after] * batches - wanted, earlier, after)
    cuts[0], cuts[-1] = 0, count
    numbers = np.arange(batches + 1)
    return np.asarray(np.minimum(np.maximum.accumulate(cuts - numbers), count - batches) + numbers, dtype=np.int64)


def assign(
    costs: Float64Array,
    ranks: int,
    method: Method = "greedy",
    tokens: Int64Array | None = None,
    max_tokens: int | None = None,
    batch: str = "a batch",
) -> list[Int64Array]:
    """Share out the histories of a batch.

    `greedy` gives the longest first, each to the rank that has least (Graham's LPT; the paper's rule). `karmarkar_karp` joins
    the two partial plans with the largest differences, again and again, so that the differences cancel. Both end with
    exchanges: of two ranks, the heavier gives a history, or swaps one for a shorter, where that lowers the heavier of the two.
    That is what makes greedy good where a rank has few histories; after it, Karmarkar-Karp gains little.

    Ranks are numbered by their first history. Without a cap, a rank is empty only where there are fewer histories than ranks.

    Args:
        costs: float64 [B], above 0.
        ranks: 1 or more.
        method: as above; `slices` gives consecutive histories, equally many (one more for the first ranks), whatever they cost.
        tokens: int64 [B], needed where there is a cap.
        max_tokens: most tokens of a rank (its memory); None is no cap.
        batch: what to call the batch in an error.

    Returns:
        For each rank int64, ascending indices into `costs`; every index once.

    Raises:
        ValueError: ranks below 1, an unknown method, or a cap without `tokens`.
        ConfigurationError: no plan within the cap was found.
    """
    if ranks < 1:
        raise ValueError(f"ranks is {ranks}; it must be 1 or more")
    if method not in get_args(Method):
        raise ValueError(f"method is {method!r}; choose one of {', '.join(get_args(Method))}")
    if max_tokens is not None and tokens is None:
        raise ValueError("a cap of tokens needs the tokens of each history")
    limits = _NO_LIMITS if max_tokens is None or tokens is None else np.asarray(tokens, dtype=np.int64)
    cap = max_tokens or 0
    if method == "slices" or ranks == 1:
        slices = np.array_split(np.arange(len(costs), dtype=np.int64), ranks)
        if len(limits) and not _within(slices, limits, cap):
            raise _over(limits, ranks, cap, batch)
        return slices
    plan: list[list[int]] | None = differences(costs, ranks) if method == "karmarkar_karp" else longest_first(costs, ranks)
    if len(limits) and not _within(plan or [], limits, cap):
        plan = longest_first(costs, ranks, limits, cap) or fullest_first(limits, ranks, cap)
    if plan is None:
        raise _over(limits, ranks, cap, batch)
    owners = exchanged(costs, plan, limits, cap)
    shares = np.split(np.argsort(owners, kind="stable"), np.cumsum(np.bincount(owners, minlength=ranks))[:-1])
    return sorted(shares, key=lambda share: share[0] if len(share) else len(costs))


@dataclass(frozen=True)
class Imbalance:
    """How unequal the ranks' loads are, over steps; loads are tokens or costs.

    The paper's Table 3 gives the largest difference of tokens, and the delay as a share of the step: 1100 of 2340 ms is
    47.01 %, 37 of 1540 ms is 2.40 %. Whose delay is not said. As 10,726 / 47.01 % and 559 / 2.40 % both come to about 23,000
    tokens, it is most likely that of the lightest rank: `longest_wait` here.

    Attributes:
        difference: heaviest rank − lightest rank, mean over steps, in the unit of the loads.
        largest_difference: the largest of any step.
        delay: %, (heaviest − mean) / heaviest, mean over steps: the share of a step that a rank waits on average.
        longest_wait: %, (heaviest − lightest) / heaviest, mean over steps: the share of a step that the lightest rank waits.
        wasted: %, 1 − sum of all loads / (ranks · sum of the heaviest): the share of all ranks' time that is waiting. As
            `delay`, but long steps count more.
    """

    difference: float
    largest_difference: float
    delay: float
    longest_wait: float
    wasted: float


def imbalance(loads: npt.ArrayLike) -> Imbalance:
    """Sum up the loads of ranks, in tokens or in costs.

    Args:
        loads: [steps, ranks], 0 or more, a step or more.

    Raises:
        ValueError: not such an array.
    """
    table = np.asarray(loads, dtype=np.float64)
    if table.ndim != 2 or 0 in table.shape:
        raise ValueError(f"loads have the shape {table.shape}, not [steps, ranks]")
    heaviest, lightest = table.max(1), table.min(1)
    divisor = np.where(heaviest > 0, heaviest, 1)
    most = float(heaviest.sum())
    return Imbalance(
        difference=float((heaviest - lightest).mean()),
        largest_difference=float((heaviest - lightest).max()),
        delay=float(100 * ((heaviest - table.mean(1)) / divisor).mean()),
        longest_wait=float(100 * ((heaviest - lightest) / divisor).mean()),
        wasted=100 * (1 - float(table.sum()) / (table.shape[1] * most)) if most else 0.0,
    )


def lowest_maximum(costs: Float64Array, ranks: int) -> float:
    """A load that the heaviest rank cannot stay below, whatever the plan.

    The largest of: the mean load; and for every k, the k + 1 cheapest of the k · ranks + 1 costliest histories, since so many
    must meet on some rank.

    Args:
        costs: float64 [B].
        ranks: 1 or more.
    """
    falling = np.sort(np.asarray(costs, dtype=np.float64))[::-1]
    bound = float(falling.sum()) / ranks
    for k, last in enumerate(range(1, len(falling) + 1, ranks)):
        bound = max(bound, float(falling[last - k - 1 : last].sum()))
    return bound


def _within(plan: Sequence[Sequence[int] | Int64Array], tokens: Int64Array, cap: int) -> bool:
    return all(tokens[np.asarray(each, dtype=np.int64)].sum() <= cap for each in plan)


def _over(tokens: Int64Array, ranks: int, cap: int, batch: str) -> ConfigurationError:
    return ConfigurationError(
        f"{batch} has {int(np.sum(tokens))} tokens in {len(tokens)} histories (the longest {int(np.max(tokens))}): no plan was "
        f"found that gives each of {ranks} ranks {cap} tokens at most; allow more (max_tokens_per_rank), or train smaller "
        "batches or shorter histories"
    )
