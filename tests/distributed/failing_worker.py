"""One of several ranks fails, in the way that the first argument names, where the second says which rank."""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path

import lightning.pytorch as pl

from tests.distributed.strategy_cases import QUIET, SizedBatches, Toy
from turbogr.strategies import TurboGRStrategy

HOW, WHO = sys.argv[1], int(sys.argv[2])


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


class FailingLoader(SizedBatches):
    def __iter__(self):
        for number, batch in enumerate(super().__iter__()):
            if HOW == "loader" and number == 6 and int(os.environ["RANK"]) == WHO:
                raise OSError("the cause")
            yield batch


if __name__ == "__main__":
    options = {"max_epochs": 2, "val_check_interval": 8, "enable_checkpointing": False}
    ranks = int(os.environ["WORLD_SIZE"])
    strategy = TurboGRStrategy(groups=2, timeout_s=40)
    trainer = pl.Trainer(**QUIET, **options, devices=ranks, strategy=strategy, default_root_dir=Path.cwd())
    started = time.monotonic()
    try:
        trainer.fit(Failing(), FailingLoader(20, 1), SizedBatches(2, 7))
    finally:
        print(f"ended after {time.monotonic() - started:.0f} s", flush=True)
