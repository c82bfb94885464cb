"""Files that are complete or not there."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any


def replace_file(path: Path, write: Callable[[Path], Any]) -> None:
    """Writes a file under a temporary name and renames it.

    Args:
        path: the file.
        write: called with the temporary path.
    """
    temporary = path.with_name(f".{path.name}.partial")
    try:
        write(temporary)
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)
