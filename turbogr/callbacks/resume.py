"""LastCheckpoint: a run can always be taken up again, after its last epoch or where Ctrl-C stopped it."""

from __future__ import annotations

import os
import signal
import sys
import threading
from pathlib import Path
from types import FrameType
from typing import Any

from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import Checkpoint


class TrainingInterrupted(Exception):
    """Training stopped because a signal asked for it.

    Attributes:
        checkpoint: what was written; resume with `fit(ckpt_path=...)`.
        signum: the signal.
    """

    def __init__(self, checkpoint: Path, signum: int) -> None:
        super().__init__(f"interrupted by {signal.Signals(signum).name}; resume from {checkpoint}")
        self.checkpoint, self.signum = checkpoint, signum


# A subclass of Checkpoint, because Lightning calls those last: what is saved then holds what other callbacks did in this step.
class LastCheckpoint(Checkpoint):
    """Writes last.ckpt after every epoch, and when SIGINT or SIGTERM asks training to stop.

    (`ModelCheckpoint(save_last=True)` writes it only where the monitored metric improved: the epochs since then would be lost.)

    On the first signal the running step is ended, the checkpoint is saved and TrainingInterrupted is raised out of `fit`. It is
    saved only where a resumed run goes on exactly as an uninterrupted one: after an optimizer step that is followed neither by
    validation nor by the epoch's end, else after those. A second SIGINT kills the process at once.

    Args:
        path: where the checkpoint is written; None is "checkpoints/last.ckpt" in the trainer's default_root_dir.
    """

    def __init__(self, path: str | Path | None = None) -> None:
        self.path = None if path is None else Path(path)
        self.signum: int | None = None
        self._previous: dict[int, Any] = {}
        self._process = os.getpid()

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Takes over the signals (Lightning took SIGTERM before this)."""
        if threading.current_thread() is not threading.main_thread():
            return  # only the main thread may set handlers
        self._process = os.getpid()
        for signum in (signal.SIGINT, signal.SIGTERM):
            self._previous[signum] = signal.signal(signum, self._ask)

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Stops here unless gradients are pending, or validation or the epoch's end follows at once."""
        number = batch_idx + 1
        # None: validation goes by the clock, and the stop may then fall between a step and its validation
        validates = trainer.enable_validation and trainer.val_check_batch is not None and number % trainer.val_check_batch == 0
        if self.signum and number % trainer.accumulate_grad_batches == 0 and not validates and not trainer.is_last_batch:
            self._stop(trainer)

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Stops after a validation within an epoch."""
        if self.signum and not trainer.sanity_checking and not trainer.is_last_batch:
            self._stop(trainer)

    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Saves; stops unless that was the last epoch."""
        if trainer.fast_dev_run:  # type: ignore[attr-defined]
            return
        steps, epochs = trainer.max_steps, trainer.max_epochs
        finished = 0 <= steps <= trainer.global_step or (epochs is not None and 0 <= epochs <= trainer.current_epoch + 1)
        if self.signum and not finished:
            self._stop(trainer)
        self._save(trainer)

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Gives the signals back."""
        self._restore()

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        """Gives the signals back."""
        self._restore()

    def _ask(self, signum: int, frame: FrameType | None) -> None:
        if os.getpid() != self._process:
            return  # a loader's worker inherited the handler; it must outlive the step that uses its batch
        self.signum = signum
        # From here on Ctrl-C does what it does to any program.
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        print(
            f"\n{signal.Signals(signum).name}: finishing this step, then saving a checkpoint (Ctrl-C again kills at once)",
            file=sys.stderr,
            flush=True,
        )

    def _save(self, trainer: Trainer) -> Path:
        path = self.path or Path(trainer.default_root_dir) / "checkpoints" / "last.ckpt"
        trainer.save_checkpoint(path, weights_only=False)
        return path

    def _stop(self, trainer: Trainer) -> None:
        assert self.signum is not None
        raise TrainingInterrupted(self._save(trainer), self.signum)

    def _restore(self) -> None:
        for signum, handler in self._previous.items():
            signal.signal(signum, handler)
        self._previous.clear()
