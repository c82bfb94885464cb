"""Runs on every rank: a model with features of events and items, trained and tested under TurboGRStrategy."""

from __future__ import annotations

import os
import sys
from functools import partial
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from torch.nn.parallel import DistributedDataParallel

from tests.data.make import write_prepared
from tests.distributed.launch import report_checks
from tests.distributed.strategy_cases import QUIET, TOGETHER, adam, digest, sync
from turbogr.data.datamodule import SequenceDataModule
from turbogr.models.hstu import HSTU
from turbogr.models.retriever import GenerativeRetriever
from turbogr.sparse.optimizers import LazyAdam
from turbogr.sparse.table import EmbeddingTable

FEATURES = {"author": ("item", 17), "tab": ("event", 5), "tag": ("item", 6)}
CASES: dict[str, dict[str, Any]] = {
    "2 groups of 2": {"groups": 2},
    "1 group of 4": {"groups": 1},
    "table-wise": {"groups": 1, "sharding": "table_wise"},
}


class Synced(pl.Callback):
    """Notes the buffers that DDP broadcasts before every forward pass."""

    shapes: list[list[int]] | None = None

    def on_train_start(self, trainer, pl_module):
        if isinstance(trainer.strategy.model, DistributedDataParallel):
            self.shapes = [list(buffer.shape) for buffer in trainer.strategy.model.modules_buffers]


def make(folder: Path) -> Path:
    return write_prepared(folder, num_users=110, num_items=61, max_len=20, seed=1, features=FEATURES)


def trained(folder: Path, ranks: int, strategy: Any, out: Path, **data: Any) -> dict[str, Any]:
    """Trains and tests; writes a gathered checkpoint to `out`."""
    pl.seed_everything(7)
    options = {"batch_size": TOGETHER // ranks, "max_length": 20, "num_negatives": 6, "num_workers": 0, "eval_batch_size": 8}
    module = SequenceDataModule(folder, **{**options, **data})
    model = GenerativeRetriever(
        module.num_items,
        HSTU(dim=8, num_blocks=1, num_heads=2, max_length=20, dropout=0.0),
        EmbeddingTable(LazyAdam(1e-2)),
        optimizer=adam,
        top_k=(1, 10),
        features=module.features,
        combine="concat",
    )
    synced = Synced()
    trainer = pl.Trainer(
        **QUIET,
        max_epochs=2,
        limit_val_batches=1,
        enable_checkpointing=False,
        devices=ranks,
        strategy=strategy,
        callbacks=[synced],
    )
    trainer.fit(model, module)
    trainer.save_checkpoint(out)
    (result,) = trainer.test(model, module, verbose=False)
    return {"test": result, "synced": synced.shapes}


def case(name: str, folder: Path, ranks: int, out: Path) -> dict[str, Any]:
    strategy = sync(timeout_s=60, **CASES[name])
    return {
        **trained(folder, ranks, strategy, out / f"{name}.ckpt"),
        "member": strategy.topology.member,
        "digest": digest(strategy),
    }


if __name__ == "__main__":
    prepared, target, world = Path(sys.argv[1]), Path(sys.argv[2]), int(os.environ["WORLD_SIZE"])
    torch.set_num_threads(1)
    report_checks({name: partial(case, name, prepared, world, target) for name in CASES})
