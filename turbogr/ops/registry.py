"""Which implementation each operator uses, and why: what `turbogr doctor` prints."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from importlib import import_module
from pkgutil import iter_modules
from typing import Protocol


@dataclass(frozen=True)
class OperatorInfo:
    """One operator: its name, the back end chosen for it on this machine and the reason."""

    name: str
    backend: str
    reason: str


class Loadable(Protocol):
    """A back end that is loaded at first use (`turbogr.ops.native.Kernel`)."""

    def library(self) -> object | None:
        """Loads it, if that has not been done."""

    def choice(self) -> tuple[str, str]:
        """Back end and reason as they are known now, without loading anything."""


_chosen: dict[str, Callable[[bool], OperatorInfo]] = {}


def register(name: str, backend: str, reason: str) -> None:
    """Records an operator that has one back end; called where the operator is defined, in this package or in a user's."""
    _chosen[name] = lambda _: OperatorInfo(name, backend, reason)


def register_loadable(name: str, kernel: Loadable) -> None:
    """Records an operator whose back end is known for certain only when it has been loaded."""

    def info(load: bool) -> OperatorInfo:
        if load:
            kernel.library()
        return OperatorInfo(name, *kernel.choice())

    _chosen[name] = info


def describe(load: bool = False) -> list[OperatorInfo]:
    """All operators of the package and those that other imported modules have registered, sorted by name.

    Args:
        load: compile and load what is otherwise loaded at first use, so that the answer is no forecast.
    """
    package = import_module("turbogr.ops")
    for module in iter_modules(package.__path__):
        import_module(f"turbogr.ops.{module.name}")
    with ThreadPoolExecutor() as pool:  # one compiler a kernel, all at once
        return list(pool.map(lambda name: _chosen[name](load), sorted(_chosen)))
