"""Trains on two ranks through the Trainer, stops within an epoch, and goes on from checkpoints of either form.

Argument: the folder that the launch shares with the test; it holds `data`, and `auto.ckpt` of one process.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch

from tests.distributed.launch import report_checks
from tests.distributed.strategy_cases import sync
from turbogr.callbacks.resume import LastCheckpoint
from turbogr.data.datamodule import SequenceDataModule
from turbogr.models.hstu import HSTU
from turbogr.models.retriever import GenerativeRetriever
from turbogr.sparse.optimizers import AdaGrad
from turbogr.sparse.table import EmbeddingTable

STOP, END = 5, 9
"""Optimizer steps: of three an epoch."""


def fit(folder: Path, batch_size: int, steps: int, ckpt_path: Path | None, save_to: Path, **options: Any) -> float:
    """Trains until `steps`, saves, and returns the dense learning rate."""
    pl.seed_everything(3)
    data = SequenceDataModule(str(folder / "data"), batch_size=batch_size, max_length=16, num_negatives=10, num_workers=0)
    model = GenerativeRetriever(
        data.num_items,
        HSTU(dim=16, max_length=16, dropout=0.0),
        EmbeddingTable(AdaGrad(0.1)),
        optimizer=lambda parameters: torch.optim.AdamW(parameters, lr=1e-2),
        scheduler=lambda optimizer: torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9),
        top_k=(1, 10),
    )
    trainer = pl.Trainer(
        default_root_dir=folder,
        accelerator="cpu",
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        num_sanity_val_steps=0,
        max_epochs=3,
        max_steps=steps,
        callbacks=[LastCheckpoint(save_to)],
        **options,
    )
    trainer.fit(model, data, ckpt_path=ckpt_path)
    return float(trainer.optimizers[0].param_groups[0]["lr"])


def on_ranks(folder: Path, steps: int, ckpt_path: str | None, save_to: str, **options: Any) -> float:
    """The same on two ranks."""
    start = None if ckpt_path is None else folder / ckpt_path
    return fit(folder, 8, steps, start, folder / save_to, devices=2, strategy=sync(timeout_s=30.0, **options))


def main(folder: Path) -> None:
    checks = {
        "uninterrupted": lambda: on_ranks(folder, END, None, "whole.ckpt"),
        "directory": lambda: on_ranks(folder, STOP, None, "directory.ckpt", checkpoint="distributed"),
        "file": lambda: on_ranks(folder, STOP, None, "file.ckpt"),
        "from the directory": lambda: on_ranks(folder, END, "directory.ckpt", "from_directory.ckpt"),
        "from the file": lambda: on_ranks(folder, END, "file.ckpt", "from_file.ckpt", sharding="table_wise", groups=2),
        "from one process": lambda: on_ranks(folder, END, "auto.ckpt", "from_auto.ckpt", sharding="table_wise"),
    }
    report_checks(checks, backend="")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
