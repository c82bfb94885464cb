"""Load balancing (TurboGR, section 4.1.3): simulated with real users' lengths on up to 1,536 ranks, measured on gloo ranks.

Simulation: the steps of shuffled epochs are shared out in three ways: equally many users a rank (fixed batch size);
longest first (the paper's rule) on the same batches; and ours, batches cut by tokens and shared out by
`turbogr.data.balance.assign`. For each: the difference of tokens between the heaviest and the lightest rank, mean over steps;
how long the lightest rank waits, in % of the step; and how long a rank waits on average. The paper does not give its batch and
cap: those that come closest to all four figures of its Table 3 are looked for first. Lengths are real where the statistics of
KuaiRand-27K and Amazon Beauty are found, else drawn.

Measured: HSTU trained by `Trainer` and `TurboGRStrategy` on 2 and 4 gloo ranks, with the data module's `balance` off and on, in
turns, in the same processes. A step trains the same users either way, so that steps are compared one by one.
"""

from __future__ import annotations

import argparse
import itertools
import math
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np
from _balanced import measurement
from _lengths import BEAUTY_NAME, Histories, Steps, amazon_beauty, draw_steps, kuairand_clicks, loads
from _report import Report, parse_arguments
from _results import SHARED_DATA, markdown_table

from turbogr.data.balance import CostModel, Float64Array, Imbalance, Int64Array, Method, assign, imbalance, lowest_maximum
from turbogr.data.packing import longest_first

RANKS = (16, 64, 256, 1536)
PAPER_RANKS = 16
CAPS = (2048, 4096, 8192, None)
KUAIRAND_BATCHES, BEAUTY_BATCHES = range(1, 33), range(100, 701, 25)
TOKENS = CostModel()
MOST_DIFFERENCED = 8_000
"""Users of a step up to which Karmarkar-Karp is tried: it takes long with many ranks."""
WIDTH = 1024
ATTENTION = CostModel(1.0, 1 / (5 * WIDTH))
"""Of an HSTU block of that width, in multiply-adds: 5 D^2 a token for its projections, D a pair of tokens for attention."""
PAPER_STEP = 1.540
"""Seconds, balanced, on 16 NPUs."""


@dataclass(frozen=True)
class Published:
    """A row of the paper's Table 3: tokens and % of the step, before and after; the last two only for KuaiRand-27K."""

    before: float
    after: float
    wait_before: float | None = None
    wait_after: float | None = None


PAPER_SETTINGS: tuple[tuple[int | None, int], ...] = ((4096, 8), (4096, 6))
"""Caps and batches that come nearest to all of the paper's figures, and to its 10,726 tokens alone (see `guesses`)."""
SETTINGS: tuple[tuple[int | None, int], ...] = ((2048, 15), *PAPER_SETTINGS, (8192, 8), (8192, 2), (None, 8))
KUAIRAND_DIFFERENCE, KUAIRAND_WAIT, BEAUTY_DIFFERENCE = 280, 1.2, 15
"""Promised at 16 ranks: half of what the paper reports."""

KUAIRAND_PAPER, AMAZON_PAPER = Published(10_726, 559, 47.01, 2.40), Published(623, 31, None, 1.48)


def slices(costs: Float64Array, ranks: int) -> list[Int64Array]:
    """Equally many users a rank, whatever they cost."""
    return assign(costs, ranks, "slices")


def paper_rule(costs: Float64Array, ranks: int) -> list[Int64Array]:
    """Longest first, each to the rank that has least."""
    plan = longest_first(costs, ranks)
    assert plan is not None  # no cap
    return [np.array(each, dtype=np.int64) for each in plan]


def number_of_steps(users: int, quick: bool) -> int:
    """How many steps of so many users are simulated."""
    return max(2, min(50 if quick else 200, (20_000 if quick else 60_000) // users))


@dataclass(frozen=True)
class Guess:
    """A batch and a cap with what fixed batch size and the paper's rule come to at 16 ranks.

    Attributes:
        cap: tokens of a history; None is all.
        batch: users of a rank.
        before: of fixed batch size.
        after: of the paper's rule on the same steps.
    """

    cap: int | None
    batch: int
    before: Imbalance
    after: Imbalance

    def apart(self, paper: Published, baseline_only: bool = False) -> float:
        """The largest ratio, as a logarithm, between a figure here and the paper's."""
        pairs = [(self.before.difference, paper.before), (self.before.longest_wait, paper.wait_before)]
        pairs += [(self.after.difference, paper.after), (self.after.longest_wait, paper.wait_after)]
        pairs = pairs[:1] if baseline_only else pairs
        return max(abs(math.log(max(ours, 1e-9) / theirs)) for ours, theirs in pairs if theirs is not None)

    def row(self) -> list[str]:
        """Of a Markdown table."""
        figures = (self.before.difference, self.before.longest_wait, self.after.difference, self.after.longest_wait)
        return [shown(self.cap), str(self.batch), *(number(figure) for figure in figures)]


def guesses(histories: Histories, caps: Sequence[int | None], batches: Sequence[int], quick: bool) -> list[Guess]:
    """All of them, simulated."""
    found = []
    for cap, batch in itertools.product(caps, batches):
        lengths, users = histories.capped(cap), batch * PAPER_RANKS
        steps = draw_steps(lengths, users, number_of_steps(users, quick)).by_users
        before, after = (imbalance(loads(steps, PAPER_RANKS, plan, TOKENS)) for plan in (slices, paper_rule))
        found.append(Guess(cap, batch, before, after))
    return found


@dataclass(frozen=True)
class Simulated:
    """One setting on so many ranks.

    Attributes:
        fixed, rule, ours, differencing: fixed batch size; the paper's rule; ours, greedy and Karmarkar-Karp (None where a
            step has too many users for it).
        bound: %, the mean wait that no plan of the batches cut by tokens can avoid.
        planning: seconds of processor time a step, greedy and Karmarkar-Karp; the smaller of two passes.
    """

    fixed: Imbalance
    rule: Imbalance
    ours: Imbalance
    differencing: Imbalance | None
    bound: float
    planning: list[float]


def simulate(steps: Steps, ranks: int) -> Simulated:
    """Shares out the steps in all ways, by tokens."""
    times: list[float] = []
    figures = []
    methods: list[Method] = ["greedy"]
    if len(steps.by_tokens[0]) <= MOST_DIFFERENCED:
        methods.append("karmarkar_karp")
    for method in methods:
        took = []
        for _ in range(2):
            start = time.process_time()
            for step in steps.by_tokens:
                assign(TOKENS(step), ranks, method)
            took.append((time.process_time() - start) / len(steps.by_tokens))
        times.append(min(took))
        figures.append(imbalance(loads(steps.by_tokens, ranks, partial(assign, method=method), TOKENS)))
    bounds = [(float(step.sum()) / ranks, lowest_maximum(TOKENS(step), ranks)) for step in steps.by_tokens]
    return Simulated(
        imbalance(loads(steps.by_users, ranks, slices, TOKENS)),
        imbalance(loads(steps.by_users, ranks, paper_rule, TOKENS)),
        figures[0],
        figures[1] if len(methods) > 1 else None,
        100 * statistics.mean((bound - mean) / bound for mean, bound in bounds),
        times,
    )


def number(value: float) -> str:
    """Three digits or whole."""
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}" if value >= 0.01 else "0" if value == 0 else "< 0.01"


def shown(cap: int | None) -> str:
    """A cap in words."""
    return "none" if cap is None else str(cap)


HEADER = ["tokens", "batch", "ranks", "difference", "rule", "ours", "KK", "longest wait", "rule", "ours", "mean wait", "rule"]
HEADER += ["ours", "no plan below", "planning, ms", "KK"]


def simulated_row(cap: int | None, batch: int, ranks: int, found: Simulated) -> list[str]:
    """Of the table under HEADER."""
    tokens = (found.fixed, found.rule, found.ours)
    cells = [number(each.difference) for each in tokens]
    cells.append("" if found.differencing is None else number(found.differencing.difference))
    cells += [number(value) for value in [*(e.longest_wait for e in tokens), *(e.delay for e in tokens), found.bound]]
    planning = [number(1000 * seconds) for seconds in found.planning]
    return [shown(cap), str(batch), f"{ranks:,}", *cells, *planning, *[""] * (2 - len(planning))]


def add_simulated(
    report: Report, histories: Histories, caps_and_batches: Sequence[tuple[int | None, int]], quick: bool
) -> None:
    """All numbers of ranks: a table, and rows of what is promised."""
    rows = []
    for (cap, batch), ranks in itertools.product(caps_and_batches, RANKS[:2] if quick else RANKS):
        users = batch * ranks
        found = simulate(draw_steps(histories.capped(cap), users, number_of_steps(users, quick)), ranks)
        rows.append(simulated_row(cap, batch, ranks, found))
        where = f"{histories.name}, {'all' if cap is None else f'{cap:,}'} tokens, batch {batch}, {ranks:,} ranks"
        kuairand = (cap, batch) in PAPER_SETTINGS
        promised = ranks == PAPER_RANKS
        if kuairand:
            share = 100 * found.planning[0] / PAPER_STEP
            report.add(f"{where}: planning, of the paper's {1000 * PAPER_STEP:,.0f} ms", share, "%", at_most=1.0)
        if not promised:
            continue
        limit = BEAUTY_DIFFERENCE if histories.name == BEAUTY_NAME else KUAIRAND_DIFFERENCE if kuairand else None
        report.add(
            f"{where}: token difference",
            found.ours.difference,
            "tokens",
            baseline=found.fixed.difference,
            at_most=limit,
        )
        report.add(
            f"{where}: the lightest rank waits",
            found.ours.longest_wait,
            "%",
            baseline=found.fixed.longest_wait,
            at_most=KUAIRAND_WAIT if kuairand else None,
        )
    print(
        f"\n{histories.name}{'' if histories.real else ' (drawn, not real)'}\n\n{markdown_table(HEADER, rows, left=0)}\n",
        flush=True,
    )


def attention_table(histories: Histories, caps_and_batches: Sequence[tuple[int | None, int]], quick: bool) -> str:
    """What balancing tokens and balancing cost leave of the wait where attention costs, at 16 ranks."""
    rows = []
    for cap, batch in caps_and_batches:
        users = batch * PAPER_RANKS
        steps = draw_steps(histories.capped(cap), users, number_of_steps(users, quick))
        ways = [
            loads(steps.by_users, PAPER_RANKS, slices, TOKENS, ATTENTION),
            loads(steps.by_tokens, PAPER_RANKS, assign, TOKENS, ATTENTION),
            loads(steps.by_tokens, PAPER_RANKS, assign, ATTENTION),
        ]
        rows.append([shown(cap), str(batch), *(number(imbalance(way).longest_wait) for way in ways)])
    return markdown_table(["tokens", "batch", "off", "tokens", "attention"], rows, left=0)


def main() -> int:
    """Entry point."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--data", type=Path, default=SHARED_DATA, help="folder of real data (see _lengths.py)")
    parser.add_argument("--no-simulation", action="store_true", help="only what is measured")
    parser.add_argument("--no-measurement", action="store_true", help="only what is simulated")
    arguments = parse_arguments(parser)
    report = Report("balance", arguments.quick)
    if not arguments.no_simulation:
        simulation(report, arguments.data, arguments.quick)
    if not arguments.no_measurement:
        measurement(report, arguments.data, arguments.quick)
    return report.finish(arguments.json)


def simulation(report: Report, data: Path, quick: bool) -> None:
    """The first half."""
    clicks, beauty = kuairand_clicks(data), amazon_beauty(data)
    for histories in (clicks, beauty):
        report.note(f"{histories.name}: {'real lengths' if histories.real else 'lengths drawn, the real ones were not found'}.")
    found = guesses(clicks, CAPS, KUAIRAND_BATCHES, quick)
    likely = sorted(found, key=lambda guess: guess.apart(KUAIRAND_PAPER))[:3]
    likely += sorted(found, key=lambda guess: guess.apart(KUAIRAND_PAPER, True))[:4]
    figures = (KUAIRAND_PAPER.before, KUAIRAND_PAPER.wait_before, KUAIRAND_PAPER.after, KUAIRAND_PAPER.wait_after)
    rows = [["paper", "?", *(number(figure) for figure in figures if figure is not None)], *(guess.row() for guess in likely)]
    header = ["tokens", "batch", "difference", "longest wait", "rule: difference", "longest wait"]
    print("The paper's batch: nearest in all four figures (3), in the first (4)\n")
    print(markdown_table(header, rows, left=0), flush=True)
    batch = min(guesses(beauty, [None], BEAUTY_BATCHES, quick), key=lambda guess: guess.apart(AMAZON_PAPER, True)).batch
    add_simulated(report, clicks, SETTINGS, quick)
    add_simulated(report, beauty, [(None, batch)], quick)
    print(f"Longest wait in cost, {PAPER_RANKS} ranks, by what is balanced (attention of width {WIDTH})\n")
    print(attention_table(clicks, SETTINGS, quick) + "\n", flush=True)


if __name__ == "__main__":
    raise SystemExit(main())
