"""What balancing changes on gloo ranks: the measured half of balance.py."""

from __future__ import annotations

import itertools
import logging
import os
import statistics
import tempfile
import time
import warnings
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import numpy as np
import torch
import torch.distributed as dist
from _ranks import run_on_ranks
from _report import Report
from movielens import turbogr

from turbogr.batch import JaggedBatch
from turbogr.data.balance import imbalance
from turbogr.data.datamodule import SequenceDataModule
from turbogr.models.hstu import HSTU
from turbogr.models.retriever import GenerativeRetriever
from turbogr.sparse.optimizers import LazyAdam
from turbogr.sparse.table import EmbeddingTable
from turbogr.strategies.turbogr import TurboGRStrategy

METRIC = "HR@10"
USERS, LENGTH, DIM, BLOCKS, HEADS, NEGATIVES, DROPOUT = 8, 1024, 128, 4, 4, 128, 0.2
SIDES = ("off", "tokens")


@dataclass
class Fit:
    """What one rank saw of one training.

    Attributes:
        wall: seconds of each step, from the end of the one before.
        busy: seconds of processor time in the same, of this rank.
        tokens: trained in each step.
        users: int64, one array a step.
        metrics: of validation behind the last epoch.
    """

    wall: list[float] = field(default_factory=list)
    busy: list[float] = field(default_factory=list)
    tokens: list[int] = field(default_factory=list)
    users: list[list[int]] = field(default_factory=list)
    metrics: dict[str, float] = field(default_factory=dict)


class Watch(pl.Callback):
    """Fills in a Fit; the first step of an epoch, which has no step before it, is left out of the times."""

    def __init__(self) -> None:
        self.fit = Fit()
        self._last: tuple[float, float] | None = None

    def on_train_epoch_start(self, *_: Any) -> None:
        """No step before the first."""
        self._last = None

    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, outputs: Any, batch: Any, index: int
    ) -> None:
        """One step."""
        assert isinstance(batch, JaggedBatch)
        now = (time.perf_counter(), time.process_time())
        wall, busy = (float("nan"), float("nan")) if self._last is None else (now[0] - self._last[0], now[1] - self._last[1])
        self.fit.wall.append(wall)
        self.fit.busy.append(busy)
        self.fit.tokens.append(batch.num_tokens)
        self.fit.users.append(batch.user_ids.tolist())
        self._last = now


def train(data: Path, seed: int, balance: str, epochs: int, dropout: float) -> Fit:
    """On this rank."""
    rank = dist.get_rank()
    os.environ |= {"LOCAL_RANK": str(rank), "NODE_RANK": "0"}
    warnings.filterwarnings("ignore")
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    torch.manual_seed(seed)
    module = SequenceDataModule(data, USERS, LENGTH, NEGATIVES, seed=seed, num_workers=0, balance=balance)  # type: ignore[arg-type]
    backbone = HSTU(DIM, BLOCKS, HEADS, max_length=LENGTH, dropout=dropout)
    model = GenerativeRetriever(module.num_items, backbone, EmbeddingTable(LazyAdam(1e-3)))
    watch = Watch()
    trainer = pl.Trainer(
        strategy=TurboGRStrategy(mode="sync"),
        accelerator="cpu",
        devices=dist.get_world_size(),
        max_epochs=epochs,
        check_val_every_n_epoch=epochs,
        num_sanity_val_steps=0,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        callbacks=[watch],
    )
    trainer.fit(model, module)
    watch.fit.metrics = {name: float(value) for name, value in trainer.callback_metrics.items()}
    return watch.fit


def all_fits(data: Path, seeds: list[int], epochs: int) -> dict[str, list[Fit]]:
    """On this rank, for each side a fit a seed, the sides in turns."""
    train(data, 0, "off", 1, DROPOUT)  # warms up
    fits: dict[str, list[Fit]] = {side: [] for side in SIDES}
    for number, seed in enumerate(seeds):
        for side in SIDES if number % 2 == 0 else SIDES[::-1]:
            fits[side].append(train(data, seed, side, epochs, DROPOUT))
    return fits


def prepared(data: Path, scratch: Path) -> tuple[Path, str]:
    """A prepared folder and what it holds: MovieLens latest-small where it is found, else drawn histories of such lengths."""
    out, raw = scratch / "prepared", data / "ml-latest-small"
    if (raw / "ratings.csv").is_file():
        turbogr("data", "prepare", "movielens", str(raw), "--out", str(out))
        return out, "MovieLens latest-small"
    rng = np.random.default_rng(0)
    lengths = np.clip(rng.lognormal(4.4, 1.1, 610), 20, 2698).astype(int)
    lines = [" ".join(map(str, [user, *(9724 * rng.random(n) ** 2).astype(int)])) for user, n in enumerate(lengths)]
    (scratch / "drawn.txt").write_text("\n".join(lines) + "\n")
    turbogr("data", "prepare", "sequences", str(scratch / "drawn.txt"), "--out", str(out))
    return out, "drawn histories (MovieLens latest-small was not found)"


def measurement(report: Report, data: Path, quick: bool) -> None:
    """Adds what is measured on 2 and 4 ranks."""
    seeds, epochs = ([1], 1) if quick else ([1, 2, 3], 2)
    with tempfile.TemporaryDirectory() as scratch:
        folder, name = prepared(data, Path(scratch))
        report.note(f"Measured: {name}, at most {LENGTH} tokens, {USERS} users a rank; HSTU of width {DIM}, {BLOCKS} blocks.")
        report.note(f"{len(seeds)} seeds, {epochs} epochs; one thread a rank on {os.cpu_count()} cores; mode sync.")
        for ranks in (2,) if quick else (2, 4):
            add_measured(report, run_on_ranks(all_fits, ranks, folder, seeds, epochs, timeout_s=900.0))


def add_measured(report: Report, found: list[dict[str, list[Fit]]]) -> None:
    """Rows of what the ranks saw.

    Raises:
        SystemExit: if a step did not train the same users on both sides.
    """
    ranks = len(found)
    wall, busy, waits, metrics = {}, {}, {}, {}
    for side in SIDES:
        fits = [each[side] for each in found]
        wall[side] = np.array([fit.wall for fit in fits[0]]).ravel()
        busy[side] = np.array([[fit.busy for fit in rank] for rank in fits]).reshape(ranks, -1)
        tokens = np.array([[fit.tokens for fit in rank] for rank in fits]).reshape(ranks, -1)
        waits[side] = imbalance(tokens.T)
        metrics[side] = [fit.metrics[f"val/{METRIC}"] for fit in fits[0]]
    trained = {side: _users(found, side) for side in SIDES}
    if trained["off"] != trained["tokens"]:
        raise SystemExit(f"{ranks} ranks: with and without balancing the steps did not train the same users")
    timed = ~np.isnan(wall["off"])
    off, on = (wall[side][timed] for side in SIDES)
    report.add(f"{ranks} ranks: step", 1000 * float(np.median(on)), "ms", baseline=1000 * float(np.median(off)))
    report.add(f"{ranks} ranks: speed, median of ratios step by step", statistics.median(off / on), "x")
    heaviest = {side: busy[side][:, timed].max(0) for side in SIDES}
    ratio = statistics.median(heaviest["off"] / heaviest["tokens"])
    report.add(f"{ranks} ranks: speed by the processor time of each step's busiest rank", ratio, "x", at_least=1.0)
    report.add(f"{ranks} ranks: token difference", waits["tokens"].difference, "tokens", baseline=waits["off"].difference)
    report.add(f"{ranks} ranks: tokens' time wasted", waits["tokens"].wasted, "%", baseline=waits["off"].wasted)
    values = [statistics.mean(metrics[side]) for side in SIDES]
    report.add(f"{ranks} ranks: {METRIC} of validation, mean over seeds", values[1], "", baseline=values[0])
    if len(metrics["off"]) > 1:
        noise = max(float(np.ptp(metrics["off"])), 1e-9)
        report.add(f"{ranks} ranks: its difference, in ranges over seeds", abs(values[1] - values[0]) / noise, "", at_most=1.0)


def _users(found: list[dict[str, list[Fit]]], side: str) -> list[list[int]]:
    """Users of every step of every fit, whoever trained them."""
    fits = zip(*(rank[side] for rank in found), strict=True)
    return [
        sorted(itertools.chain.from_iterable(step)) for fit in fits for step in zip(*(rank.users for rank in fit), strict=True)
    ]
