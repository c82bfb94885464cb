"""Runs on every rank: Collisions merges what the ranks have counted."""

from __future__ import annotations

import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

from tests.distributed.launch import report_checks
from tests.distributed.strategy_cases import fit
from turbogr.callbacks.collisions import Collisions
from turbogr.strategies import TurboGRStrategy

# name -> options of the callback, of the strategy, and of what is trained; one process trains the same
CASES: dict[str, tuple[dict[str, Any], dict[str, Any], dict[str, Any]]] = {
    "full": ({"window": 3}, {"mode": "semi_async"}, {"max_epochs": 2}),
    "over an epoch's end": ({"window": 6, "without": ["negatives"]}, {"mode": "sync", "groups": 2}, {"max_epochs": 2}),
    "accumulated": ({"window": 2, "without": ["negatives"]}, {"mode": "semi_async"}, {"accumulate_grad_batches": 2}),
    "never filled": ({"window": 99}, {"mode": "semi_async"}, {}),
}


def figures(folder: Path, ranks: int, name: str, strategy: str | TurboGRStrategy, **data: Any) -> dict[str, Any]:
    options, _, trained = CASES[name]
    callback = Collisions(**options)
    fit(folder, ranks, strategy, [callback], data=data, **trained)
    assert callback.figures is not None
    return {"tau": callback.tau, **asdict(callback.figures)}


if __name__ == "__main__":
    prepared = Path(sys.argv[1])
    report_checks(
        {name: lambda name=name: figures(prepared, 2, name, TurboGRStrategy(**CASES[name][1])) for name in CASES}, backend=""
    )
