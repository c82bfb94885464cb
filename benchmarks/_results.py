"""Rows of finished runs, kept from one call to the next, and the sections of a page that are written from them."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from turbogr.files import replace_file

CHECKOUT = Path(__file__).resolve().parents[1]
RESULTS = CHECKOUT / "docs" / "results"
PAGE = CHECKOUT / "docs" / "results.md"
SHARED_DATA = CHECKOUT.parent / "shared" / "data"
"""Real data beside the project, where there is some."""


def read_rows(path: Path) -> list[dict[str, Any]]:
    """One JSON object a line; nothing if there is no such file."""
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()] if path.is_file() else []


def add_row(path: Path, row: dict[str, Any]) -> None:
    """Adds a line to a file of rows."""
    text = "".join(json.dumps(each, ensure_ascii=False, allow_nan=False) + "\n" for each in [*read_rows(path), row])
    path.parent.mkdir(parents=True, exist_ok=True)
    replace_file(path, lambda file: file.write_text(text, encoding="utf-8"))


def markdown_table(header: Sequence[str], rows: Iterable[Sequence[str]], left: int = 1) -> str:
    """A table of Markdown; the first `left` columns are aligned left, the others right."""
    lines = [header, ["---"] * left + ["---:"] * (len(header) - left), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def with_section(page: str, name: str, text: str) -> str:
    """The page with this text between its lines `<!-- name -->` and `<!-- end of name -->`.

    Raises:
        ValueError: if the page has not exactly one of each.
    """
    begin, end = f"<!-- {name} -->\n", f"<!-- end of {name} -->"
    if page.count(begin) != 1 or page.count(end) != 1:
        raise ValueError(f"the page needs one line {begin.strip()!r} and one line {end!r}")
    before, rest = page.split(begin)
    return f"{before}{begin}{text.strip()}\n{end}{rest.split(end)[1]}"


def write_section(page: Path, name: str, text: str) -> None:
    """Replaces a section of a page and says so."""
    new = with_section(page.read_text(encoding="utf-8"), name, text)
    replace_file(page, lambda file: file.write_text(new, encoding="utf-8"))
    print(f"section {name!r} written to {page}")
