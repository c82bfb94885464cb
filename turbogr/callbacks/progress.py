"""Progress: a bar for terminals, and one line an epoch for logs and pipes, where a bar would be a mess."""

from __future__ import annotations

import sys
import time
from typing import Any

from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import RichProgressBar

LOSS = "train/loss"


class EpochBar(RichProgressBar):
    """Lightning's bar, on stderr, and counting epochs from 1 as everything else here does.

    It shows the loss of the last step whose values loggers got: to read it at every step would be to wait for the device.
    """

    def __init__(self) -> None:
        super().__init__(leave=False, console_kwargs={"stderr": True})
        self._loss: float | None = None

    def get_metrics(self, trainer: Trainer, pl_module: LightningModule) -> dict[str, Any]:
        """What Lightning shows, and the loss."""
        metrics: dict[str, Any] = super().get_metrics(trainer, pl_module)
        if self._loss is None or trainer._logger_connector.should_update_logs:
            loss = trainer.callback_metrics.get(LOSS)
            self._loss = None if loss is None else float(loss)
        return metrics if self._loss is None else {**metrics, LOSS: self._loss}

    def _get_train_description(self, current_epoch: int) -> str:
        # As wide as the line of validation, lest the bar jump.
        return f"Epoch {current_epoch + 1}{_of_epochs(self.trainer)}".ljust(len(self.validation_description))


class EpochLines(Callback):
    """Prints a line to stderr after every epoch: how far, how long, the loss and what validation measured.

    Args:
        metrics: names to show, in this order; those that were not logged are left out.
    """

    def __init__(self, metrics: tuple[str, ...] = (LOSS, "val/HR@10", "val/NDCG@10")) -> None:
        self.metrics = tuple(metrics)
        self._start = time.monotonic()

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Starts the clock."""
        self._start = time.monotonic()

    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Prints the line."""
        if not trainer.is_global_zero:
            return
        values = [
            f"{name} {float(trainer.callback_metrics[name]):.4f}" for name in self.metrics if name in trainer.callback_metrics
        ]
        elapsed = time.monotonic() - self._start
        line = f"epoch {trainer.current_epoch + 1}{_of_epochs(trainer)}, step {trainer.global_step}, {elapsed:.0f} s"
        print("  ".join([line, *values]), file=sys.stderr, flush=True)


def _of_epochs(trainer: Trainer) -> str:
    return f"/{trainer.max_epochs}" if trainer.max_epochs is not None and trainer.max_epochs > 0 else ""
