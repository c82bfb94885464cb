"""C++ kernels: compiled at first use, kept in a cache folder, loaded with ctypes; without a compiler PyTorch takes over.

Nothing is compiled or loaded when this module is imported. The first call of an operator that has a kernel compiles it with
`$CXX`, or g++ if that is not set, into `$XDG_CACHE_HOME/turbogr/kernels/<key>/` (`~/.cache` without XDG_CACHE_HOME). The key
is a digest of the sources, the command, the compiler's version and the processor's instruction sets, because a library that
was built with `-march=native` elsewhere may hold instructions that this machine lacks. A library appears under its name by a
rename: processes that start at once may compile the same thing twice, but never load half of it.
"""

from __future__ import annotations

import ctypes
import hashlib
import logging
import os
import platform
import shlex
import shutil
import subprocess
import tempfile
import threading
from dataclasses import dataclass
from pathlib import Path

# The kernels use OpenMP: with torch's runtime in the process before theirs, both share one pool of threads.
from torch import Tensor

from turbogr.errors import MissingDependencyError
from turbogr.resources import kernels_dir

FLAGS = ("-std=c++17", "-O3", "-march=native", "-fopenmp", "-fPIC", "-shared")

COMPILE_SECONDS = 300
"""A compiler that takes longer is given up; a few seconds are usual."""

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class _Plan:
    """How one kernel is built on this machine.

    Attributes:
        command: the compiler with its flags, without source and output.
        compiler: first line of the compiler's version.
        source: the .cpp file.
        library: where the compiled library belongs.
    """

    command: tuple[str, ...]
    compiler: str
    source: Path
    library: Path


class Kernel:
    """One C++ kernel of `kernels/cpu/`. Whether it can be used is found out once per process, at the first `library()`.

    Args:
        name: the source is `kernels/cpu/<name>.cpp`, which includes headers of that folder only.
    """

    def __init__(self, name: str) -> None:
        self.name = name
        self._lock = threading.Lock()
        self._library: ctypes.CDLL | None = None
        self._failure: str | None = None
        self._choice: tuple[str, str] | None = None

    def library(self) -> ctypes.CDLL | None:
        """The loaded library, compiled first where that is needed; None if it cannot be had (one line in the log says why)."""
        with self._lock:
            if self._choice is None:
                self._choice = self._load()
                if self._library is None:
                    _log.warning("%s: the C++ kernel is not used, PyTorch is: %s", self.name, self._failure)
        return self._library

    def failure(self) -> str | None:
        """Why `library()` gave None; None before the first call and if all went well."""
        return self._failure

    def choice(self) -> tuple[str, str]:
        """("cpp", how it is or will be compiled) or ("torch", why not), without compiling or loading anything."""
        if self._choice is not None:
            return self._choice
        try:
            plan = _plan(self.name)
        except MissingDependencyError as error:
            return "torch", str(error)
        if plan.library.is_file():
            return "cpp", f"compiled: {plan.library}"
        return "cpp", f"will be compiled at first use with {plan.compiler}"

    def _load(self) -> tuple[str, str]:
        try:
            plan = _plan(self.name)
            if not plan.library.is_file():
                _compile(plan)
            self._library = _open(plan.library)
        except MissingDependencyError as error:
            self._failure = str(error)
            return "torch", self._failure
        return "cpp", f"compiled with {plan.compiler}: {plan.library}"


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


def cache_dir() -> Path:
    """The folder of compiled kernels; it can be removed at any time."""
    # The XDG specification asks to ignore a path that is not absolute.
    configured = Path(os.environ.get("XDG_CACHE_HOME", ""))
    return (configured if configured.is_absolute() else Path.home() / ".cache") / "turbogr" / "kernels"


def _plan(name: str) -> _Plan:
    """Raises MissingDependencyError if there is no compiler or no source."""
    command = _compiler()
    version = _run([*command, "--version"])
    folder = kernels_dir() / "cpu"
    source = folder / f"{name}.cpp"
    digest = hashlib.sha256()
    try:
        for file in [source, *sorted(folder.glob("*.h"))]:
            digest.update(f"{file.name}\0".encode() + file.read_bytes() + b"\0")
        library = cache_dir()
    except (OSError, RuntimeError) as error:  # Path.home() raises RuntimeError where there is no home
        raise MissingDependencyError(f"{error}") from error
    digest.update("\0".join([*command, *FLAGS, version, platform.machine(), _instruction_sets()]).encode())
    return _Plan((*command, *FLAGS), version.splitlines()[0], source, library / digest.hexdigest()[:32] / f"{name}.so")


def _compiler() -> list[str]:
    configured = shlex.split(os.environ.get("CXX", ""))
    command = configured or ["g++"]
    path = shutil.which(command[0])
    if path is None:
        where = "CXX names" if configured else "there is no compiler"
        raise MissingDependencyError(f"{where} {command[0]}, which is not on the path; install g++ or set CXX")
    return [path, *command[1:]]


def _instruction_sets() -> str:
    """What this processor can do, in the kernel's words; the processor's name where there is no /proc."""
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.is_file():
        for line in cpuinfo.read_text(encoding="utf-8", errors="replace").splitlines():
            if line.startswith(("flags", "Features")):
                return line
    return platform.processor()


def _compile(plan: _Plan) -> None:
    """Raises MissingDependencyError with the compiler's words if it does not succeed."""
    folder = plan.library.parent
    _log.info("compiling %s with %s, once on this machine", plan.source.name, plan.compiler)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=folder, prefix=".building-") as building:
            output = Path(building) / plan.library.name
            _run([*plan.command, "-o", str(output), str(plan.source)])
            if not output.is_file():
                raise MissingDependencyError(f"{plan.command[0]} succeeded but wrote no {output.name}")
            output.replace(plan.library)
    except OSError as error:
        raise MissingDependencyError(f"{folder} cannot be written: {error}; set XDG_CACHE_HOME to a folder that can") from error


def _run(command: list[str]) -> str:
    try:
        done = subprocess.run(
            command,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=COMPILE_SECONDS,
            check=False,
            stdin=subprocess.DEVNULL,
        )
    except subprocess.TimeoutExpired as error:
        raise MissingDependencyError(f"{command[0]} did not finish within {COMPILE_SECONDS} s") from error
    except OSError as error:
        raise MissingDependencyError(f"{command[0]} cannot be run: {error}") from error
    if done.returncode != 0 or not (done.stdout or "-o" in command):
        lines = [line for line in done.stderr.splitlines() if line.strip()]
        told = next((line for line in lines if "error" in line), lines[0] if lines else "it printed nothing")
        raise MissingDependencyError(f"{command[0]} failed with exit code {done.returncode}: {told.strip()}")
    return done.stdout


def _open(library: Path) -> ctypes.CDLL:
    try:
        return ctypes.CDLL(str(library))
    except OSError as error:
        raise MissingDependencyError(f"{library} cannot be loaded ({error}); remove it to have it compiled again") from error
