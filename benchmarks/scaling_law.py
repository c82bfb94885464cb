"""Scaling law of TurboGR's equation 1: Q(C) ~ Q(C0) + s log4(C / C0), for HSTU of four sizes on MovieLens-100K.

C: floating-point operations of training, forward and backward of all epochs, counted as turbogr/flops.py does. Every size sees
the same events in the same number of epochs. Q: by how much the test items' log loss is better than popularity's, relative to
it, at the epoch that is best on validation. The log loss is that of a softmax over the whole catalogue at the training's
temperature; popularity's probabilities are the training events' counts, plus one.

The fit is printed, and drawn with `--png`; finished sizes are kept in a file of JSON lines, as in yardsticks.py, and are not
repeated.
"""

from __future__ import annotations

import argparse
import logging
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import turbogr  # before torch: its OpenMP settings

import lightning.pytorch as pl  # isort: skip
import numpy as np
import torch
from _report import Report, parse_arguments
from _results import CHECKOUT, PAGE, RESULTS, add_row, markdown_table, read_rows, write_section
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from movielens import prepared
from torch import Tensor
from torch.nn import functional as F
from torch.utils.flop_counter import FlopCounterMode

import turbogr.flops  # registers what our operators take
from turbogr.batch import JaggedBatch
from turbogr.data.datamodule import SequenceDataModule
from turbogr.files import replace_file
from turbogr.models.hstu import HSTU
from turbogr.models.retriever import GenerativeRetriever

SIZES = {"D 16, 2 blocks": (16, 2), "D 32, 2 blocks": (32, 2), "D 64, 2 blocks": (64, 2), "D 128, 4 blocks": (128, 4)}
EPOCHS, QUICK_EPOCHS = 25, 1
SEEDS = (1, 2)
TEMPERATURE = 0.05
DROPOUT = 0.5
"""With 0.2 the largest sizes overfit this little data set within a few epochs."""
PNG = CHECKOUT / "docs" / "images" / "scaling_law.png"


@dataclass(frozen=True)
class Law:
    """Q(C) ~ quality + gain * log4(C / compute).

    Attributes:
        compute: C0, in floating-point operations.
        quality: Q(C0).
        gain: s, for four times the compute.
        r_squared: how much of Q's variance it explains.
    """

    compute: float
    quality: float
    gain: float
    r_squared: float

    def __call__(self, compute: float) -> float:
        """Q(C)."""
        return self.quality + self.gain * float(np.log(compute / self.compute) / np.log(4))


def fit_law(compute: Sequence[float], quality: Sequence[float]) -> Law:
    """Least squares; C0 is the smallest compute.

    Raises:
        ValueError: if there are not two different computes, or one is not positive.
    """
    if len(set(compute)) < 2 or min(compute) <= 0:
        raise ValueError(f"the law is fitted to at least two different positive computes, got {list(compute)}")
    steps = np.log(np.array(compute) / min(compute)) / np.log(4)
    values = np.array(quality)
    gain, first = np.polyfit(steps, values, 1)
    rest, spread = ((values - first - gain * steps) ** 2).sum(), ((values - values.mean()) ** 2).sum()
    return Law(min(compute), float(first), float(gain), float(1 - rest / spread) if spread else 1.0)


@dataclass(frozen=True)
class LogLosses:
    """Mean log loss of the held-out items after an epoch."""

    validation: float
    test: float
    epoch: int


class Watch(pl.Callback):
    """Counts the operations of the first epoch, and after every epoch takes the log loss of validation and test items.

    Attributes:
        operations: of one epoch.
        best: the epoch with the least log loss on validation.
    """

    def __init__(self, data: SequenceDataModule) -> None:
        self.data, self.operations, self.best = data, 0, LogLosses(float("inf"), float("inf"), 0)
        self._counter: FlopCounterMode | None = None

    def on_train_batch_start(self, trainer: pl.Trainer, module: pl.LightningModule, batch: JaggedBatch, index: int) -> None:
        """Begins to count."""
        if not trainer.current_epoch:
            self._counter = FlopCounterMode(display=False).__enter__()

    def on_train_batch_end(
        self, trainer: pl.Trainer, module: pl.LightningModule, outputs: Any, batch: JaggedBatch, index: int
    ) -> None:
        """Ends."""
        if self._counter is not None:
            self._counter.__exit__(None, None, None)
            self.operations += self._counter.get_total_flops()
            self._counter = None

    def on_train_epoch_end(self, trainer: pl.Trainer, module: pl.LightningModule) -> None:
        """Takes both losses."""
        assert isinstance(module, GenerativeRetriever)
        module.eval()
        losses = [mean_log_loss(module, loader) for loader in (self.data.val_dataloader(), self.data.test_dataloader())]
        module.train()
        if losses[0] < self.best.validation:
            self.best = LogLosses(losses[0], losses[1], trainer.current_epoch + 1)


@torch.no_grad()
def mean_log_loss(module: GenerativeRetriever, batches: Any) -> float:
    """Of the held-out items, over the whole catalogue at the training's temperature."""
    items = F.normalize(module.item_vectors(), dim=1)
    losses = [F.cross_entropy(module.queries(b) @ items.T / TEMPERATURE, b.targets[b.last], reduction="none") for b in batches]
    return float(torch.cat(losses).mean())


def popularity_log_loss(data: SequenceDataModule) -> float:
    """Of the test items, with the counts of the training events, plus one, as probabilities."""
    counts = torch.ones(data.num_items, dtype=torch.float64)
    for batch in data.train_dataloader():
        counts += torch.bincount(batch.targets, minlength=data.num_items)
    chances = (counts / counts.sum()).log()
    targets: list[Tensor] = [batch.targets[batch.last] for batch in data.test_dataloader()]
    return float(-chances[torch.cat(targets)].mean())


def train(folder: Path, size: str, seed: int, epochs: int) -> dict[str, Any]:
    """Trains one size; returns its row."""
    pl.seed_everything(seed, verbose=False)
    dim, blocks = SIZES[size]
    data = SequenceDataModule(folder, batch_size=32, max_length=200)
    data.setup("fit")
    data.setup("test")
    model = GenerativeRetriever(data.num_items, HSTU(dim=dim, num_blocks=blocks, max_length=200, dropout=DROPOUT))
    watch, started = Watch(data), time.process_time()
    trainer = pl.Trainer(
        max_epochs=epochs,
        accelerator="cpu",
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        limit_val_batches=0,
        callbacks=[watch],
    )
    trainer.fit(model, data)
    return {
        "size": size,
        "seed": seed,
        "epochs": epochs,
        "dense": sum(p.numel() for name, p in model.backbone.named_parameters() if name.startswith("blocks.")),
        "compute": watch.operations * epochs,
        **asdict(watch.best),
        "popularity": popularity_log_loss(data),
        "cpu_seconds": round(time.process_time() - started, 1),
        "turbogr": turbogr.__version__,
    }


def quality(row: dict[str, Any]) -> float:
    """Q: relative to popularity."""
    return 1 - row["test"] / row["popularity"]


def law_of(rows: Sequence[dict[str, Any]]) -> Law:
    """Fitted to all rows."""
    return fit_law([row["compute"] for row in rows], [quality(row) for row in rows])


def draw(rows: Sequence[dict[str, Any]], law: Law, path: Path) -> None:
    """Q over C with the fitted line."""
    figure = Figure((6.4, 4.0), dpi=120, layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    compute = np.array([row["compute"] for row in rows])
    axes.plot(compute, [quality(row) for row in rows], "o", color="#2563eb", label="HSTU, one point a seed")
    ends = np.geomspace(compute.min(), compute.max(), 2)
    label = f"Q = {law.quality:.4f} + {law.gain:.4f} log4(C / C0)"
    axes.plot(ends, [law(end) for end in ends], color="#7b8794", label=label)
    axes.set_xscale("log", base=4)
    axes.set(xlabel="C: operations of training", ylabel="Q: log loss, relative gain over popularity")
    axes.legend(frameon=False)
    axes.spines[["top", "right"]].set_visible(False)
    path.parent.mkdir(parents=True, exist_ok=True)
    replace_file(path, lambda file: figure.savefig(file, format="png"))
    print(f"drawn to {path}")


def section(rows: Sequence[dict[str, Any]]) -> str:
    """The table and the fit as Markdown."""
    law = law_of(rows)
    lines = []
    for size in dict.fromkeys(row["size"] for row in rows):
        runs = [row for row in rows if row["size"] == size]
        predicted = law(runs[0]["compute"])
        lines.append(
            [
                size,
                f"{runs[0]['dense']:,}",
                f"{runs[0]['compute']:.3g}",
                " / ".join(f"{row['test']:.4f}" for row in runs),
                " / ".join(f"{quality(row):.4f}" for row in runs),
                f"{predicted:.4f}",
                " / ".join(str(row["epoch"]) for row in runs),
            ]
        )
    header = ["HSTU", "dense parameters", "C, FLOPs", "test log loss", "Q", "fit", "best epoch"]
    fit = f"Q(C) ≈ {law.quality:.4f} + {law.gain:.4f} · log4(C / {law.compute:.3g}), R² = {law.r_squared:.3f}"
    return f"{markdown_table(header, lines)}\n\n{fit}; popularity's log loss is {rows[0]['popularity']:.4f}."


def main() -> int:
    """Entry point."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--data", type=Path, help="a prepared folder, times in seconds; MovieLens-100K is fetched if not given")
    parser.add_argument("--results", type=Path, default=RESULTS / "scaling_law.jsonl", help="rows of finished runs, JSON lines")
    parser.add_argument("--png", type=Path, help="draw the points and the fit to this file")
    parser.add_argument("--page", action="store_true", help="write the table into docs/results.md and draw its picture")
    arguments = parse_arguments(parser)
    logging.getLogger("lightning.pytorch").setLevel(logging.WARNING)
    report = Report("scaling law", arguments.quick)
    with tempfile.TemporaryDirectory() as name:
        scratch = Path(name)
        results = scratch / "quick.jsonl" if arguments.quick else arguments.results
        seeds, sizes = (SEEDS[:1], list(SIZES)[:3]) if arguments.quick else (SEEDS, list(SIZES))
        done = {(row["size"], row["seed"]) for row in read_rows(results)}
        missing = [(size, seed) for seed in seeds for size in sizes if (size, seed) not in done]
        data = prepared(arguments.data, scratch) if missing else None
        for size, seed in missing:
            assert data is not None
            print(f"{size}, seed {seed}", file=sys.stderr, flush=True)
            add_row(results, train(data, size, seed, QUICK_EPOCHS if arguments.quick else EPOCHS))
        rows = sorted(read_rows(results), key=lambda row: (row["compute"], row["seed"]))
    law = law_of(rows)
    for size in dict.fromkeys(row["size"] for row in rows):
        runs = [row for row in rows if row["size"] == size]
        report.add(f"Q, HSTU {size}: {runs[0]['dense']:,} dense", statistics.fmean(map(quality, runs)), "")
        report.add(f"C, HSTU {size}", runs[0]["compute"] / 1e12, "TFLOP")
    report.add("s: gain in Q for four times the compute", law.gain, "")
    report.add("R² of the fit", law.r_squared, "")
    if arguments.png or arguments.page:
        draw(rows, law, arguments.png or PNG)
    if arguments.page:
        write_section(PAGE, "scaling law", section(rows))
    return report.finish(arguments.json)


if __name__ == "__main__":
    raise SystemExit(main())
