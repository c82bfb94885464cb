"""Drivers: they run the unmodified kernels on the stand-in of tests/ascendc_host, and are called from Python.

A driver is a C++ file in this folder that includes `host/driver.h` and tiling headers, and exposes functions of the form
`extern "C" void name(..., host::Outcome* outcome)`. Kernels are compiled by themselves, once for drivers and the plugin's test
(compile.py); a driver declares those that it calls (kernels.h) and is linked with them.
"""

from __future__ import annotations

import ctypes
import functools
from dataclasses import dataclass, fields
from pathlib import Path

from torch import Tensor

from tests.ascendc.compile import FLAGS, all_compiled, launchers, linked

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
def driver(name: str, *kernels: str) -> Driver:
    """The driver `tests/ascendc/<name>.cpp` with kernels of these names, compiled at first use; skips where no g++ can."""
    sources = [Path(__file__).with_name(f"{name}.cpp"), *(x for x in launchers() if x.stem in kernels)]
    assert len(sources) == 1 + len(kernels), f"{name} names kernels that there are not: {kernels}"
    objects = all_compiled([(source, FLAGS) for source in sources])
    return Driver(linked(f"{name}.so", objects))
