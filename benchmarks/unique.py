"""Distinct ids of a million: the C++ kernel and the fallback without a compiler over torch.unique(return_inverse=True).

Ids follow a Zipf law over a shuffled catalogue, or are uniform. All sides must agree before anything is timed. Calls are
interleaved and a ratio is the median over the rounds; with one thread, process time is counted. With segments (the positions of
every id, which a sum over equal ids needs), torch's side is its unique and a stable argsort.

The last row tells whether the interpreter is free while the kernel runs: another Python thread counts, and its steps during a
call are divided by those in the same time while this thread sleeps; it needs a core of its own. The baseline is the same call
with the interpreter's lock held.
"""

from __future__ import annotations

import argparse
import ctypes
import statistics
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import torch
from _report import Report, parse_arguments
from _timing import keep_freed_memory, timed
from torch import Tensor

from turbogr.ops import unique_native
from turbogr.ops.unique import KERNEL, unique_ids, unique_segments

COUNT = 1_000_000


@dataclass(frozen=True)
class Distribution:
    """Ids of [0, rows): a Zipf law with this exponent, uniform for 0."""

    name: str
    rows: int
    exponent: float

    def draw(self) -> Tensor:
        """int64 [COUNT]."""
        g = torch.Generator().manual_seed(0)
        if not self.exponent:
            return torch.randint(0, self.rows, (COUNT,), generator=g)
        law = torch.arange(1, self.rows + 1, dtype=torch.float64).pow(-self.exponent).cumsum(0)
        draws = torch.rand(COUNT, generator=g, dtype=torch.float64) * law[-1]
        return torch.randperm(self.rows, generator=g)[torch.searchsorted(law, draws).clamp(max=self.rows - 1)]


DISTRIBUTIONS = [
    Distribution("Zipf 1.05, 1M rows", 1_000_000, 1.05),
    Distribution("Zipf 1.2, 10M rows", 10_000_000, 1.2),
    Distribution("uniform, 10M rows", 10_000_000, 0.0),
    Distribution("uniform, 10^12 rows", 10**12, 0.0),  # hashed ids: sorted, not marked
]

Side = Callable[[], tuple[Tensor, ...]]


def sides_of(ids: Tensor, rows: int, segments: bool) -> dict[str, Side]:
    """torch.unique, the kernel if there is one, and the fallback."""

    def theirs() -> tuple[Tensor, ...]:
        unique, inverse = torch.unique(ids, return_inverse=True)
        return (unique, inverse, inverse.argsort(stable=True)) if segments else (unique, inverse)

    operator: Callable[..., tuple[Tensor, ...]] = unique_segments if segments else unique_ids
    sides: dict[str, Side] = {"torch.unique": theirs}
    if KERNEL.library() is not None:
        sides["cpp"] = lambda: operator(ids, rows, backend="cpp")
    sides["torch"] = lambda: operator(ids, rows, backend="torch")
    return sides


def measure(report: Report, distribution: Distribution, rounds: int) -> None:
    """Adds the rows of one distribution.

    Raises:
        SystemExit: if two sides disagree.
    """
    ids = distribution.draw()
    for segments in (False, True):
        sides = sides_of(ids, distribution.rows, segments)
        expected, *others = (side() for side in sides.values())
        for other in others:
            if not all(torch.equal(a, b) for a, b in zip(other, expected, strict=False)):
                raise SystemExit(f"{distribution.name}: the sides disagree")
        seconds: dict[str, list[float]] = {name: [] for name in sides}
        for _ in range(rounds):
            for name, side in sides.items():
                seconds[name].append(timed(side))
        what = f"{distribution.name}{', segments' if segments else ''}"
        for name in list(sides)[1:]:
            ratio = statistics.median(b / a for a, b in zip(seconds[name], seconds["torch.unique"], strict=True))
            promised = name == "cpp" and not segments and distribution.rows <= 10_000_000
            report.add(f"{what}: {name} over torch", ratio, "x", baseline=1.0, at_least=1.5 if promised else None)
        times = ", ".join(f"{name} {1e3 * statistics.median(x):.1f} ms" for name, x in seconds.items())
        report.note(f"{what}, {len(expected[0])} distinct: {times}")


class Bystander:
    """Another Python thread, which counts: how much of the time in which a call runs does it get?"""

    def __enter__(self) -> Bystander:
        """Starts counting."""
        self.steps, self.stop = 0, threading.Event()
        self.thread, self.interval = threading.Thread(target=self._count), sys.getswitchinterval()
        # No thread is interrupted: the bystander runs where the caller gives up the lock, and hands it back after each step.
        sys.setswitchinterval(1000)
        self.thread.start()
        self.rate = 1.0
        self.rate = statistics.median(self.share(lambda: time.sleep(0.005)) for _ in range(50))
        return self

    def __exit__(self, *exception: object) -> None:
        """Stops."""
        self.stop.set()
        self.thread.join()
        sys.setswitchinterval(self.interval)

    def _count(self) -> None:
        while not self.stop.is_set():
            self.steps += 1
            time.sleep(0)

    def share(self, call: Callable[[], object]) -> float:
        """Its steps during a call, as a share of what it does in the same time while the caller sleeps."""
        start, before = time.perf_counter(), self.steps
        call()
        return (self.steps - before) / (time.perf_counter() - start) / self.rate


def measure_lock(report: Report, rounds: int) -> None:
    """Adds the row on the interpreter's lock."""
    library = KERNEL.library()
    if library is None:
        return
    distribution = DISTRIBUTIONS[2]
    ids = distribution.draw()
    shares: dict[str, list[float]] = {"released": [], "held": []}
    with Bystander() as bystander:
        for _ in range(rounds):
            for name, kernel in (("released", library), ("held", ctypes.PyDLL(library._name))):
                run, seen = kernel.turbogr_unique, shares[name]
                run.restype = ctypes.c_int64

                def watched(problem: ctypes.Structure, run: Any = run, seen: list[float] = seen) -> int:
                    found: list[int] = []
                    seen.append(bystander.share(lambda: found.append(run(ctypes.byref(problem)))))
                    return found[0]

                unique_native.unique(SimpleNamespace(turbogr_unique=watched), ids, distribution.rows, False)  # type: ignore[arg-type]
    released, held = (statistics.median(x) for x in shares.values())
    report.add("cpp: share of a call in which another Python thread runs", released, "x", baseline=held, at_least=0.5)


def main() -> int:
    """Entry point."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--threads", type=int, default=1, help="threads of PyTorch and of the kernel (default: 1)")
    arguments = parse_arguments(parser)
    torch.set_num_threads(arguments.threads)
    keep_freed_memory()
    report = Report("unique", arguments.quick)
    for distribution in DISTRIBUTIONS:
        measure(report, distribution, 5 if arguments.quick else 15)
    measure_lock(report, 20 if arguments.quick else 100)
    report.note(f"{COUNT} ids, {torch.get_num_threads()} threads, torch {torch.__version__}")
    report.note(f"cpp: {', '.join(KERNEL.choice())}")
    return report.finish(arguments.json)


if __name__ == "__main__":
    raise SystemExit(main())
