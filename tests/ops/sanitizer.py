"""Runs a kernel's driver under AddressSanitizer and UndefinedBehaviorSanitizer.

A driver is a C++ program in this folder that includes the kernel's header, runs awkward shapes on heap buffers of exact size,
prints "checked <n> problems" and returns 0. Given an argument, it makes one buffer too short: the negative control.
"""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest

from turbogr.resources import kernels_dir

FLAGS = ("-std=c++17", "-O1", "-g", "-march=native", "-fopenmp", "-fsanitize=address,undefined", "-fno-sanitize-recover=all")


def assert_clean(kernel: str, driver: str, folder: Path) -> None:
    """Compiles `tests/ops/<driver>` with `kernels/cpu/<kernel>.cpp` into `folder`, and runs it both ways."""
    if shutil.which("g++") is None:
        pytest.skip("no g++ on the path")
    source = kernels_dir() / "cpu" / f"{kernel}.cpp"
    program = folder / "driver"
    sources = [f"-I{source.parent}", str(source), str(Path(__file__).with_name(driver))]
    build = _run(["g++", *FLAGS, *sources, "-o", str(program)])
    if "cannot find -l" in build.stderr or "libasan" in build.stderr:
        pytest.skip("the compiler came without its sanitizers")
    assert build.returncode == 0, build.stderr
    run = _run([str(program)])
    assert run.returncode == 0, run.stderr[-3000:]
    assert run.stdout.startswith("checked ")
    damaged = _run([str(program), "short"])
    assert damaged.returncode != 0, "negative control: a buffer that is too short is noticed"
    assert "heap-buffer-overflow" in damaged.stderr


def _run(command: list[str]) -> subprocess.CompletedProcess[str]:
    # The runtimes of OpenMP keep their threads' memory until the end: that is no leak of ours.
    environment = {**os.environ, "ASAN_OPTIONS": "detect_leaks=0", "OMP_NUM_THREADS": "2"}
    return subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
