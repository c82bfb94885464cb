"""Compiles for the stand-in of tests/ascendc_host: each source once, for all tests and all of their processes.

Objects and libraries are kept beside the cache of turbogr's own kernels. Their names are digests of what went into them, and a
lock for each lets the second process wait for the first instead of compiling the same.
"""

from __future__ import annotations

import functools
import hashlib
import os
import re
import shutil
import subprocess
import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from filelock import FileLock  # torch brings it

from turbogr.ops.toolchain import cache_dir
from turbogr.resources import kernels_dir

HERE = Path(__file__).parent
HOST = HERE.parent / "ascendc_host"

# Of all sources, so that they can be linked with each other. -O1: most kernels run for milliseconds, and compile for seconds.
# Products and sums are not fused, so that results are the same on every machine.
COMMON = ("-std=c++20", "-O1", "-fPIC", "-pthread", "-Wall", "-Wextra")
# Of kernels and drivers.
FLAGS = (
    "-ffp-contract=off",
    "-march=native",
    "-fno-gnu-unique",
    f"-I{HERE / 'plugin'}",  # launcher.h
    f"-I{HOST}",
    f"-I{kernels_dir() / 'ascendc'}",
)
OLDEST_GCC = 12


def cache() -> Path:
    """The folder of what is compiled; it can be removed at any time."""
    folder = cache_dir().parent / "ascendc_host"
    folder.mkdir(parents=True, exist_ok=True)
    return folder


def launchers() -> list[Path]:
    """The kernels as the plugin's library has them, one source each."""
    return sorted((kernels_dir() / "ascendc" / "launch").glob("*.cpp"))


def all_compiled(sources: Sequence[tuple[Path, Sequence[str]]]) -> list[Path]:
    """The objects of sources, given with their flags; some at a time."""
    with ThreadPoolExecutor(len(os.sched_getaffinity(0))) as pool:
        return list(pool.map(lambda x: compiled(*x), sources))


def compiled(source: Path, flags: Sequence[str]) -> Path:
    """The object of a source, from the cache if nothing that it includes has changed; system headers go by torch's release."""
    command = [*compiler(), *COMMON, *flags, "-c", str(source)]
    digest = hashlib.sha256("\0".join([*command, compiler_version(), _processor(), torch.__version__]).encode())
    rule = cache() / f"{source.stem}-{digest.hexdigest()[:16]}.d"
    with FileLock(rule.with_suffix(".lock")):
        if rule.is_file() and _object(rule).is_file():
            return _object(rule)
        with tempfile.TemporaryDirectory(dir=cache(), prefix=".building-") as building:
            output, dependencies, began = Path(building) / "made.o", Path(building) / "made.d", time.time()
            _run([*command, "-MMD", "-MF", str(dependencies), "-o", str(output)])
            # An object bears the name of its sources as they are now.
            edited = [file for file in _files(dependencies) if file.stat().st_mtime > began]
            assert not edited, f"{', '.join(map(str, edited))}: saved while it was compiled; run the tests again"
            dependencies.replace(rule)
            return output.replace(_object(rule))


def _object(rule: Path) -> Path:
    """Where the object of the files that a make rule names belongs."""
    digest = hashlib.sha256()
    for file in _files(rule):
        digest.update(file.read_bytes() if file.is_file() else b"gone")
        digest.update(b"\0")
    return rule.with_name(f"{rule.stem}-{digest.hexdigest()[:32]}.o")


def _files(rule: Path) -> list[Path]:
    """What a make rule names."""
    return [Path(name) for name in rule.read_text().replace("\\\n", " ").split(":", 1)[1].split()]


def linked(name: str, objects: Sequence[Path], libraries: Sequence[str] = (), folder: Path | None = None) -> Path:
    """The library of objects, whose names tell what they were made of; a folder given is named by that itself."""
    command = [*compiler(), *COMMON, "-shared", *map(str, objects), *libraries]
    if folder is None:
        folder = cache() / hashlib.sha256("\0".join([*command, compiler_version()]).encode()).hexdigest()[:32]
    folder.mkdir(parents=True, exist_ok=True)
    library = folder / name
    with FileLock(folder / f"{name}.lock"):
        if not library.is_file():
            with tempfile.TemporaryDirectory(dir=folder, prefix=".building-") as building:
                made = Path(building) / name
                _run([*command, "-o", str(made)])
                made.replace(library)
    return library


def _run(command: list[str]) -> None:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, f"{' '.join(command)} fails:\n{done.stderr[-6000:]}"
    assert not done.stderr, f"{' '.join(command)} warns:\n{done.stderr[-6000:]}"


@functools.cache
def compiler() -> tuple[str, ...]:
    """The command of g++; skips where there is none that knows C++20 and _Float16."""
    path = shutil.which("g++")
    if path is None:
        pytest.skip("no g++ on the path")
    version = re.match(r"\d+", compiler_version())
    if version is None or int(version[0]) < OLDEST_GCC:
        pytest.skip(f"the stand-in for AscendC needs g++ {OLDEST_GCC}, this is {compiler_version()}")
    return (path,)


@functools.cache
def compiler_version() -> str:
    """Of g++."""
    return subprocess.run(["g++", "-dumpfullversion"], capture_output=True, text=True, check=True).stdout.strip()


@functools.cache
def _processor() -> str:
    """What `-march=native` means here."""
    return subprocess.run(["g++", "-march=native", "-Q", "--help=target"], capture_output=True, text=True, check=True).stdout
