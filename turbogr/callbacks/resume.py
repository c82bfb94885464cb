"""LastCheckpoint: a run can always be taken up again, after its last epoch or where Ctrl-C stopped it."""

from __future__ import annotations

import os
import signal
import sys
import threading
from pathlib import Path
from types import FrameType
from typing import Any

from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import Checkpoint

from turbogr.strategies import TurboGRStrategy
from turbogr.strategies.agreement import StopRequest


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
    """Writes last.ckpt after every epoch, and where training stops within one: SIGINT, SIGTERM, `max_steps`, `should_stop`.

    (`ModelCheckpoint(save_last=True)` writes it only where the monitored metric improved: the epochs since then would be lost.)

    On the first signal the running step is ended, the checkpoint is saved and TrainingInterrupted is raised out of `fit`. It is
    saved only where a resumed run goes on exactly as an uninterrupted one: after an optimizer step that is followed neither by
    validation nor by the epoch's end, else after those. A second SIGINT kills the process at once.

    With several ranks a signal on any of them stops all at the same step, one or two after the running one, as they have to
    tell each other; the checkpoint is written once, and all raise.

    `trainer.should_stop` (EarlyStopping, `max_time`) is seen where callbacks set it, and obeyed after the next optimizer step
    where gradients are pending. Set in a model's own hooks it leaves last.ckpt at the end of the epoch before.

    Args:
        path: where the checkpoint is written; None is "checkpoints/last.ckpt" in the trainer's default_root_dir.
    """

    def __init__(self, path: str | Path | None = None) -> None:
        self.path = None if path is None else Path(path)
        self._request = StopRequest()
        self._previous: dict[int, Any] = {}
        self._process = os.getpid()
        self._epoch_ends = self._pending = self._postponed = False
        self._saved = -1  # global step of the last checkpoint within an epoch

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Comes after every other checkpoint callback: what they count as best is part of what is saved."""
        callbacks: list[Callback] = trainer.callbacks  # type: ignore[attr-defined]
        # A new list: Lightning is going through the other one.
        trainer.callbacks = [c for c in callbacks if c is not self] + [self]  # type: ignore[attr-defined]

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Takes over the signals (Lightning took SIGTERM before this)."""
        self._epoch_ends = self._pending = self._postponed = False
        self._saved = -1
        strategy = trainer.strategy
        self._request = strategy.stop if isinstance(strategy, TurboGRStrategy) else StopRequest()
        self._request.taken = True
        if threading.current_thread() is not threading.main_thread():
            return  # only the main thread may set handlers
        self._process = os.getpid()
        for signum in (signal.SIGINT, signal.SIGTERM):
            self._previous[signum] = signal.signal(signum, self._ask)

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Saves if training ends here within an epoch; not while gradients are pending, nor where validation is due anyway."""
        number = batch_idx + 1
        self._epoch_ends = trainer.is_last_batch or number >= trainer.num_training_batches
        self._pending = number % trainer.accumulate_grad_batches != 0 and not self._epoch_ends
        if self._postponed and not self._pending:
            trainer.should_stop, self._postponed = True, False
        if not self._epoch_ends and not _validates(trainer, number):
            self._save_if_stopping(trainer)

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Saves if training ends here, after a validation within an epoch."""
        if not trainer.sanity_checking and not self._epoch_ends:
            _agree(trainer)
            self._save_if_stopping(trainer)

    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Saves; stops unless that was the last epoch."""
        # Lightning calls this where it stops within an epoch too, and counts the epoch as finished: a checkpoint written here
        # would leave its rest out.
        if trainer.fast_dev_run or not self._epoch_ends:  # type: ignore[attr-defined]
            return
        steps, epochs = trainer.max_steps, trainer.max_epochs
        finished = 0 <= steps <= trainer.global_step or (epochs is not None and 0 <= epochs <= trainer.current_epoch + 1)
        _agree(trainer)
        if self._request.agreed and not finished:
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
        self._request.ask(signum)
        # From here on Ctrl-C does what it does to any program.
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        print(
            f"\n{signal.Signals(signum).name}: finishing this step, then saving a checkpoint (Ctrl-C again kills at once)",
            file=sys.stderr,
            flush=True,
        )

    def file(self, trainer: Trainer) -> Path:
        """Where this trainer's last checkpoint is written."""
        return self.path or Path(trainer.default_root_dir) / "checkpoints" / "last.ckpt"

    def _save_if_stopping(self, trainer: Trainer) -> None:
        if self._pending:
            # Pending gradients are in no checkpoint: training goes on to the optimizer step that uses them.
            if trainer.should_stop:
                trainer.should_stop, self._postponed = False, True
        # Once a step: a stop that was asked for brings about a validation that is not due, and a checkpoint written behind it
        # would be taken for one of a validation that is.
        elif self._saved != trainer.global_step:
            if self._request.agreed:
                self._stop(trainer)
            if _stops(trainer) and not trainer.fast_dev_run:  # type: ignore[attr-defined]
                self._save(trainer)
                self._saved = trainer.global_step

    def _save(self, trainer: Trainer) -> Path:
        path = self.file(trainer)
        trainer.save_checkpoint(path, weights_only=False)
        return path

    def _stop(self, trainer: Trainer) -> None:
        raise TrainingInterrupted(self._save(trainer), self._request.agreed)

    def _restore(self) -> None:
        for signum, handler in self._previous.items():
            signal.signal(signum, handler)
        self._previous.clear()


def _agree(trainer: Trainer) -> None:
    """Asks all ranks for signals, where the next batches are too far off to bring word of them."""
    if isinstance(trainer.strategy, TurboGRStrategy):
        trainer.strategy.agree_to_stop()


def _stops(trainer: Trainer) -> bool:
    """Whether Lightning ends training after this step, wherever in the epoch it is."""
    loop = trainer.fit_loop
    return 0 <= trainer.max_steps <= trainer.global_step or (trainer.should_stop and loop._can_stop_early)


def _validates(trainer: Trainer, number: int) -> bool:
    """Whether validation is due after an epoch's batch `number`, counted from 1."""
    # None: validation goes by the clock, and a stop may then fall between a step and its validation
    if not trainer.enable_validation or trainer.val_check_batch is None:
        return False
    every = trainer.check_val_every_n_epoch
    if every is None:
        number = trainer.fit_loop.total_batch_idx + 1
    elif (trainer.current_epoch + 1) % every:
        return False
    return number % trainer.val_check_batch == 0
