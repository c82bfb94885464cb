"""Bytes of embeddings that are alive during training: rows, their gradients, and what is sent or received of them."""

from __future__ import annotations

import gc
from typing import Any

import lightning.pytorch as pl
import torch
from torch import nn

from tests.distributed.strategy_cases import QUIET, SizedBatches, Toy
from turbogr.sparse.table import EmbeddingTable
from turbogr.strategies import TurboGRStrategy

WIDTH = 24
"""By which embeddings are known."""


class Wide(Toy):
    """The same with rows of a width that nothing else has."""

    def __init__(self) -> None:
        super().__init__()
        self.embeddings = EmbeddingTable()
        self.embeddings.allocate(30, WIDTH)
        self.layer = nn.Linear(WIDTH, 1)


class Hoarding(Wide):
    """Keeps all rows that it ever got."""

    def __init__(self) -> None:
        super().__init__()
        self.hoard: list[torch.Tensor] = []

    def training_step(self, batch, batch_idx):
        self.hoard.append(self.embeddings(self.sparse_features(batch)).rows)
        return super().training_step(batch, batch_idx)


class Weigh(pl.Callback):
    """Looks at all tensors of the process wherever Lightning calls.

    Attributes:
        peak: most bytes at one time, without the tables themselves.
    """

    def __init__(self) -> None:
        self.peak = 0
        self._others: set[int] = set()

    def on_train_start(self, trainer, pl_module):
        self._others = set(embeddings())  # the tables, and what earlier trainers left

    def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
        self._look()

    def on_before_zero_grad(self, trainer, pl_module, optimizer):
        self._look()

    def on_before_backward(self, trainer, pl_module, loss):
        self._look()

    def on_after_backward(self, trainer, pl_module):
        self._look()

    def on_before_optimizer_step(self, trainer, pl_module, optimizer):
        self._look()

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        self._look()

    def _look(self) -> None:
        self.peak = max(self.peak, sum(size for pointer, size in embeddings().items() if pointer not in self._others))


def embeddings() -> dict[int, int]:
    """Address -> bytes of everything alive that is as wide as an embedding."""
    storages = {}
    for thing in gc.get_objects():
        if issubclass(type(thing), torch.Tensor):
            for tensor in (thing, thing.grad if thing.is_leaf else None):
                if tensor is not None and tensor.dim() == 2 and tensor.shape[1] == WIDTH and tensor.is_floating_point():
                    storage = tensor.untyped_storage()
                    storages[storage.data_ptr()] = storage.nbytes()
    return storages


def peaks(ranks: int, rank: int) -> dict[str, Any]:
    """Bytes at the peak, by what is in flight; and bytes of a batch's embeddings, at most."""
    found: dict[str, Any] = {"batch": 5 * WIDTH * 4}
    modes = (("sync", 6, Wide), ("semi_async", 6, Wide), ("semi_async", 2, Wide), ("semi_async", 8, Wide))
    for mode, in_flight, module in (*modes, ("semi_async", 6, Hoarding)):
        gc.collect()
        weigh = Weigh()
        strategy = TurboGRStrategy(mode=mode, batches_in_flight=in_flight, timeout_s=60)
        options = {"max_epochs": 1, "enable_checkpointing": False, "devices": ranks, "callbacks": [weigh]}
        pl.Trainer(**QUIET, **options, strategy=strategy).fit(module(), SizedBatches(16, rank))
        found["hoarded" if module is Hoarding else f"{mode}, {in_flight}"] = weigh.peak
    return found
