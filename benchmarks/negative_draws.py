"""Drawing a batch's negatives, each way that the data module knows, against NumPy and PyTorch drawing as many.

The baselines are what a trainer would call without these samplers: `Generator.integers`, `Generator.choice` with
probabilities, `torch.multinomial` (up to its 2^24 items) and `torch.randint` of the batch's positions. They draw from a
generator's state; ours hash (seed, epoch, user, position), so that no worker, rank or interruption changes a draw. Popularity
falls by rank as in Zipf's law, rows in random order.

One thread, process time, calls interleaved: the median of a round's ratios. What is drawn is checked in
tests/data/test_distributions.py.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Callable

import numpy as np
import torch
from _report import Report, parse_arguments
from _timing import keep_freed_memory, timed

from turbogr.data.distributions import InBatchNegatives, NegativeSampling, WeightedNegatives, probabilities
from turbogr.data.negatives import NegativeSampler, UniformNegatives

USERS, TOKENS, NEGATIVES = 32, 256, 128
DRAWS = USERS * TOKENS * NEGATIVES
CATALOGUES = (1_682, 1_000_000, 32_000_000)
MULTINOMIAL_ITEMS = 1 << 24


def measure(report: Report, items: int, rounds: int) -> None:
    """Adds the rows of one catalogue."""
    generator = np.random.default_rng(0)
    counts = (1e7 / np.arange(1, items + 1) ** 1.05).astype(np.int64)[generator.permutation(items)]
    chances = {sampling: of(sampling, counts) for sampling in ("log_uniform", "popularity")}
    samples, lengths = np.arange(USERS), np.full(USERS, TOKENS)
    targets = torch.from_numpy(generator.integers(0, items, USERS * TOKENS))
    build = timed(lambda: WeightedNegatives(chances["popularity"], NEGATIVES, 0))
    samplers: dict[str, NegativeSampler] = {
        "uniform": UniformNegatives(items, NEGATIVES, 0),
        **{sampling: WeightedNegatives(chances[sampling], NEGATIVES, 0) for sampling in chances},
        "in_batch": InBatchNegatives(NEGATIVES, 0),
    }

    def choice(sampling: str) -> object:
        return generator.choice(items, DRAWS, p=chances[sampling])

    def multinomial() -> object:
        return torch.multinomial(weights, DRAWS, replacement=True)

    weights = torch.from_numpy(chances["popularity"])
    baselines: dict[str, tuple[str, Callable[[], object]]] = {
        "uniform": ("Generator.integers", lambda: generator.integers(0, items, DRAWS)),
        "log_uniform": ("Generator.choice", lambda: choice("log_uniform")),
        "popularity": ("torch.multinomial", multinomial),
        "in_batch": ("torch.randint", lambda: targets[torch.randint(USERS * TOKENS, (DRAWS,))]),
    }
    if items >= MULTINOMIAL_ITEMS:
        baselines["popularity"] = ("Generator.choice", lambda: choice("popularity"))
    seconds: dict[str, list[tuple[float, float]]] = {name: [] for name in samplers}
    for epoch in range(rounds + 1):
        for name, sampler in samplers.items():
            ours = timed(lambda sampler=sampler, epoch=epoch: sampler.draw(samples, lengths, epoch, targets))  # type: ignore[misc]
            seconds[name].append((ours, timed(baselines[name][1])))
    for name, pairs in seconds.items():
        title, promised = baselines[name][0], name in chances
        ours, theirs = (1e9 * statistics.median(side) / DRAWS for side in zip(*pairs[1:], strict=True))
        report.add(f"{items:,} items, {name}: a draw ({title})", ours, "ns", baseline=theirs)
        ratio = statistics.median(b / a for a, b in pairs[1:])
        report.add(f"{items:,} items, {name} over {title}", ratio, "x", baseline=1.0, at_least=1.0 if promised else None)
    report.add(f"{items:,} items: making the alias table, once a run", 1e3 * build, "ms")


def of(sampling: NegativeSampling, counts: np.ndarray) -> np.ndarray:
    """The probabilities of a sampling that has some."""
    chances = probabilities(sampling, counts)
    assert chances is not None
    return chances


def main() -> int:
    """Entry point."""
    arguments = parse_arguments(argparse.ArgumentParser(description=__doc__.splitlines()[0]))
    torch.set_num_threads(1)
    keep_freed_memory()
    report = Report("negative draws", arguments.quick)
    for items in CATALOGUES[:2] if arguments.quick else CATALOGUES:
        measure(report, items, 3 if arguments.quick else 7)
    report.note(f"{USERS} users of {TOKENS} tokens, {NEGATIVES} negatives each; one thread, NumPy {np.__version__}")
    return report.finish(arguments.json)


if __name__ == "__main__":
    raise SystemExit(main())
