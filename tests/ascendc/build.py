"""Compiles a driver with the unmodified kernels on the stand-in of tests/ascendc_host, and calls it.

A driver is a C++ file in this folder that includes `host/driver.h`, kernels and tiling headers, and exposes functions of the
form `extern "C" void name(..., host::Outcome* outcome)`. Compiled drivers are kept beside the cache of turbogr's own kernels,
named by what went into them.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import re
import shutil
import subprocess
import tempfile
from dataclasses import dataclass, fields
from pathlib import Path

import pytest
from torch import Tensor

from turbogr.ops.toolchain import cache_dir
from turbogr.resources import kernels_dir

HOST = Path(__file__).resolve().parents[1] / "ascendc_host"

# Products and sums are not fused, so that results are the same on every machine.
FLAGS = (
    "-std=c++20",
    "-O2",
    "-fvect-cost-model=dynamic",
    "-ffp-contract=off",
    "-march=native",
    "-fno-gnu-unique",
    "-Wall",
    "-Wextra",
)
LIBRARY = ("-fPIC", "-shared", "-pthread")
OLDEST_GCC = 12


Argument = Tensor | ctypes.Structure | int | float | bytes | None


class StandInError(Exception):
    """What a guard of the stand-in threw: core, operation, line of the kernel, and what is wrong."""


@dataclass(frozen=True)
class Counters:
    """What a launch moved and calculated, summed over all cores; see tests/ascendc_host/host/counters.h for each."""

    bytes_global_to_local: int
    bytes_local_to_global: int
    bytes_local_to_local: int
    copies: int
    bytes_matmul_operands: int
    bytes_matmul_results: int
    matmuls: int
    cube_multiply_adds: int
    vector_arithmetic: int
    vector_functions: int
    vector_casts: int
    vector_reductions: int
    vector_selections: int
    vector_gathers: int
    vector_fills: int
    vector_calls: int
    scalar_local_reads: int
    scalar_local_writes: int
    scalar_global_reads: int
    scalar_global_writes: int
    atomic_elements: int
    events: int
    barriers: int
    peak_local_bytes: int

    @property
    def bytes_global(self) -> int:
        """Bytes to and from global memory, by copies and products."""
        copied = self.bytes_global_to_local + self.bytes_local_to_global
        return copied + self.bytes_matmul_operands + self.bytes_matmul_results

    @property
    def vector_elements(self) -> int:
        return sum(getattr(self, x.name) for x in fields(self) if x.name.startswith("vector_") and x.name != "vector_calls")

    @property
    def scalar_operations(self) -> int:
        """Elements that the scalar unit read or wrote, one at a time."""
        return sum(getattr(self, x.name) for x in fields(self) if x.name.startswith("scalar_"))


class _Outcome(ctypes.Structure):
    _fields_ = [*((x.name, ctypes.c_int64) for x in fields(Counters)), ("error", ctypes.c_char * 1024)]


class Driver:
    """A compiled driver."""

    def __init__(self, library: Path) -> None:
        self._library = ctypes.CDLL(str(library))
        self._library.host_counter_names.restype = ctypes.c_char_p
        names = self._library.host_counter_names().decode().split()
        assert names == [x.name for x in fields(Counters)], "tests/ascendc/build.py and host/counters.h differ"

    def call(self, function: str, *arguments: Argument) -> Counters:
        """Calls `function`; the outcome comes last.

        Tensors and structures go as pointers (None is null), bytes as `const char*`, int as int64_t and float as double.

        Raises:
            StandInError: what a guard threw.
            ValueError: if a tensor is not contiguous or not on the CPU.
        """
        outcome = _Outcome()
        entry = getattr(self._library, function)
        entry.restype = None
        entry(*map(_as_c, arguments), ctypes.byref(outcome))
        if outcome.error:
            raise StandInError(outcome.error.decode())
        return Counters(**{x.name: getattr(outcome, x.name) for x in fields(Counters)})

    def function(self, name: str, result: type = ctypes.c_int64):
        """A function that is no launch, such as one of a tiling, as ctypes knows it; call it with `arguments`."""
        entry = getattr(self._library, name)
        entry.restype = result
        return lambda *arguments: entry(*map(_as_c, arguments))


def _as_c(x: Argument) -> object:
    if isinstance(x, Tensor):
        if x.device.type != "cpu" or not x.is_contiguous():
            raise ValueError(f"a driver takes contiguous CPU tensors, not {x.device}, strides {x.stride()}")
        # An empty tensor has no memory of its own that could be registered.
        return ctypes.c_void_p(x.detach().data_ptr() or None)
    if isinstance(x, bool | int):
        return ctypes.c_int64(x)
    if isinstance(x, float):
        return ctypes.c_double(x)
    if isinstance(x, ctypes.Structure):
        return ctypes.byref(x)
    return ctypes.c_char_p(x) if isinstance(x, bytes) else ctypes.c_void_p(x)


@functools.cache
def driver(name: str) -> Driver:
    """The driver `tests/ascendc/<name>.cpp`, compiled at first use; skips where there is no g++ that can."""
    return Driver(compiled(Path(__file__).with_name(f"{name}.cpp")))


def compiled(source: Path) -> Path:
    """The shared library of a driver, from the cache if nothing that it includes has changed."""
    command = [*compiler(), *FLAGS, *LIBRARY, f"-I{HOST}", f"-I{kernels_dir() / 'ascendc'}", str(source)]
    folder = cache_dir().parent / "ascendc_host"
    digest = hashlib.sha256("\0".join([*command, _version(), _processor()]).encode())
    included = folder / f"{source.stem}-{digest.hexdigest()[:16]}.d"
    if included.is_file():
        library = _library(included)
        if library.is_file():
            return library
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder, prefix=".building-") as building:
        output, dependencies = Path(building) / "library.so", Path(building) / "library.d"
        arguments = [*command, "-MMD", "-MF", str(dependencies), "-o", str(output)]
        done = subprocess.run(arguments, capture_output=True, text=True, check=False)
        assert done.returncode == 0, f"{source.name} does not compile:\n{done.stderr[-6000:]}"
        assert not done.stderr, f"{source.name} compiles with warnings:\n{done.stderr[-6000:]}"
        dependencies.replace(included)
        return output.replace(_library(included))


def _library(included: Path) -> Path:
    """Where the library of the files that a make rule names belongs."""
    digest = hashlib.sha256()
    for name in included.read_text().replace("\\\n", " ").split(":", 1)[1].split():
        digest.update(Path(name).read_bytes() if Path(name).is_file() else b"gone")
        digest.update(b"\0")
    return included.with_name(f"{included.stem}-{digest.hexdigest()[:32]}.so")


@functools.cache
def compiler() -> tuple[str, ...]:
    """The command of g++; skips where there is none that knows C++20 and _Float16."""
    path = shutil.which("g++")
    if path is None:
        pytest.skip("no g++ on the path")
    version = re.match(r"\d+", _version())
    if version is None or int(version[0]) < OLDEST_GCC:
        pytest.skip(f"the stand-in for AscendC needs g++ {OLDEST_GCC}, this is {_version()}")
    return (path,)


@functools.cache
def _version() -> str:
    return subprocess.run(["g++", "-dumpfullversion"], capture_output=True, text=True, check=True).stdout.strip()


@functools.cache
def _processor() -> str:
    """What `-march=native` means here."""
    return subprocess.run(["g++", "-march=native", "-Q", "--help=target"], capture_output=True, text=True, check=True).stdout
