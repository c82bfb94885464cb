"""`python -m turbogr.npu_build`: compiles the plugin for NPUs, and with CANN the kernels.

The plugin needs a C++20 compiler, torch and torch_npu's headers, no CANN: where torch_npu is not installed, its wheel is
downloaded and unpacked beside the libraries, and nothing of it is installed, because an installed torch_npu without CANN keeps
torch from being imported. `turbogr.ops.npu_plugin` tells where the libraries lie and loads them.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
import time
import zipfile
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from importlib.util import find_spec
from pathlib import Path

from turbogr import cann
from turbogr.errors import MissingDependencyError
from turbogr.ops import npu_plugin, toolchain
from turbogr.resources import kernels_dir

FLAGS = ("-std=c++20", "-O2", "-fPIC", "-fvisibility=hidden", "-Wall", "-Wextra", "-Werror")
LINK_FLAGS = ("-shared", "-Wl,-z,defs", "-Wl,--allow-shlib-undefined")
"""The plugin itself may leave nothing undefined; what torch_npu's library misses is CANN's."""

OF_TORCH_NPU = "device_npu.cpp"
"""The only source that includes torch_npu's headers, and CANN's that come with these; others are compiled without them."""

LIBRARIES = ("torch_cpu", "c10", "torch_npu")
_OF_THE_WHEEL = ("torch_npu/include/", "torch_npu/lib/libtorch_npu.so")

ARCHITECTURE = "dav-2201"
"""Atlas A2 and A3."""


def main(args: list[str] | None = None) -> int:
    """Runs the command.

    Args:
        args: command line without the program's name.

    Returns:
        Exit code.
    """
    parser = argparse.ArgumentParser(
        prog="python -m turbogr.npu_build", allow_abbrev=False, description="Compiles turbogr's plugin for NPUs."
    )
    parser.add_argument("--kernels", action="store_true", help="compile the kernels, too: needs CANN >= 9 and CMake")
    parser.add_argument("--cpu-twin", action="store_true", help="compile and run the kernels in CANN's CPU twin, nothing else")
    parser.add_argument(
        "--architecture", default=ARCHITECTURE, help=f"of the kernels, as CANN names it; default {ARCHITECTURE}"
    )
    parser.add_argument("--again", action="store_true", help="also where a library of the same sources is there")
    options = parser.parse_args(args)
    try:
        if options.cpu_twin:
            return run_cpu_twin(options.architecture)
        libraries = npu_plugin.libraries()
        if options.again or not libraries.plugin.is_file():
            build_plugin(libraries.plugin, options.again)
        print(f"plugin: {libraries.plugin}")
        if options.kernels:
            if options.again or not libraries.kernels.is_file():
                build_kernels(libraries.kernels, options.architecture)
            print(f"kernels: {libraries.kernels}")
        elif not libraries.kernels.is_file():
            print("its kernels are not built; on a machine with CANN: python -m turbogr.npu_build --kernels")
    except MissingDependencyError as error:
        print(f"npu_build: {error}", file=sys.stderr)
        return 1
    return 0


def build_plugin(library: Path, again: bool = False) -> None:
    """Compiles and links the plugin into its place; its objects stay beside it, so that a build that was cut short goes on.

    Args:
        library: where it belongs.
        again: also compile what is there.

    Raises:
        MissingDependencyError: if compiler, torch or torch_npu's wheel cannot be had, or the compiler refuses.
    """
    objects = library.parent / "objects"
    if again:
        shutil.rmtree(objects, ignore_errors=True)
    torch_npu = _torch_npu()
    began = time.monotonic()
    compiled = [str(file) for file in compile_sources(sources(), objects, torch_npu)]
    command, _ = toolchain.compiler()
    places = [f"-L{package / 'lib'}" for package in (_package("torch"), torch_npu)]
    with tempfile.TemporaryDirectory(dir=library.parent, prefix=".building-") as building:
        linked = Path(building) / library.name
        _run([*command, *LINK_FLAGS, "-o", str(linked), *compiled, *places, *(f"-l{name}" for name in LIBRARIES)])
        linked.replace(library)
    print(f"compiled and linked in {time.monotonic() - began:.0f} s", flush=True)


def sources() -> list[Path]:
    """The plugin's sources.

    Raises:
        MissingDependencyError: if they are missing.
    """
    return sorted((kernels_dir() / "torch_npu_plugin").glob("*.cpp"))


def compile_sources(wanted: Sequence[Path], folder: Path, torch_npu: Path | None) -> list[Path]:
    """The plugin's objects, compiled where they are not there yet.

    Args:
        wanted: sources.
        folder: for these sources only; an object's name tells source, command and compiler.
        torch_npu: its folder; None if OF_TORCH_NPU is not wanted.

    Returns:
        One object a source, in their order.

    Raises:
        MissingDependencyError: if compiler or torch cannot be had, or the compiler refuses.
    """
    command, told = toolchain.compiler()
    torch = _package("torch") / "include"
    of_torch = [torch, torch / "torch/csrc/api/include"]
    of_torch_npu = [torch_npu / "include", torch_npu / "include/third_party/acl/inc"] if torch_npu else []
    print(f"{len(wanted)} sources, {told.splitlines()[0]}", flush=True)
    folder.mkdir(parents=True, exist_ok=True)

    def compile_one(source: Path) -> Path:
        # As system headers: warnings are to be of our own sources.
        folders = of_torch + of_torch_npu if source.name == OF_TORCH_NPU else of_torch
        include = [word for x in folders for word in ("-isystem", str(x))]
        arguments = [*command, *FLAGS, *include, "-c", str(source)]
        digest = hashlib.sha256("\0".join([*arguments, told]).encode()).hexdigest()[:16]
        compiled = folder / f"{source.stem}-{digest}.o"
        if compiled.is_file():
            return compiled
        with tempfile.TemporaryDirectory(dir=folder, prefix=".building-") as building:
            made = Path(building) / compiled.name
            _run([*arguments, "-o", str(made)])
            made.replace(compiled)
        print(f"  {source.name}", flush=True)
        return compiled

    with ThreadPoolExecutor(len(os.sched_getaffinity(0))) as pool:
        return list(pool.map(compile_one, wanted))


def build_kernels(library: Path, architecture: str) -> None:
    """Compiles the kernels with CANN into their place.

    Raises:
        MissingDependencyError: if CANN or CMake cannot be had, or the compiler refuses.
    """
    library.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=library.parent, prefix=".building-") as building:
        _cmake(Path(building), architecture, "npu", "turbogr_ascendc")
        (Path(building) / library.name).replace(library)


def run_cpu_twin(architecture: str) -> int:
    """Compiles the kernels for CANN's CPU twin and runs its program; returns that program's exit code.

    Raises:
        MissingDependencyError: if CANN or CMake cannot be had, or the compiler refuses.
    """
    folder = npu_plugin.npu_dir() / "cpu-twin"
    shutil.rmtree(folder, ignore_errors=True)  # CMake's cache holds the mode of a run before
    folder.mkdir(parents=True)
    _cmake(folder, architecture, "cpu", "turbogr_twin")
    print(f"running {folder / 'turbogr_twin'}", flush=True)
    return subprocess.run([str(folder / "turbogr_twin")], check=False).returncode


def _cmake(folder: Path, architecture: str, mode: str, target: str) -> None:
    found = cann.find()
    if found is None:
        raise MissingDependencyError(f"{' and '.join(cann.VARIABLES)} are not set: source set_env.sh of CANN >= {cann.OLDEST}")
    problem = found.problem()
    if problem is not None:
        raise MissingDependencyError(problem)
    if shutil.which("cmake") is None:
        raise MissingDependencyError("there is no cmake on the path; install CMake >= 3.16")
    options = [f"-DCMAKE_ASC_ARCHITECTURES={architecture}", f"-DCMAKE_ASC_RUN_MODE={mode}", "-DCMAKE_BUILD_TYPE=Release"]
    print(f"kernels for {architecture} with CANN {found.release or 'of unknown release'} in {found.home}", flush=True)
    _run(["cmake", "-S", str(kernels_dir() / "ascendc"), "-B", str(folder), *options], shown=True)
    _run(["cmake", "--build", str(folder), "--target", target, "--parallel"], shown=True)


def _torch_npu() -> Path:
    """torch_npu's folder: the installed one, else of the wheel, unpacked."""
    spec = find_spec("torch_npu")  # does not import it
    if spec is not None and spec.origin is not None and (Path(spec.origin).parent / "include").is_dir():
        return Path(spec.origin).parent
    release = npu_plugin.TORCH_NPU
    place = npu_plugin.npu_dir() / f"torch-npu-{release}"
    if not (place / "torch_npu").is_dir():
        place.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=place.parent, prefix=".unpacking-") as scratch:
            print(f"downloading torch-npu {release} for its headers", flush=True)
            pip = [sys.executable, "-m", "pip", "download", "--disable-pip-version-check", "--quiet", "--no-deps"]
            _run([*pip, "--only-binary", ":all:", "--dest", scratch, f"torch-npu=={release}"])
            wheel = next(Path(scratch).glob("*.whl"))
            with zipfile.ZipFile(wheel) as archive:
                names = [n for n in archive.namelist() if n.startswith(_OF_THE_WHEEL)]
                archive.extractall(Path(scratch) / "unpacked", names)
            shutil.rmtree(place, ignore_errors=True)
            (Path(scratch) / "unpacked").replace(place)
        print(f"unpacked: {place}", flush=True)
    return place / "torch_npu"


def _package(name: str) -> Path:
    spec = find_spec(name)
    if spec is None or spec.origin is None:
        raise MissingDependencyError(f"{name} is not installed; see `turbogr doctor`")
    return Path(spec.origin).parent


def _run(command: list[str], shown: bool = False) -> None:
    """Runs a command; its words are shown as they come, or told if it fails."""
    try:
        done = subprocess.run(
            command, capture_output=not shown, text=True, errors="replace", check=False, stdin=subprocess.DEVNULL
        )
    except OSError as error:
        raise MissingDependencyError(f"{command[0]} cannot be run: {error.strerror}") from error
    if done.returncode:
        told = "" if shown else f":\n{(done.stderr or done.stdout).strip()}"
        raise MissingDependencyError(f"{Path(command[0]).name} failed with exit code {done.returncode}{told}")


if __name__ == "__main__":
    sys.exit(main())
