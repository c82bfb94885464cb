"""Runs a kernel's driver under AddressSanitizer and UndefinedBehaviorSanitizer.

A driver is a C++ program in this folder that includes the kernel's header, runs awkward shapes on heap buffers of exact size,
prints "checked <n> problems" and returns 0; memory that is not given back fails it, too. Given an argument, it makes one buffer
too short: the negative control.
"""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest

from turbogr.resources import kernels_dir

FLAGS = ("-std=c++17", "-O1", "-g", "-march=native", "-fopenmp", "-fsanitize=address,undefined", "-fno-sanitize-recover=all")

NO_LEAKS_HERE = "LeakSanitizer has encountered a fatal error"
"""What it says where it may not look into processes: under a debugger, in some containers."""


def assert_clean(kernel: str, driver: str, folder: Path) -> None:
    """Compiles `tests/ops/<driver>` with `kernels/cpu/<kernel>.cpp` into `folder`, and runs it both ways."""
    source = kernels_dir() / "cpu" / f"{kernel}.cpp"
    program = built([source, Path(__file__).with_name(driver)], folder)
    done = run([program])
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stdout.startswith("checked ")
    damaged = run([program, "short"])
    assert damaged.returncode != 0, "negative control: a buffer that is too short is noticed"
    assert "heap-buffer-overflow" in damaged.stderr


def built(sources: list[Path], folder: Path) -> Path:
    """The program of these sources, which include headers beside the first one, with both sanitizers."""
    if shutil.which("g++") is None:
        pytest.skip("no g++ on the path")
    program = folder / "driver"
    build = run(["g++", *FLAGS, f"-I{sources[0].parent}", *sources, "-o", program])
    if "cannot find -l" in build.stderr or "libasan" in build.stderr:
        pytest.skip("the compiler came without its sanitizers")
    assert build.returncode == 0, build.stderr
    return program


def run(command: list[str | Path]) -> subprocess.CompletedProcess[str]:
    """The command's end, with two threads, and without the search for leaks where the system forbids that."""
    environment = {**os.environ, "OMP_NUM_THREADS": "2"}
    done = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
    if NO_LEAKS_HERE in done.stderr:
        environment["ASAN_OPTIONS"] = "detect_leaks=0"
        done = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
    return done
