"""Which implementation each operator uses, and why: what `turbogr doctor` prints."""

from __future__ import annotations

from dataclasses import dataclass
from importlib import import_module
from pkgutil import iter_modules


@dataclass(frozen=True)
class OperatorInfo:
    """One operator: its name, the back end chosen for it on this machine and the reason."""

    name: str
    backend: str
    reason: str


_chosen: dict[str, OperatorInfo] = {}


def register(name: str, backend: str, reason: str) -> None:
    """Records the choice of an operator; called where the operator is defined."""
    _chosen[name] = OperatorInfo(name, backend, reason)


def describe() -> list[OperatorInfo]:
    """All operators of the package, sorted by name."""
    package = import_module("turbogr.ops")
    for module in iter_modules(package.__path__):
        import_module(f"turbogr.ops.{module.name}")
    return [_chosen[name] for name in sorted(_chosen)]
