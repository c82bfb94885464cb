"""What every benchmark script shares: two options, a table of claims with their baselines, and a JSON file.

A script builds a parser, lets [parse_arguments][] add ``--json`` and ``--quick``, measures, adds one row a claim to a
[Report][] and ends with ``raise SystemExit(report.finish(arguments.json))``.
"""

import argparse
import datetime
import json
import os
import platform
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.table import Table

import turbogr
from turbogr.files import replace_file


@dataclass(frozen=True)
class Row:
    """One claim.

    Attributes:
        claim: What was measured, e.g. ``"prepare, 20M rows: peak memory"``.
        value: Our number, in ``unit``.
        unit: Unit of ``value`` and ``baseline``, e.g. ``"GiB"``.
        baseline: The same quantity of the alternative, measured in the same run; None where there is none.
        target: What the claim promises, as text (``"≤ 4"``); None for a number that is only reported.
        holds: Whether the promise is kept; None where nothing is promised or where this run cannot tell.
    """

    claim: str
    value: float
    unit: str
    baseline: float | None = None
    target: str | None = None
    holds: bool | None = None


@dataclass
class Report:
    """Collects the rows of one benchmark, prints them and writes them as JSON.

    Attributes:
        name: Name of the benchmark, e.g. ``"prepare"``.
        quick: Whether this is a shortened run (``--quick``): said in the title and in the JSON file.
        rows: The claims so far.
        notes: Sentences printed below the table (how it was measured, what differs from the full run).
    """

    name: str
    quick: bool = False
    rows: list[Row] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    def add(
        self,
        claim: str,
        value: float,
        unit: str,
        *,
        baseline: float | None = None,
        at_most: float | None = None,
        at_least: float | None = None,
    ) -> Row:
        """Add one claim; ``at_most`` or ``at_least`` (not both) is the promise, in ``unit``.

        A value that is not a number never keeps a promise.

        Raises:
            ValueError: If both bounds are given.
        """
        if at_most is not None and at_least is not None:
            raise ValueError(f"claim {claim!r}: give at_most or at_least, not both")
        target, holds = None, None
        if at_most is not None:
            target, holds = f"≤ {_number(at_most)}", bool(value <= at_most)
        if at_least is not None:
            target, holds = f"≥ {_number(at_least)}", bool(value >= at_least)
        row = Row(claim, float(value), unit, None if baseline is None else float(baseline), target, holds)
        self.rows.append(row)
        return row

    def note(self, sentence: str) -> None:
        """Add a sentence to print below the table and to store in the JSON file."""
        self.notes.append(sentence)

    def print(self, console: Console | None = None) -> None:
        """Print the table and the notes."""
        console = console or Console()
        table = Table(title=f"{self.name}{' (quick)' if self.quick else ''}", title_justify="left")
        table.add_column("claim", overflow="fold")
        for column in ("value", "baseline", "target"):
            table.add_column(column, justify="right", no_wrap=True)
        table.add_column("unit")
        table.add_column("holds")
        verdict = {None: "", True: "[green]yes[/]", False: "[bold red]no[/]"}
        for row in self.rows:
            baseline = "" if row.baseline is None else _number(row.baseline)
            table.add_row(escape(row.claim), _number(row.value), baseline, row.target or "", row.unit, verdict[row.holds])
        console.print(table)
        for sentence in self.notes:
            console.print(sentence, style="dim", highlight=False, markup=False)

    def as_dict(self) -> dict[str, Any]:
        """What is written as JSON: the rows with the versions and the machine that they were measured on."""
        return {
            "benchmark": self.name,
            "quick": self.quick,
            "measured": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
            "turbogr": turbogr.__version__,
            "machine": {"platform": platform.platform(), "python": platform.python_version(), "cpus": os.cpu_count()},
            "rows": [asdict(row) for row in self.rows],
            "notes": self.notes,
        }

    def write(self, path: Path) -> None:
        """Write the JSON file under a temporary name in the same folder, then rename it."""
        path.parent.mkdir(parents=True, exist_ok=True)
        text = json.dumps(self.as_dict(), indent=2, ensure_ascii=False, allow_nan=False) + "\n"
        replace_file(path, lambda file: file.write_text(text, encoding="utf-8"))

    def finish(self, json_path: Path | None) -> int:
        """Print the report, write it to ``json_path`` if given and return the exit status: 1 if a promise is broken.

        A benchmark that measured nothing is an error, too.
        """
        self.print()
        if json_path is not None:
            self.write(json_path)
            Console().print(f"written to {json_path}", highlight=False, markup=False, soft_wrap=True)
        return 1 if not self.rows or any(row.holds is False for row in self.rows) else 0


def parse_arguments(parser: argparse.ArgumentParser, arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """Add ``--json PATH`` and ``--quick`` to a parser and parse.

    Returns:
        The parser's own options, ``json`` (Path or None) and ``quick`` (bool).
    """
    parser.add_argument("--json", type=Path, metavar="PATH", help="also write the table to this file")
    parser.add_argument("--quick", action="store_true", help="a shortened run, at most a minute on two cores")
    return parser.parse_args(arguments)


def _number(value: float) -> str:
    """Four significant digits, thousands separated, no exponent for everyday sizes."""
    if value != value or value in (float("inf"), float("-inf")):
        return str(value)
    if value == 0 or 1e-3 <= abs(value) < 1e15:
        if abs(value) >= 1000 or value == int(value):
            return f"{value:,.0f}"
        return f"{value:.4g}"
    return f"{value:.3e}"
