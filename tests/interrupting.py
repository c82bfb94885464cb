"""A callback for tests: sends this process a real signal in the middle of a chosen step."""

import os
import signal

from lightning.pytorch import Callback


class SignalAt(Callback):
    """Sends signals when step `step` has been drawn and before it is computed.

    Args:
        step: optimizer steps taken before.
        name: of the signal.
        times: how often it is sent.
        group: to the whole process group, as a terminal does, and so to the loader's workers as well.
    """

    def __init__(self, step: int, name: str = "SIGINT", times: int = 1, group: bool = False) -> None:
        self.step, self.signum, self.times, self.group = step, signal.Signals[name], times, group
        self.sent = False  # with accumulated gradients several batches have one step

    def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
        if trainer.global_step != self.step or self.sent:
            return
        self.sent = True
        for _ in range(self.times):
            if self.group:
                os.killpg(os.getpgrp(), self.signum)
            else:
                os.kill(os.getpid(), self.signum)
