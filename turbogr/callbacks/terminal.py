"""How callbacks speak in the terminal at the end of a run."""

from __future__ import annotations

from pathlib import Path

from rich.console import Console
from rich.table import Table
from rich.text import Text


def print_table(title: str, table: Table, *lines: str) -> None:
    """Prints a table under its title, and lines after it, of which none is broken in a log file."""
    console = Console()
    if not console.is_terminal:
        console = Console(width=160)  # in a log file no path shall be broken at column 80
    # Not the table's own title and caption, which would be folded to its width.
    console.print(Text(title, style="bold"), soft_wrap=True)
    console.print(table)
    for line in lines:
        console.print(Text(line), soft_wrap=True)


def shown(path: Path) -> str:
    """A path as a person reads it: relative where it lies below the working directory."""
    path = path.resolve()
    here = Path.cwd().resolve()
    return str(path.relative_to(here)) if path.is_relative_to(here) else str(path)
