"""The losses of a backbone's first 30 steps, which `golden/*.json` hold.

    python -m tests.models.golden_curves

writes those files again. A change that alters them alters what is trained: say so where the change is described.
"""

from __future__ import annotations

import json
import tempfile
from pathlib import Path

import lightning.pytorch as pl
import torch

from tests.data.make import write_prepared
from turbogr.data.datamodule import SequenceDataModule
from turbogr.losses import SampledSoftmax
from turbogr.models.fuxi import FuXi
from turbogr.models.hstu import HSTU
from turbogr.models.retriever import GenerativeRetriever, published_adamw
from turbogr.models.sasrec import SASRec
from turbogr.sparse.optimizers import LazyAdam
from turbogr.sparse.table import EmbeddingTable

BACKBONES = {"hstu": HSTU, "fuxi": FuXi, "sasrec": SASRec}
FEATURES = {"author": ("item", 9), "tab": ("event", 4), "is_like": ("event", 3)}
CURVES = [*BACKBONES, *(f"hstu-{combine}" for combine in ("sum", "concat"))]
"""Backbones, and HSTU with features that are combined so."""
FOLDER = Path(__file__).parent / "golden"
COMMAND = "python -m tests.models.golden_curves"
STEPS, SEED = 30, 11
OPTIONS = {"dim": 16, "num_blocks": 2, "num_heads": 2, "max_length": 24, "dropout": 0.2}


class Losses(pl.Callback):
    """Collects the loss of every step."""

    def __init__(self) -> None:
        self.values: list[float] = []

    def on_train_batch_end(self, trainer, module, outputs, batch, batch_idx):
        self.values.append(float(outputs["loss"]))


def curve(name: str, backend: str = "auto", seed: int = SEED) -> list[float]:
    """Losses of `STEPS` steps on random histories: one thread, float32, everything seeded, dropout included."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        with tempfile.TemporaryDirectory() as folder:
            return _curve(Path(folder), name, backend, seed)
    finally:
        torch.set_num_threads(threads)


def _curve(folder: Path, name: str, backend: str, seed: int) -> list[float]:
    name, _, combine = name.partition("-")
    features = FEATURES if combine else None
    path = write_prepared(folder / "prepared", num_users=80, num_items=120, min_len=3, max_len=30, seed=3, features=features)
    data = SequenceDataModule(str(path), batch_size=8, max_length=24, num_negatives=16, num_workers=0, seed=seed)
    torch.manual_seed(seed)
    model = GenerativeRetriever(
        120,
        BACKBONES[name](**OPTIONS, backend=backend),
        EmbeddingTable(LazyAdam(lr=1e-3), backend=backend),
        SampledSoftmax(backend=backend),
        published_adamw,
        top_k=(10,),
        seed=seed,
        features=data.features,
        combine=combine or "sum",
    )
    losses = Losses()
    trainer = pl.Trainer(
        max_epochs=-1,
        max_steps=STEPS,
        accelerator="cpu",
        callbacks=[losses],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        default_root_dir=folder,
        limit_val_batches=0,
    )
    trainer.fit(model, data)
    return losses.values


def stored(name: str) -> list[float]:
    """What the file holds."""
    return json.loads((FOLDER / f"{name}.json").read_text())["losses"]


def main() -> None:
    """Writes all files."""
    for name in CURVES:
        content = {"written_by": COMMAND, "losses": [round(loss, 6) for loss in curve(name, backend="torch")]}
        (FOLDER / f"{name}.json").write_text(json.dumps(content, indent=1) + "\n")


if __name__ == "__main__":
    main()
