"""ReplaceEarlierRun: deletes the files of an earlier run once the new one has really begun."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from lightning.pytorch import Callback, LightningModule, Trainer

from turbogr.checkpoints import remove


class ReplaceEarlierRun(Callback):
    """Deletes files as training starts: a run that fails before its first step leaves the earlier one as it was.

    Must stand before callbacks that write in `on_train_start`.

    Args:
        files: what the earlier run left, checkpoints that are directories included, listed before the new one writes anything.
    """

    def __init__(self, files: Sequence[Path]) -> None:
        self.files = tuple(files)

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Deletes them."""
        if trainer.is_global_zero:
            for file in self.files:
                remove(file)
