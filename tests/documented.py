"""Examples of the documentation as files, and commands that use them."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

CHECKOUT = Path(__file__).resolve().parents[1]
BLOCK = re.compile(r"^```(?:python|cpp|yaml)\n(?:#|//) (\S+)\n.*?^```$", re.MULTILINE | re.DOTALL)


def write_examples(page: str, folder: Path) -> set[str]:
    """Writes the code blocks of a page whose first line names a file; returns those names."""
    names = set()
    for found in BLOCK.finditer((CHECKOUT / "docs" / page).read_text()):
        file = folder / found[1]
        file.parent.mkdir(exist_ok=True)
        file.write_text("\n".join(found[0].splitlines()[1:-1]) + "\n")
        names.add(found[1])
    return names


def turbogr(*args: str, path: Sequence[Path], cwd: str | Path, **environment: str) -> subprocess.CompletedProcess[str]:
    """A command in a process of its own, with these folders on the path of modules."""
    return subprocess.run(
        [sys.executable, "-m", "turbogr", *args],
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(map(str, [*path, CHECKOUT])), **environment},
        check=False,
        cwd=cwd,
    )
