"""The plugin that gives NPUs kernels of their own: where it lies, and how it is loaded.

Two libraries, which stand side by side (kernels/torch_npu_plugin/README.md): `libturbogr_npu.so` registers the operators, and
`libturbogr_ascendc.so` holds the kernels, which CANN's compiler makes. `turbogr.npu_build` builds both. They lie in
`$XDG_CACHE_HOME/turbogr/npu/<key>/`; the key is a digest of their sources and of the releases of torch and torch_npu, so that a
library of other sources is never loaded. Without them, operators run in PyTorch on NPUs.

Nothing is imported or loaded before `load()`, and finding out needs no torch.
"""

from __future__ import annotations

import hashlib
import logging
import threading
from dataclasses import dataclass
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from turbogr.errors import MissingDependencyError
from turbogr.ops import toolchain
from turbogr.resources import kernels_dir

PLUGIN = "libturbogr_npu.so"
KERNELS = "libturbogr_ascendc.so"
TORCH_NPU = "2.13.0"
"""Release of torch_npu whose headers are taken where none is installed; it goes with the torch that our metadata asks for."""

SOURCES = ("ascendc", "torch_npu_plugin")
"""Folders of `kernels/` that the libraries are made of."""

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Libraries:
    """Where both libraries belong, whether they are there or not.

    Attributes:
        plugin: registers the operators.
        kernels: the kernels, beside it.
    """

    plugin: Path
    kernels: Path

    def missing(self) -> str | None:
        """What has to be built, and how, in one line; None if nothing."""
        if not self.plugin.is_file():
            return f"not built from these sources ({self.plugin} is missing): python -m turbogr.npu_build"
        if not self.kernels.is_file():
            return f"built without kernels ({self.kernels} is missing): python -m turbogr.npu_build --kernels, with CANN"
        return None


def npu_dir() -> Path:
    """The folder of everything that is built for NPUs; it can be removed at any time.

    Raises:
        MissingDependencyError: if no place for a cache is known.
    """
    return toolchain.cache_dir().parent / "npu"


def libraries() -> Libraries:
    """Where the libraries of these sources and releases belong.

    Raises:
        MissingDependencyError: if sources are missing or no place for a cache is known.
    """
    folder = npu_dir() / _key()
    return Libraries(folder / PLUGIN, folder / KERNELS)


def load() -> Path:
    """Registers the plugin's operators for NPUs, once a process; torch_npu has been imported.

    Returns:
        The plugin's library.

    Raises:
        MissingDependencyError: if something is not built, or cannot be loaded.
    """
    with _loading:
        return _load()


_loading = threading.Lock()  # the cache below keeps no two threads from loading at once


@cache
def _load() -> Path:
    found = libraries()
    missing = found.missing()
    if missing is not None:
        raise MissingDependencyError(f"the plugin for NPUs is {missing}")
    import torch

    try:
        torch.ops.load_library(found.plugin)
    except OSError as error:
        raise MissingDependencyError(
            f"the plugin for NPUs cannot be loaded ({error}); python -m turbogr.npu_build --again builds it anew"
        ) from error
    return found.plugin


def load_or_tell() -> bool:
    """Loads the plugin if it can be had, else says once in the log why operators run in PyTorch."""
    try:
        _log.info("operators on NPUs: %s", load())
    except MissingDependencyError as error:
        _tell(str(error))
        return False
    return True


@cache
def _tell(why: str) -> None:
    _log.warning("operators run in PyTorch on NPUs, not in kernels of their own: %s (docs/npu.md)", why)


def _key() -> str:
    digest = hashlib.sha256()
    root = kernels_dir()
    for folder in SOURCES:
        for file in sorted((root / folder).rglob("*")):
            if file.suffix in (".cpp", ".h", ".txt"):
                digest.update(f"{file.relative_to(root).as_posix()}\0".encode() + file.read_bytes() + b"\0")
    digest.update("\0".join([_release("torch") or "", _release("torch-npu") or TORCH_NPU]).encode())
    return digest.hexdigest()[:32]


def _release(distribution: str) -> str | None:
    try:
        return version(distribution)
    except PackageNotFoundError:
        return None
