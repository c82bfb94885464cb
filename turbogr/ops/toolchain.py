"""How a kernel's source becomes a library on this machine. Nothing here needs torch, and nothing happens at import.

The compiler is `$CXX`, or g++ if that is not set. A library lies in `$XDG_CACHE_HOME/turbogr/kernels/<key>/` (`~/.cache` where
XDG_CACHE_HOME is not set). The key is a digest of the sources, the command, the compiler's version and the processor's
instruction sets and C library: what was built with `-march=native` elsewhere may hold instructions that this machine lacks.
A library's name ends in a digest of its bytes, because loading one that was cut short ends the process, and it appears by a
rename: processes that start at once may compile the same thing twice, but never load half of it. Libraries of old keys stay;
one is about 100 KB.
"""

from __future__ import annotations

import hashlib
import logging
import os
import platform
import shlex
import shutil
import subprocess
import tempfile
from dataclasses import dataclass
from pathlib import Path

from turbogr.errors import MissingDependencyError

FLAGS = ("-std=c++17", "-O3", "-march=native", "-fopenmp", "-fPIC", "-shared")
"""Given behind the words of `$CXX`; a `-march` or `-mcpu` among those takes the place of `-march=native`."""

COMPILE_SECONDS = 300
"""A compiler that takes longer is given up; a few seconds are usual."""

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Plan:
    """How one kernel is built on this machine.

    Attributes:
        command: the compiler with its flags, without source and output.
        compiler: first line of the compiler's version.
        source: the .cpp file.
        folder: where the compiled library belongs.
    """

    command: tuple[str, ...]
    compiler: str
    source: Path
    folder: Path

    def library(self) -> Path | None:
        """The compiled library, if there is one and it is whole."""
        return next(filter(self._whole, sorted(self.folder.glob(f"{self.source.stem}-*.so"))), None)

    def build(self) -> Path:
        """Compiles the library into its place.

        Raises:
            MissingDependencyError: with the compiler's words if it does not succeed, or if the cache cannot be written.
        """
        _log.info("compiling %s with %s, once on this machine", self.source.name, self.compiler)
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            with tempfile.TemporaryDirectory(dir=self.folder, prefix=".building-") as building:
                output = Path(building) / "library.so"
                _run([*self.command, "-o", str(output), str(self.source)])
                if not output.is_file():
                    raise MissingDependencyError(f"{self.command[0]} succeeded but wrote no library")
                return output.replace(self.folder / self._name(output.read_bytes()))
        except OSError as error:
            raise MissingDependencyError(
                f"{cache_dir()} cannot be written ({error.strerror}); set XDG_CACHE_HOME to a folder that can"
            ) from error

    def _whole(self, file: Path) -> bool:
        try:
            return file.name == self._name(file.read_bytes())
        except OSError:  # somebody else's, or just removed
            return False

    def _name(self, content: bytes) -> str:
        return f"{self.source.stem}-{hashlib.sha256(content).hexdigest()[:32]}.so"


def plan(source: Path) -> Plan:
    """The plan for a source, which includes headers of its own folder only.

    Raises:
        MissingDependencyError: if there is no compiler, no source or no place for the cache.
    """
    command, version = compiler()
    digest = hashlib.sha256()
    try:
        for file in [source, *sorted(source.parent.glob("*.h"))]:
            digest.update(f"{file.name}\0".encode() + file.read_bytes() + b"\0")
    except OSError as error:
        raise MissingDependencyError(f"{file} cannot be read: {error.strerror}") from error
    chosen = any(word.startswith(("-march=", "-mcpu=")) for word in command)
    command += [flag for flag in FLAGS if not (chosen and flag == "-march=native")]
    machine = [platform.machine(), _instruction_sets(), *platform.libc_ver()]
    digest.update("\0".join([*command, version, *machine]).encode())
    return Plan(tuple(command), version.splitlines()[0], source, cache_dir() / digest.hexdigest()[:32])


def cache_dir() -> Path:
    """The folder of compiled kernels; it can be removed at any time.

    Raises:
        MissingDependencyError: if neither XDG_CACHE_HOME nor a home is known.
    """
    # The XDG specification asks to ignore a path that is not absolute.
    configured = Path(os.environ.get("XDG_CACHE_HOME", ""))
    try:
        return (configured if configured.is_absolute() else Path.home() / ".cache") / "turbogr" / "kernels"
    except RuntimeError as error:
        raise MissingDependencyError(f"{error} Set XDG_CACHE_HOME") from error


def compiler() -> tuple[list[str], str]:
    """The command that compiles, without flags of ours, and what it says of its version.

    Raises:
        MissingDependencyError: if it is not on the path or cannot be run, or if CXX has a quote that nothing closes.
    """
    variable = os.environ.get("CXX", "")
    try:
        configured = shlex.split(variable)
    except ValueError as error:
        raise MissingDependencyError(f"CXX is {variable!r}, no command: {error}") from error
    command = configured or ["g++"]
    path = shutil.which(command[0])
    if path is None:
        where = "CXX names" if configured else "there is no compiler"
        raise MissingDependencyError(f"{where} {command[0]}, which is not on the path; install g++ or set CXX")
    command = [path, *command[1:]]
    return command, _run([*command, "--version"])


def _instruction_sets() -> str:
    """What this processor can do, in the kernel's words; the processor's name where there is no /proc."""
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.is_file():
        for line in cpuinfo.read_text(encoding="utf-8", errors="replace").splitlines():
            if line.startswith(("flags", "Features")):
                return line
    return platform.processor()


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
        raise MissingDependencyError(f"{command[0]} cannot be run: {error.strerror}") from error
    if done.returncode != 0 or not (done.stdout or "-o" in command):
        lines = [line for line in done.stderr.splitlines() if line.strip()]
        # A linker tells what it misses before the compiler tells that the linker failed.
        telling = (line for line in lines if "error" in line or "cannot find" in line)
        told = next(telling, lines[0] if lines else "it printed nothing")
        raise MissingDependencyError(f"{command[0]} failed with exit code {done.returncode}: {told.strip()}")
    return done.stdout
