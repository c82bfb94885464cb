"""C++ kernels: compiled at first use, kept in a cache folder, loaded with ctypes; where that fails, PyTorch takes over.

Nothing is compiled or loaded when this module is imported: the first call of an operator that has a kernel does it, once per
process (`turbogr.ops.toolchain` tells how). What goes wrong costs one line in the log, however many kernels it concerns;
`turbogr doctor` shows it for each operator.
"""

from __future__ import annotations

import ctypes
import logging
import threading
from pathlib import Path

# The kernels use OpenMP: with torch's runtime in the process before theirs, both share one pool of threads.
from torch import Tensor

from turbogr.errors import MissingDependencyError
from turbogr.ops import toolchain
from turbogr.resources import kernels_dir

_log = logging.getLogger(__name__)


class Kernel:
    """One C++ kernel. Whether it can be used is found out once per process, at the first `library()`.

    Args:
        name: the source is `<folder>/<name>.cpp`, which includes headers of that folder only.
        folder: where the source lies; None for this package's `kernels/cpu`.
    """

    def __init__(self, name: str, folder: Path | None = None) -> None:
        self.name, self.folder = name, folder
        self._lock = threading.Lock()
        self._library: ctypes.CDLL | None = None
        self._failure: str | None = None
        self._choice: tuple[str, str] | None = None

    def library(self) -> ctypes.CDLL | None:
        """The loaded library, compiled first where that is needed; None if it cannot be had (the log says why)."""
        with self._lock:
            if self._choice is None:
                self._choice = self._load()
        return self._library

    def failure(self) -> str | None:
        """Why `library()` gave None; None before the first call and if all went well."""
        return self._failure

    def choice(self) -> tuple[str, str]:
        """("cpp", how it is or will be compiled) or ("torch", why not), without compiling or loading anything."""
        if self._choice is not None:
            return self._choice
        try:
            plan = self._plan()
        except MissingDependencyError as error:
            return "torch", str(error)
        if plan.library() is not None:
            return "cpp", f"compiled with {plan.compiler}"
        return "cpp", f"will be compiled at first use with {plan.compiler}"

    def _plan(self) -> toolchain.Plan:
        folder = kernels_dir() / "cpu" if self.folder is None else self.folder
        return toolchain.plan(folder / f"{self.name}.cpp")

    def _load(self) -> tuple[str, str]:
        try:
            plan = self._plan()
            self._library = _open(plan.library() or plan.build())
        except MissingDependencyError as error:
            self._failure = str(error)
            _tell(self.name, self._failure)
            return "torch", self._failure
        return "cpp", f"compiled with {plan.compiler}"


_told: set[str] = set()
_telling = threading.Lock()


def _tell(kernel: str, failure: str) -> None:
    """One line a cause: what keeps one kernel from being used, keeps all of them."""
    with _telling:
        if failure not in _told:
            _told.add(failure)
            _log.warning(
                "%s runs in PyTorch, not in C++: %s (said once; `turbogr doctor` tells it for every operator)", kernel, failure
            )


def _open(library: Path) -> ctypes.CDLL:
    try:
        return ctypes.CDLL(str(library))
    except OSError as error:
        # Without the library's path, which would make a cause that is common to all kernels look like many.
        told = str(error).removeprefix(f"{library}: ")
        raise MissingDependencyError(f"libraries compiled into {toolchain.cache_dir()} cannot be loaded: {told}") from error


def rows(x: Tensor) -> Tensor:
    """`x` itself where its last axis is contiguous, else a contiguous copy: kernels read rows at any stride."""
    return x if x.stride(-1) == 1 else x.contiguous()


def pointer(x: Tensor | None) -> int | None:
    """Address of the first element, for a field or an argument of type `c_void_p`; null for None."""
    return None if x is None else x.data_ptr()


def check(code: int, operator: str) -> None:
    """Raises MemoryError, which names `operator`, if a kernel returned anything but 0: there was no memory for its scratch."""
    if code:
        raise MemoryError(f"{operator}: no memory for the threads' scratch")
