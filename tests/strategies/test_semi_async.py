"""TurboGRStrategy in mode semi_async, on one rank, is a hand-written loop with tau = 1, bit for bit."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader

from tests.data.make import write_prepared
from tests.distributed.strategy_cases import QUIET, SizedBatches, Toy, build
from tests.strategies import by_hand
from tests.strategies.test_one_rank import Skipping, Stateful, Stream
from turbogr.strategies import TurboGRStrategy

BATCHES = 9
"""Of an epoch: more than are ever in flight."""
IN_FLIGHT = range(2, 9)


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("prepared") / "p"
    return write_prepared(path, num_users=8 * BATCHES - 3, num_items=40, min_len=5, max_len=12, seed=1)


class Metrics(pl.Callback):
    """Keeps those of every validation."""

    def __init__(self) -> None:
        self.found: list[dict[str, float]] = []

    def on_validation_end(self, trainer, pl_module):
        metrics = trainer.callback_metrics
        self.found.append({name: float(value) for name, value in metrics.items() if name.startswith("val/")})


def fit(model: pl.LightningModule, data: Any, strategy: TurboGRStrategy, **options: Any) -> dict[str, Any]:
    """What a training leaves behind, as `by_hand.train` returns it."""
    metrics = Metrics()
    settings = {"max_epochs": 2, "enable_checkpointing": False, "limit_val_batches": 0, **options}
    trainer = pl.Trainer(**QUIET, devices=1, strategy=strategy, callbacks=[metrics], **settings)
    trainer.fit(model, data)
    return {"tensors": by_hand.tensors(model, trainer.optimizers[0]), "metrics": metrics.found}


def differing(one: dict[str, Any], other: dict[str, Any]) -> list[str]:
    """Names of what is not bit for bit the same."""
    assert one["tensors"].keys() == other["tensors"].keys()
    found = [name for name, tensor in one["tensors"].items() if not torch.equal(tensor, other["tensors"][name])]
    return found + ["metrics"] * (one["metrics"] != other["metrics"])


def seeded(epoch: int, batch: int) -> None:
    """As GenerativeRetriever seeds its dropout."""
    torch.manual_seed(int(np.random.SeedSequence([7, epoch, batch]).generate_state(1, np.uint64)[0]))


# Options of the trainer, of the strategy and of the model; the same for the loop by hand.
REAL: dict[str, tuple[dict[str, Any], dict[str, Any], dict[str, Any], dict[str, Any]]] = {
    "lazy_adam": ({}, {}, {}, {}),
    "adagrad": ({}, {}, {"rows": "adagrad"}, {}),
    "accumulated": ({"accumulate_grad_batches": 2}, {}, {}, {"accumulate": 2}),
    "accumulated and clipped": (
        {"accumulate_grad_batches": 4, "gradient_clip_val": 0.05},
        {"sparse_clip_norm": 0.01},
        {"rows": "row_wise_adagrad"},
        {"accumulate": 4, "clip": 0.05, "sparse_clip": 0.01},
    ),
    "clipped": (
        {"gradient_clip_val": 0.05},
        {"sparse_clip_norm": 0.01},
        {"rows": "adagrad"},
        {"clip": 0.05, "sparse_clip": 0.01},
    ),
    "scheduled": ({}, {"sparse_lr": "follow"}, {"scheduled": True}, {"follow": True}),
    "scheduled and accumulated": (
        {"accumulate_grad_batches": 2},
        {"sparse_lr": "follow"},
        {"scheduled": True},
        {"follow": True, "accumulate": 2},
    ),
    "validated": ({"val_check_interval": 2, "limit_val_batches": 1.0}, {}, {}, {"every": 2}),
    "validated within accumulation": (
        {"val_check_interval": 3, "limit_val_batches": 1.0, "accumulate_grad_batches": 2},
        {},
        {},
        {"every": 3, "accumulate": 2},
    ),
    "bf16-mixed": ({"precision": "bf16-mixed"}, {}, {}, {"autocast": True}),
}


def real(folder: Path, name: str, in_flight: int = 6, mode: str = "semi_async", workers: int = 0) -> dict[str, Any]:
    options, strategy, model_options, _ = REAL[name]
    model, data = build(folder, 1, dropout=0.2, batch_size=8, num_workers=workers, **model_options)
    return fit(model, data, TurboGRStrategy(mode=mode, batches_in_flight=in_flight, **strategy), **options)


def real_by_hand(folder: Path, name: str, **changes: Any) -> dict[str, Any]:
    *_, model_options, options = REAL[name]
    model, data = build(folder, 1, dropout=0.2, batch_size=8, **model_options)
    data.setup("fit")
    validation = list(data.val_dataloader())
    assert len(data.train_dataloader()) == BATCHES
    return by_hand.train(model, data.train_dataloader(), seed=seeded, validation=validation, **{**options, **changes})


@pytest.mark.parametrize("name", REAL)
def test_a_model_with_dropout_on_a_prepared_folder(folder, name):
    """Weights, rows, state of both optimizers, and what evaluation sees: of the mode, and of no other delay."""
    expected = real_by_hand(folder, name)
    assert ("every" in REAL[name][3]) == bool(expected["metrics"])
    assert differing(real(folder, name), expected) == []
    for tau in (0, 2):
        late = real_by_hand(folder, name, tau=tau)
        assert {"embeddings.weight", "optimizer, 0, exp_avg"} <= set(differing(late, expected))
        assert (differing(real(folder, name, mode="sync"), late) == []) == (tau == 0)


@pytest.mark.parametrize("name", ["scheduled and accumulated", "validated"])
def test_it_does_not_depend_on_how_many_are_in_flight_nor_on_workers(folder, name):
    expected = real_by_hand(folder, name)
    for in_flight in IN_FLIGHT:
        assert differing(real(folder, name, in_flight), expected) == [], in_flight
    assert differing(real(folder, name, workers=2), expected) == []


# Modules and loaders of one's own.

LONG: dict[str, Any] = {
    "sized": lambda: SizedBatches(BATCHES, 1),
    "shuffled": lambda: DataLoader(list(SizedBatches(BATCHES, 1)), batch_size=None, shuffle=True),
    "worker": lambda: DataLoader(list(SizedBatches(BATCHES, 1)), batch_size=None, shuffle=True, num_workers=1),
    "unsized": lambda: DataLoader(Stream(BATCHES), batch_size=None),
    "unsized, worker": lambda: DataLoader(Stream(BATCHES), batch_size=None, num_workers=1),
    "stateful": lambda: Stateful(BATCHES, 1),
}


def toy(kind: type[Toy], loader: Any, strategy: TurboGRStrategy, **options: Any) -> dict[str, Any]:
    pl.seed_everything(3)
    return fit(kind(), loader, strategy, **options)


def toy_by_hand(kind: type[Toy], loader: Any, **options: Any) -> dict[str, Any]:
    pl.seed_everything(3)
    return by_hand.train(kind(), loader, **options)


@pytest.mark.parametrize("name", LONG)
@pytest.mark.parametrize("accumulate", [1, 2])
def test_loaders_of_ones_own_and_skipped_steps(name, accumulate):
    """`training_step` returns None for the third batch, and draws its dropout from the global stream."""
    expected = toy_by_hand(Skipping, LONG[name](), epochs=3, accumulate=accumulate)
    options = {"max_epochs": 3, "accumulate_grad_batches": accumulate}
    for in_flight in (6,) if "worker" in name else (2, 3, 6, 8):
        ran = toy(Skipping, LONG[name](), TurboGRStrategy(batches_in_flight=in_flight), **options)
        assert differing(ran, expected) == [], in_flight


@pytest.mark.parametrize("count", range(1, 8))
def test_epochs_that_are_shorter_than_the_pipeline(count):
    """The first batch of an epoch sees all updates of the one before."""
    for in_flight in IN_FLIGHT:
        for loader in (SizedBatches(count, 1), DataLoader(Stream(count), batch_size=None)):
            ran = toy(Toy, loader, TurboGRStrategy(batches_in_flight=in_flight), max_epochs=3)
            assert differing(ran, toy_by_hand(Toy, SizedBatches(count, 1), epochs=3)) == [], in_flight


class NeverTrains(Toy):
    def training_step(self, batch, batch_idx):
        return None


def test_without_a_loss_nothing_is_updated():
    ran = toy(NeverTrains, SizedBatches(3, 1), TurboGRStrategy())
    pl.seed_everything(3)
    assert all(torch.equal(tensor, ran["tensors"][name]) for name, tensor in Toy().state_dict().items())
