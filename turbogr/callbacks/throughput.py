"""Throughput: trained tokens per second."""

from __future__ import annotations

from time import perf_counter
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer

from turbogr.batch import JaggedBatch

METRIC = "train/tokens_per_second"


class Throughput(Callback):
    """Logs "train/tokens_per_second": the tokens of all ranks over the time since the last log.

    The time includes waiting for data and everything else between two training steps, except validation. The progress bar
    shows the value at every step; loggers get it every `Trainer(log_every_n_steps=...)` steps, and then a new average begins.
    On devices that work asynchronously, and with several ranks, whose tokens are summed, the value is shown only when loggers
    want it: no step in between waits for a device or for others.

    Attributes:
        tokens: int, tokens that all ranks have trained in this fit, up to the last time they were summed.
        seconds: float, time they took on this rank, validation excluded.
    """

    def __init__(self) -> None:
        self.tokens, self.seconds = 0, 0.0
        self._tokens_logged, self._seconds_logged = 0, 0.0
        self._own, self._elapsed = 0, 0.0  # this rank's tokens that are not yet in `tokens`; the clock
        self._since: float | None = None  # when the running clock was started; None while it stands still
        self._paused = False

    @property
    def average(self) -> float:
        """Tokens per second of the whole fit; 0 before the first step."""
        return self.tokens / self.seconds if self.seconds else 0.0

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Starts from zero."""
        self.tokens, self.seconds = 0, 0.0
        self._tokens_logged, self._seconds_logged = 0, 0.0
        self._own, self._elapsed = 0, 0.0
        self._since = perf_counter()

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: JaggedBatch, batch_idx: int
    ) -> None:
        """Counts a step and logs the average."""
        self._stop_clock()
        self._since = perf_counter()
        self._own += batch.num_tokens
        # The same question that Lightning's own monitors ask: do loggers get this step's values? All ranks answer alike.
        logged = trainer._logger_connector.should_update_logs
        if not logged and (trainer.world_size > 1 or pl_module.device.type != "cpu"):
            return
        self._sum(trainer)
        seconds = self.seconds - self._seconds_logged
        if seconds > 0:
            value = (self.tokens - self._tokens_logged) / seconds
            pl_module.log(METRIC, value, on_step=True, on_epoch=False, prog_bar=True, batch_size=1)
        if logged:
            self._tokens_logged, self._seconds_logged = self.tokens, self.seconds

    def on_validation_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Stops the clock."""
        self._paused = self._since is not None  # it does not run yet in the sanity check
        self._stop_clock()

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Lets the clock run on."""
        if self._paused:
            self._since = perf_counter()

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Stops the clock and sums what is left."""
        self._stop_clock()
        self._sum(trainer)

    def _sum(self, trainer: Trainer) -> None:
        tokens = self._own
        if trainer.world_size > 1:
            device = trainer.strategy.root_device
            tokens = int(trainer.strategy.reduce(torch.tensor(tokens, device=device), reduce_op="sum"))
        self.tokens, self.seconds, self._own = self.tokens + tokens, self._elapsed, 0

    def _stop_clock(self) -> None:
        if self._since is not None:
            self._elapsed += perf_counter() - self._since
            self._since = None
