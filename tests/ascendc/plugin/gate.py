"""`python -m turbogr.npu_build` in an empty cache, once for these sources: the compile gate of tests/test_npu_build.py.

The plugin's test links what was compiled for it here, so that it runs the code that a user's build has.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

from filelock import FileLock  # torch brings it

from tests.ascendc.compile import cache, compiler, compiler_version
from turbogr import cann, npu_build
from turbogr.ops import npu_plugin, toolchain

CHECKOUT = Path(__file__).resolve().parents[3]
COMMAND = [sys.executable, "-m", "turbogr.npu_build"]


@dataclass(frozen=True)
class Gate:
    """What the command did.

    Attributes:
        cache: of the command, XDG_CACHE_HOME; it holds nothing else.
        stdout: what it printed.
    """

    cache: Path
    stdout: str


def environment(cache: Path) -> dict[str, str]:
    """For the command: without CANN."""
    kept = {name: value for name, value in os.environ.items() if name not in cann.VARIABLES}
    return {**kept, "PYTHONPATH": str(CHECKOUT), "XDG_CACHE_HOME": str(cache), "CXX": compiler()[0]}


def passed() -> Gate | None:
    """The command's result, run if it was not yet; None where torch_npu's wheel cannot be had."""
    folder = _folder("gate")
    told = folder / "stdout.txt"  # written last
    with FileLock(f"{folder}.lock"):
        if not told.is_file():
            shutil.rmtree(folder, ignore_errors=True)
            run = subprocess.run(
                COMMAND, capture_output=True, text=True, env=environment(folder / "cache"), check=False, cwd="/"
            )
            if f"No matching distribution found for torch-npu=={npu_plugin.TORCH_NPU}" in run.stderr:
                return None
            assert run.returncode == 0, run.stdout + run.stderr
            told.write_text(run.stdout)
    return Gate(folder / "cache", told.read_text())


def objects() -> list[Path]:
    """The plugin's objects but the one for torch_npu: the gate's, or compiled here where there is no wheel for a gate."""
    wanted = [x for x in npu_build.sources() if x.name != npu_build.OF_TORCH_NPU]
    found = passed()
    if found is None:
        folder = _folder("objects")
        with FileLock(f"{folder}.lock"):
            return npu_build.compile_sources(wanted, folder, torch_npu=None)
    made = sorted(found.cache.glob("turbogr/npu/*/objects/*.o"))
    by_source = {x.stem.rpartition("-")[0]: x for x in made}
    assert len(made) == len(by_source) == len(wanted) + 1
    return [by_source[x.stem] for x in wanted]


def _folder(kind: str) -> Path:
    """For what is compiled of these sources, by these commands, with this compiler."""
    digest = hashlib.sha256(npu_plugin.libraries().plugin.parent.name.encode())  # sources and releases
    digest.update("\0".join([*COMMAND, *compiler(), compiler_version()]).encode())
    for module in (cann, npu_build, npu_plugin, toolchain):
        digest.update(Path(str(module.__file__)).read_bytes() + b"\0")
    return cache() / f"{kind}-{digest.hexdigest()[:32]}"
