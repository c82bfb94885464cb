"""One of several ranks fails, in the way that the first argument names, where the second says which rank.

The third is a folder for a checkpoint of every other step.
"""

from __future__ import annotations

import os
import sys
import time
from itertools import count
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
from lightning.pytorch.callbacks import ModelCheckpoint
from torch.utils.data import DataLoader, IterableDataset

from tests.distributed.strategy_cases import QUIET, SizedBatches, Toy
from turbogr.sparse.transport import Transport
from turbogr.strategies import TurboGRStrategy

SEED, BATCHES = 3, 20
"""Of the model, as `tests.strategies.test_resume.toy` has it; of an epoch, the same ones on every rank."""

HOW: str
WHO: int


def fails(place: str, trainer: pl.Trainer) -> bool:
    return place == HOW and trainer.global_rank == WHO and trainer.global_step == 3


class Failing(Toy):
    def training_step(self, batch, batch_idx):
        if fails("killed", self.trainer):
            os._exit(3)
        if fails("step", self.trainer):
            raise ValueError("the cause")
        return super().training_step(batch, batch_idx)

    def on_after_backward(self):
        if fails("backward", self.trainer):
            raise ValueError("the cause")

    def validation_step(self, batch, batch_idx):
        if HOW == "validation" and self.trainer.global_rank == WHO:
            raise ValueError("the cause")
        super().validation_step(batch, batch_idx)


class FailingSet(IterableDataset):
    """Raises in the process of a loader's worker."""

    def __init__(self, rank: int) -> None:
        self.rank = rank

    def __iter__(self):
        for number, batch in enumerate(SizedBatches(BATCHES, 1)):
            if number == 6 and self.rank == WHO:
                raise OSError("the cause")
            yield batch


def fail_in_a_lane() -> None:
    """One of the engine's threads raises at its sixth batch."""
    name = {"unique": "find_touched", "values": "send_gradient"}[HOW]
    original, calls = getattr(Transport, name), count(1)

    def failing(*arguments):
        if int(os.environ["RANK"]) == WHO and next(calls) == 6:
            raise ValueError("the cause")
        return original(*arguments)

    setattr(Transport, name, failing)


class FailingLoader(SizedBatches):
    def __iter__(self):
        for number, batch in enumerate(super().__iter__()):
            if HOW == "loader" and number == 6 and int(os.environ["RANK"]) == WHO:
                raise OSError("the cause")
            yield batch


if __name__ == "__main__":
    HOW, WHO = sys.argv[1], int(sys.argv[2])
    pl.seed_everything(SEED)
    saving = ModelCheckpoint(sys.argv[3], every_n_train_steps=2, save_top_k=-1, filename="{step}")
    options = {"max_epochs": 2, "val_check_interval": 8, "callbacks": [saving]}
    ranks = int(os.environ["WORLD_SIZE"])
    strategy = TurboGRStrategy(groups=2, timeout_s=40)
    trainer = pl.Trainer(**QUIET, **options, devices=ranks, strategy=strategy, default_root_dir=Path.cwd())
    loader: Any = FailingLoader(BATCHES, 1)
    if HOW == "worker":
        loader = DataLoader(FailingSet(int(os.environ["RANK"])), batch_size=None, num_workers=1)
    if HOW in ("unique", "values"):
        fail_in_a_lane()
    started = time.monotonic()
    try:
        trainer.fit(Failing(), loader, SizedBatches(2, 7))
    finally:
        print(f"ended after {time.monotonic() - started:.0f} s", flush=True)
