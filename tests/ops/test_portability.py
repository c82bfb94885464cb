"""One source for all machines: every kernel compiles without a warning, and is right with wide vectors and with narrow ones."""

from __future__ import annotations

import json
import os
import platform
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.ops.parity import CASES
from turbogr.resources import kernels_dir

CHECKOUT = Path(__file__).resolve().parents[2]

# GCC 12 takes the undefined lanes of its own AVX-512 intrinsics for variables that somebody forgot to set; the narrower builds
# of the same sources still look for those.
WARNINGS = "-Wall -Wextra -Werror"

COMPILERS = {
    "native": f"g++ {WARNINGS} -Wno-uninitialized -Wno-maybe-uninitialized",
    "AVX2": f"g++ -mno-avx512f {WARNINGS}",
    "SSE2": f"g++ -march=x86-64 {WARNINGS}",
    "clang": f"clang++ {WARNINGS}",
}


@pytest.mark.slow
@pytest.mark.parametrize("command", COMPILERS.values(), ids=COMPILERS.keys())
def test_every_kernel_is_right(tmp_path, command):
    program, *flags = command.split()
    if shutil.which(program) is None:
        pytest.skip(f"no {program} on the path")
    if flags[0].startswith("-m") and platform.machine() != "x86_64":
        pytest.skip("an instruction set of x86-64")
    environment = {
        **os.environ,
        "CXX": command,
        "XDG_CACHE_HOME": str(tmp_path),
        "PYTHONPATH": str(CHECKOUT),
        "OMP_NUM_THREADS": "2",
    }
    run = subprocess.run(
        [sys.executable, "-m", "tests.ops.parity"], capture_output=True, text=True, check=False, cwd=tmp_path, env=environment
    )
    if "omp" in run.stderr and program == "clang++":
        pytest.skip("clang came without OpenMP")
    assert run.returncode == 0, run.stderr[-3000:]
    errors = json.loads(run.stdout)
    assert errors.keys() == CASES.keys()
    assert max(errors.values()) < 1e-5, errors


def test_every_kernel_has_a_case():
    assert CASES.keys() == {source.stem for source in (kernels_dir() / "cpu").glob("*.cpp")}
