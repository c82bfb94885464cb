"""Lengths of real users' histories, and batches of them: what load balancing is tried on."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from turbogr.data.balance import CostModel, Float64Array, Int64Array, cut_by_tokens
from turbogr.data.kuairand_statistics import CLICK_LOG_MEAN, CLICK_LOG_STD

KUAIRAND_USERS, KUAIRAND_RANGE = 27_285, (10, 83_260)
BEAUTY_NAME, BEAUTY_USERS, BEAUTY_RANGE = "Amazon Beauty", 22_363, (5, 204)

Plan = Callable[[Float64Array, int], list[Int64Array]]
"""From the costs of a batch's histories and the number of ranks to each rank's histories."""


@dataclass(frozen=True)
class Histories:
    """Lengths of all users' histories.

    Attributes:
        name: of the data set.
        real: False for lengths that were drawn in place of real ones.
        lengths: int64 [U], 1 or more.
    """

    name: str
    real: bool
    lengths: Int64Array

    def capped(self, cap: int | None) -> Int64Array:
        """int64 [U], with the newest `cap` tokens of each; None is all."""
        return self.lengths if cap is None else np.minimum(self.lengths, cap)


def kuairand_clicks(folder: Path) -> Histories:
    """Clicks of every user of KuaiRand-27K's standard log, or log-normal ones with the published mean and deviation."""
    path = folder / "kuairand-27k-stats" / "log_standard_user_stats_distribution.csv"
    if path.is_file():
        table = np.genfromtxt(path, delimiter=",", names=True, encoding="utf-8-sig")
        return Histories("KuaiRand-27K clicks", True, table["clicks"].astype(np.int64))
    drawn = np.random.default_rng(0).lognormal(CLICK_LOG_MEAN, CLICK_LOG_STD, KUAIRAND_USERS)
    return Histories("KuaiRand-27K clicks", False, np.clip(drawn, *KUAIRAND_RANGE).astype(np.int64))


def amazon_beauty(folder: Path) -> Histories:
    """Events of every user of Amazon Beauty (5-core), or 5 and a log-normal number, of about the same quantiles."""
    path = folder / "amazon" / "Beauty.txt"
    if path.is_file():
        lines = path.read_text(encoding="utf-8").splitlines()
        return Histories(BEAUTY_NAME, True, np.array([len(line.split()) - 1 for line in lines], dtype=np.int64))
    drawn = 5 + np.random.default_rng(0).lognormal(0.5, 1.3, BEAUTY_USERS)
    return Histories(BEAUTY_NAME, False, np.clip(drawn, *BEAUTY_RANGE).astype(np.int64))


@dataclass(frozen=True)
class Steps:
    """The lengths of the histories of some steps, of all ranks together.

    Attributes:
        by_users: int64 [users] a step, equally many users in each.
        by_tokens: the same order of users, cut where the tokens of all steps are equal.
    """

    by_users: list[Int64Array]
    by_tokens: list[Int64Array]


def draw_steps(lengths: Int64Array, users: int, most: int, seed: int = 0) -> Steps:
    """Steps from shuffled epochs, one behind the other.

    Args:
        lengths: int64 [U], of all users.
        users: of a step, all ranks together; where they are more than U, epochs stand in for a larger data set.
        most: how many steps.
        seed: of the order.
    """
    rng = np.random.default_rng(seed)
    epochs = [rng.permutation(lengths) for _ in range(-(-most * users // len(lengths)))]
    order = np.concatenate(epochs)[: most * users]
    cuts = cut_by_tokens(order, most)
    return Steps(np.split(order, most), np.split(order, cuts[1:-1]))


def loads(steps: list[Int64Array], ranks: int, plan: Plan, cost: CostModel, counted: CostModel | None = None) -> Float64Array:
    """float64 [steps, ranks]: what each rank has to do.

    Args:
        steps: lengths of each step's histories.
        ranks: how many share them.
        plan: who gets what, by `cost`.
        cost: what the plan evens out.
        counted: what is summed up; None is `cost`.
    """
    counted = counted or cost
    table = np.zeros((len(steps), ranks))
    for number, step in enumerate(steps):
        costs = counted(step)
        table[number] = [costs[each].sum() for each in plan(cost(step), ranks)]
    return table
