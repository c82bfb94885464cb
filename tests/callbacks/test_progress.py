"""The bar's loss: that of the last step whose values loggers got."""

from __future__ import annotations

import lightning.pytorch as pl
import torch

from tests.distributed.strategy_cases import QUIET, SizedBatches, Toy
from turbogr.callbacks.progress import LOSS, EpochBar


class Logged(Toy):
    def training_step(self, batch, batch_idx):
        loss = super().training_step(batch, batch_idx)
        self.log(LOSS, torch.tensor(float(batch_idx)))
        return loss


class Shown(EpochBar):
    def __init__(self) -> None:
        super().__init__()
        self.shown: list[float] = []

    def get_metrics(self, trainer, pl_module):
        metrics = super().get_metrics(trainer, pl_module)
        self.shown.append(metrics[LOSS])
        return metrics


def test_the_bar_shows_the_loss_that_loggers_get():
    bar = Shown()
    settings = {**QUIET, "enable_progress_bar": True, "enable_checkpointing": False, "log_every_n_steps": 3, "max_epochs": 1}
    pl.Trainer(**settings, callbacks=[bar]).fit(Logged(), SizedBatches(6, 1))
    assert bar.shown[:6] == [0, 0, 2, 2, 2, 5]  # the first step's besides, lest the bar be without
