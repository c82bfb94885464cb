"""What pipeline.py makes of its turns: rows of the report, and a section of docs/semi-async.md."""

from __future__ import annotations

import os
import statistics
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from operator import attrgetter
from typing import Any

from _report import Report
from _results import CHECKOUT, markdown_table

PAGE = CHECKOUT / "docs" / "semi-async.md"
SERIAL, PLAIN, SPARSE_DIST = "serial", "TorchRec", "TorchRec, SparseDist"
SYNC, SEMI = "ours, sync", "ours, semi-async"
NAMES = {
    SERIAL: "serial: everything waited for where it is begun",
    PLAIN: "TorchRec, no pipeline",
    SPARSE_DIST: "TorchRec, TrainPipelineSparseDist",
    SYNC: "ours, `sync`",
    SEMI: "ours, `semi_async`",
}
EXPOSED = 5.4
"""% of a semi-asynchronous step, at most: the paper's figure on its largest model."""
FASTER = {SPARSE_DIST: 1.3, SERIAL: 1.5}
"""Such a step's speed over that of these, at least."""


@dataclass(frozen=True)
class Turn:
    """Of one side on one rank; seconds of a step, and shares of the turn.

    Attributes:
        wall: from step to step.
        process: of all the rank's threads.
        computing: share of the turn.
        exposed: communication that nothing hides.
        idle: neither.
    """

    wall: float
    process: float
    computing: float
    exposed: float
    idle: float


Turns = dict[str, list[Turn]]
"""Those of each side."""


def of_all_ranks(ranks: list[dict[str, Any]], where: str) -> Turns:
    """Each turn over all ranks: the longest on the wall, the mean of the rest.

    Args:
        ranks: what each has measured.
        where: "link" or "free".
    """
    return {name: together([rank["turns"][where][name] for rank in ranks]) for name in ranks[0]["turns"][where]}


def together(ranks: list[list[Turn]]) -> list[Turn]:
    """The turns of one side."""
    found = []
    for turns in zip(*ranks, strict=True):
        means = {
            key: statistics.mean(getattr(turn, key) for turn in turns) for key in ("process", "computing", "exposed", "idle")
        }
        found.append(Turn(max(turn.wall for turn in turns), **means))
    return found


def median(turns: Iterable[Turn], of: str) -> float:
    """Of an attribute, over the turns."""
    return statistics.median(map(attrgetter(of), turns))


def speed(turns: Turns, slow: str, of: str = "wall") -> float:
    """How many times as fast as that side ours is in mode semi_async: the median of the rounds' ratios."""
    value: Callable[[Turn], float] = attrgetter(of)
    return statistics.median(value(a) / value(b) for a, b in zip(turns[slow], turns[SEMI], strict=True))


def add_rows(report: Report, ranks: list[dict[str, Any]]) -> None:
    """Adds what was measured.

    Nothing is promised of ranks that share cores: they wait for each other's turn to compute. Of the smaller model of a quick
    run no share of exposed communication is promised: what its last gradients need behind the backward pass is more of a step.
    """
    promised = len(ranks) <= (os.cpu_count() or 1)
    behind, free = of_all_ranks(ranks, "link"), of_all_ranks(ranks, "free")
    for slow in (SPARSE_DIST, SERIAL, SYNC, PLAIN):
        if slow in behind:
            floor = FASTER.get(slow) if promised else None
            report.add(f"{SEMI}: speed over {slow}", speed(behind, slow), "x", baseline=1.0, at_least=floor)
    for slow in FASTER if free[SEMI] else ():
        report.add(f"{SEMI}: speed over {slow}, without the link", speed(free, slow), "x", baseline=1.0)
        report.add(f"{SEMI}: the same over {slow} by process time", speed(free, slow, "process"), "x", baseline=1.0)
    for name, turns in behind.items():
        report.add(f"{name}: step", 1e3 * median(turns, "wall"), "ms")
        for share in ("exposed", "computing", "idle"):
            named = "exposed communication" if share == "exposed" else share
            ceiling = EXPOSED if (name, share) == (SEMI, "exposed") and promised and not report.quick else None
            report.add(f"{name}: {named}", 100 * median(turns, share), "% of step", at_most=ceiling)
        report.add(f"{name}: process time of a rank", 1e3 * median(turns, "process"), "ms")
        if free[name]:
            report.add(f"{name}: step without the link", 1e3 * median(free[name], "wall"), "ms")


def section(ranks: list[dict[str, Any]], notes: Iterable[str]) -> str:
    """A table of the sides, how fast semi_async is, and how it was measured, as Markdown."""
    behind, free = of_all_ranks(ranks, "link"), of_all_ranks(ranks, "free")
    shares = ("exposed", "computing", "idle")
    header = ["", "step, ms", *(f"{share}, %" for share in ("exposed communication", *shares[1:]))]
    header += ["process time, ms", "step without the link, ms"]
    rows = []
    for name, turns in behind.items():
        cells = [f"{1e3 * median(turns, 'wall'):.0f}", *(f"{100 * median(turns, share):.1f}" for share in shares)]
        alone = f"{1e3 * median(free[name], 'wall'):.0f}" if free[name] else ""
        rows.append([NAMES[name], *cells, f"{1e3 * median(turns, 'process'):.0f}", alone])
    times = []
    for slow in (SPARSE_DIST, SERIAL, SYNC):
        asked = f" ({FASTER[slow]} asked)" if slow in FASTER else ""
        without = f", without the link {speed(free, slow):.2f}" if free[SEMI] else ""
        times.append(f"- {speed(behind, slow):.2f} times as fast as {NAMES[slow]}{asked}{without};")
    exposed = 100 * median(behind[SEMI], "exposed")
    met = "asked" if exposed <= EXPOSED else "asked, and **not** reached"
    times.append(f"- exposed communication: {exposed:.1f} % ({EXPOSED} {met}).")
    return "\n\n".join(
        [
            markdown_table(header, rows),
            "semi_async, by medians of the rounds' ratios:",
            "\n".join(times),
            "How it was measured:",
            "\n".join(f"- {note}" for note in notes),
        ]
    )
