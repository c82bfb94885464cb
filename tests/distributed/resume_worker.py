"""Runs on every rank: trainings that stop somewhere and go on in another trainer, which test_resume.py compares.

Arguments: a prepared folder, and one for checkpoints.
"""

from __future__ import annotations

import hashlib
import os
import sys
import threading
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext, suppress
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple
from unittest.mock import patch

import lightning.pytorch as pl
import torch
from lightning.pytorch.utilities.exceptions import SIGTERMException
from torch.utils.data import DataLoader, IterableDataset

from tests.distributed.launch import report_checks
from tests.distributed.strategy_cases import QUIET, Batches, SignalOn, SizedBatches, Toy, build
from tests.strategies.test_one_rank import Stateful
from tests.strategies.test_resume import AfterValidation
from turbogr.callbacks.resume import LastCheckpoint, TrainingInterrupted
from turbogr.strategies import TurboGRStrategy
from turbogr.strategies.lookahead import LookaheadLoader

MODES = ("sync", "semi_async")
BATCHES = 7
"""Of an epoch: more than are in flight."""
USERS = 8 * BATCHES - 3
TIMEOUT = 120.0

PREPARED: Path
OUT: Path


class Stream(IterableDataset):
    """Batches of no known number, three more on each further rank, made in the process of a loader's worker."""

    def __iter__(self):
        rank = int(os.environ["RANK"])
        yield from Batches(BATCHES + 3 * rank, rank)


# name -> a loader of the toy's batches, on this rank
LOADERS: dict[str, Callable[[int], Any]] = {
    "unsized": lambda rank: Batches(BATCHES + 3 * rank, rank),
    "unsized, worker": lambda rank: DataLoader(Stream(), batch_size=None, num_workers=1),
    "stateful": lambda rank: Stateful(BATCHES, rank),
}


class Case(NamedTuple):
    """Something that is trained for two epochs.

    Attributes:
        strategy: its options.
        trainer: its options.
        data: options of the data module; the name of a loader for the toy.
        stops: optimizer steps after which training stops, in a run of its own for each; negative where the checkpoint is
            written behind a validation that follows the step; 0 for a signal to the last rank at a step within.
    """

    strategy: dict[str, Any]
    trainer: dict[str, Any]
    data: dict[str, Any] | str
    stops: tuple[int, ...]


VALIDATED = {"val_check_interval": 3}
CASES = {
    "plain": Case({}, {}, {}, (4, BATCHES, 0)),
    "worker": Case({"groups": 2}, {}, {"num_workers": 1}, (3,)),
    "validated": Case({"groups": 2}, VALIDATED, {}, (-3,)),
    "accumulated": Case({}, {"accumulate_grad_batches": 2}, {}, (2, 4)),
    "table_wise": Case({"sharding": "table_wise"}, VALIDATED, {}, (-3,)),
    "unsized": Case({}, VALIDATED, "unsized", (4, BATCHES)),
    "unsized, worker": Case({"groups": 2}, {}, "unsized, worker", (4,)),
    "stateful": Case({"groups": 2}, {}, "stateful", (4,)),
}
ON_FOUR = {
    "worker": Case({"groups": 2}, {"limit_train_batches": BATCHES, **VALIDATED}, {"num_workers": 1}, (-3,)),
    "unsized": Case({"sharding": "table_wise"}, {}, "unsized", (4, BATCHES)),
}
"""What the launch of four ranks in test_strategy.py adds."""


def train(case: Case, mode: str, callbacks: list[pl.Callback], path: Path | None = None, **options: Any) -> pl.Trainer:
    """In a model, a loader and a trainer of its own."""
    ranks, rank = int(os.environ["WORLD_SIZE"]), int(os.environ["RANK"])
    settings = {"max_epochs": 2, "limit_val_batches": 1, "enable_checkpointing": bool(callbacks), **case.trainer, **options}
    strategy = TurboGRStrategy(mode=mode, timeout_s=TIMEOUT, **case.strategy)
    nodes = int(os.environ["GROUP_WORLD_SIZE"])
    placed = {"devices": ranks // nodes, "num_nodes": nodes}
    trainer = pl.Trainer(**QUIET, **placed, strategy=strategy, callbacks=callbacks, default_root_dir=OUT, **settings)
    kept = {"ckpt_path": path, "weights_only": None if path is None else True}
    if isinstance(case.data, str):
        pl.seed_everything(7)
        trainer.fit(Toy(), LOADERS[case.data](rank), SizedBatches(1, 7), **kept)
    else:
        model, data = build(PREPARED, ranks, dropout=0.2, scheduled=True, batch_size=8 // ranks, **case.data)
        trainer.fit(model, data, **kept)
    return trainer


def end(trainer: pl.Trainer) -> dict[str, Any]:
    """All that a run leaves on this rank: rows and their optimizer's state, dense ones, schedule and metrics."""
    module, (optimizer,) = trainer.lightning_module, trainer.optimizers
    state = optimizer.state_dict()
    moments = [value for one in state["state"].values() for value in one.values() if isinstance(value, torch.Tensor)]
    return {
        "steps": trainer.global_step,
        "rows and dense": [(name, bits(tensor)) for name, tensor in module.state_dict().items()],
        "optimizer": [bits(tensor) for tensor in moments],
        "rates": [group["lr"] for group in state["param_groups"]],
        "metrics": {name: bits(value) for name, value in trainer.callback_metrics.items()},
    }


def bits(tensor: torch.Tensor) -> str:
    return hashlib.sha256(tensor.detach().contiguous().numpy().tobytes()).hexdigest()[:16]


def stopped(case: Case, mode: str, stop: int, last: Path) -> Path:
    """Trains until there; returns the checkpoint."""
    if stop == 0:
        with suppress(TrainingInterrupted):
            train(case, mode, [LastCheckpoint(last), SignalOn(int(os.environ["WORLD_SIZE"]) - 1, 2)])
            raise AssertionError("went through")
    else:
        callback = AfterValidation(last) if stop < 0 else LastCheckpoint(last)
        assert train(case, mode, [callback], max_steps=abs(stop)).global_step == abs(stop)
    return last


def resumed(name: str, case: Case, mode: str) -> dict[str, Any]:
    """The end of a run without a stop, and of those that stopped and went on."""
    found = {"whole": end(train(case, mode, []))}
    for stop in case.stops:
        path = stopped(case, mode, stop, OUT / f"{name}-{mode}-{stop}.ckpt")
        found[str(stop)] = end(train(case, mode, [], path))
    return found


def one_batch_further(loader: LookaheadLoader, first: int) -> None:
    loader._skip = first + 1


# What must not be forgotten, forgotten: name -> case, mode, and what spoils a run that goes on.
MISTAKES: dict[str, tuple[str, str, AbstractContextManager[Any]]] = {
    "without delayed rows": ("plain", "semi_async", patch("turbogr.strategies.turbogr.own_delayed", lambda *_: None)),
    "a batch is left out": ("unsized", "sync", patch.object(LookaheadLoader, "_begin_at", one_batch_further)),
    "none": ("plain", "semi_async", nullcontext()),
}


def mistaken(name: str) -> dict[str, Any]:
    """From the first checkpoint of a case that has been run."""
    case, mode, spoilt = MISTAKES[name]
    path = OUT / f"{case}-{mode}-{CASES[case].stops[0]}.ckpt"
    with spoilt:
        return end(train(CASES[case], mode, [], path))


def lanes() -> list[str]:
    """Threads of this process that belong to an engine or a strategy."""
    return sorted(thread.name for thread in threading.enumerate() if thread.name.startswith("turbogr-"))


def lanes_left() -> list[str]:
    """Those that do not end; a lane is told to end, and nobody waits until it has."""
    over = time.monotonic() + 10.0
    while (left := lanes()) and time.monotonic() < over:
        time.sleep(0.01)
    return left


class Threads(pl.Callback):
    """Notes them while training."""

    during: list[str]

    def on_train_batch_end(self, *_):
        self.during = lanes()


UNDISTURBED = {1: "unsized", 2: "unsized, worker"}
"""Number of groups -> the case whose batches `terminated` trains."""


def terminated(groups: int) -> dict[str, Any]:
    """SIGTERM within an epoch and no LastCheckpoint; then the same trainer, then another, trains in the same process."""
    pl.seed_everything(7)
    signal, threads, model = SignalOn(1, 2), Threads(), Toy()
    settings = {"max_epochs": 2, "limit_val_batches": 1, "enable_checkpointing": False, "callbacks": [signal, threads]}
    trainer = pl.Trainer(**QUIET, **settings, devices=2, strategy=TurboGRStrategy(groups, timeout_s=TIMEOUT))
    data = [LOADERS["unsized"](int(os.environ["RANK"])), SizedBatches(1, 7)]
    with suppress(SIGTERMException):
        trainer.fit(model, *data)
        raise AssertionError("went through")
    found = {"step": trainer.global_step, "during": threads.during, "after": lanes_left()}
    signal.rank = -1
    trainer.fit(model, *data)
    found |= {"again": trainer.global_step, "after again": lanes_left()}
    other = end(train(CASES[UNDISTURBED[groups]], "semi_async", []))
    return {**found, "other": other, "after all": lanes_left()}


def checks() -> dict[str, Callable[[], Any]]:
    found: dict[str, Callable[[], Any]] = {
        f"{name}, {mode}": partial(resumed, name, case, mode) for name, case in CASES.items() for mode in MODES
    }
    found |= {name: partial(mistaken, name) for name in MISTAKES}
    return found | {f"terminated, {groups}": partial(terminated, groups) for groups in (1, 2)}


if __name__ == "__main__":
    PREPARED, OUT = Path(sys.argv[1]), Path(sys.argv[2])
    report_checks(checks(), backend="")
