"""A run that is stopped anywhere and taken up again is the run without a stop, bit for bit, in both modes of the strategy."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from torch.utils.data import DataLoader

from tests.data.make import write_prepared
from tests.distributed.strategy_cases import QUIET, Toy, build, flat
from tests.interrupting import SignalAt
from tests.strategies.test_one_rank import Stateful, Stream
from turbogr.callbacks.resume import LastCheckpoint, TrainingInterrupted
from turbogr.strategies import TurboGRStrategy
from turbogr.strategies.checkpoint import DELAYED_KEY, own_delayed

BATCHES = 7
MODES = pytest.mark.parametrize("mode", ["sync", "semi_async"])
# Options of the trainer and of the data; a checkpoint after each optimizer step of two epochs.
CASES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "plain": ({}, {}),
    "workers": ({}, {"num_workers": 2}),
    "accumulated": ({"accumulate_grad_batches": 2}, {}),
    "validated": ({"val_check_interval": 3, "limit_val_batches": 1.0}, {}),
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("prepared") / "p"
    return write_prepared(path, num_users=8 * BATCHES - 3, num_items=40, min_len=5, max_len=12, seed=1)


def run(
    folder: Path, strategy: TurboGRStrategy, callbacks: list[pl.Callback], path: Path | None = None, **options: Any
) -> pl.Trainer:
    data = options.pop("data", {})
    model, module = build(folder, 1, dropout=0.2, scheduled=True, batch_size=8, **data)
    settings = {"max_epochs": 2, "limit_val_batches": 0, **options}
    settings["enable_checkpointing"] = any(isinstance(callback, pl.callbacks.Checkpoint) for callback in callbacks)
    trainer = pl.Trainer(**QUIET, devices=1, strategy=strategy, callbacks=callbacks, **settings)
    trainer.fit(model, module, ckpt_path=path, weights_only=True if path else None)
    return trainer


def end(trainer: pl.Trainer, out: Path) -> dict[str, torch.Tensor]:
    """All tensors that a run leaves."""
    trainer.save_checkpoint(out)
    return flat(torch.load(out, weights_only=True))


def differing(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> list[str]:
    assert one.keys() == other.keys()
    return [name for name, tensor in one.items() if not torch.equal(tensor, other[name])]


@MODES
@pytest.mark.parametrize("name", CASES)
def test_after_every_step(folder, tmp_path, name, mode):
    """And saving changes nothing."""
    options, data = CASES[name]
    whole = end(run(folder, TurboGRStrategy(mode=mode), [], data=data, **options), tmp_path / "whole.ckpt")
    every = ModelCheckpoint(tmp_path / "steps", every_n_train_steps=1, save_top_k=-1, filename="{step}")
    saved = run(folder, TurboGRStrategy(mode=mode), [every], data=data, **options)
    assert differing(end(saved, tmp_path / "saved.ckpt"), whole) == []
    paths = sorted((tmp_path / "steps").glob("*.ckpt"), key=lambda path: int(path.stem.partition("=")[2]))
    assert len(paths) == saved.global_step
    for path in paths[:-1]:
        resumed = run(folder, TurboGRStrategy(mode=mode), [], path, data=data, **options)
        assert differing(end(resumed, tmp_path / "resumed.ckpt"), whole) == [], path
    delayed = [DELAYED_KEY in torch.load(path, weights_only=True) for path in paths]
    assert any(delayed) == (mode == "semi_async")
    assert not delayed[-1]  # nothing is late at the end of an epoch
    assert not delayed[len(paths) // 2 - 1]


class AfterValidation(LastCheckpoint):
    """Writes there and nowhere else."""

    def on_train_batch_end(self, trainer, *arguments):
        saved, self._saved = self._saved, trainer.global_step
        super().on_train_batch_end(trainer, *arguments)
        self._saved = saved

    def on_train_epoch_end(self, trainer, pl_module):
        pass


@MODES
@pytest.mark.parametrize("steps", [3, 6, 10])
def test_after_a_validation_within_an_epoch(folder, tmp_path, mode, steps):
    """Where the checkpoint is written behind the validation, with what that left in flight."""
    options, _ = CASES["validated"]
    whole = end(run(folder, TurboGRStrategy(mode=mode), [], **options), tmp_path / "whole.ckpt")
    run(folder, TurboGRStrategy(mode=mode), [AfterValidation(tmp_path / "last.ckpt")], max_steps=steps, **options)
    resumed = run(folder, TurboGRStrategy(mode=mode), [], tmp_path / "last.ckpt", **options)
    assert differing(end(resumed, tmp_path / "resumed.ckpt"), whole) == []


def test_without_the_delayed_rows_it_is_another_run(folder, tmp_path):
    whole = end(run(folder, TurboGRStrategy(), []), tmp_path / "whole.ckpt")
    run(folder, TurboGRStrategy(), [LastCheckpoint(tmp_path / "last.ckpt")], max_steps=3)
    checkpoint = torch.load(tmp_path / "last.ckpt", weights_only=True)
    assert len(checkpoint[DELAYED_KEY]["rows"]) > 0
    del checkpoint[DELAYED_KEY]
    torch.save(checkpoint, tmp_path / "without.ckpt")
    for name, same in (("last", True), ("without", False)):
        resumed = run(folder, TurboGRStrategy(), [], tmp_path / f"{name}.ckpt")
        assert (differing(end(resumed, tmp_path / "resumed.ckpt"), whole) == []) == same


@pytest.mark.parametrize("in_flight", [2, 3, 4, 5, 7, 8])
def test_another_number_in_flight_goes_on_the_same(folder, tmp_path, in_flight):
    whole = end(run(folder, TurboGRStrategy(), []), tmp_path / "whole.ckpt")
    for name, first, second in (("a", in_flight, 6), ("b", 6, in_flight)):
        last = tmp_path / f"{name}.ckpt"
        run(folder, TurboGRStrategy(batches_in_flight=first), [LastCheckpoint(last)], max_steps=4)
        resumed = run(folder, TurboGRStrategy(batches_in_flight=second), [], last)
        assert differing(end(resumed, tmp_path / "resumed.ckpt"), whole) == []


@MODES
@pytest.mark.parametrize("signal", ["SIGINT", "SIGTERM"])
@pytest.mark.parametrize("workers", [0, 1])
def test_a_signal(folder, tmp_path, mode, signal, workers):
    data = {"num_workers": workers}
    whole = end(run(folder, TurboGRStrategy(mode=mode), [], data=data), tmp_path / "whole.ckpt")
    last = LastCheckpoint(tmp_path / "last.ckpt")
    with pytest.raises(TrainingInterrupted, match=signal):
        run(folder, TurboGRStrategy(mode=mode), [last, SignalAt(4, signal)], data=data)
    assert torch.load(tmp_path / "last.ckpt", weights_only=True)["global_step"] == 5
    resumed = run(folder, TurboGRStrategy(mode=mode), [], tmp_path / "last.ckpt", data=data)
    assert differing(end(resumed, tmp_path / "resumed.ckpt"), whole) == []


@pytest.mark.parametrize("first", ["sync", "auto", "semi_async"])
@pytest.mark.parametrize("second", ["sync", "auto", "semi_async"])
def test_every_mode_takes_up_every_other(folder, tmp_path, first, second):
    """Within an epoch; a checkpoint of semi_async holds all updates, so whoever goes on from it trains on complete tables."""

    def made(name: str) -> Any:
        return name if name == "auto" else TurboGRStrategy(mode=name)

    run(folder, made(first), [LastCheckpoint(tmp_path / "last.ckpt")], max_steps=3)
    resumed = run(folder, made(second), [], tmp_path / "last.ckpt")
    assert resumed.global_step == 2 * BATCHES
    evaluated = run(folder, made(second), [], tmp_path / "last.ckpt", max_steps=3)
    ends = [torch.load(tmp_path / "last.ckpt", weights_only=True), None]
    evaluated.save_checkpoint(tmp_path / "untrained.ckpt")
    ends[1] = torch.load(tmp_path / "untrained.ckpt", weights_only=True)
    assert differing(*map(flat, ends)) == []


class Failing(Toy):
    """Raises in a step, once."""

    fails_at = -1

    def training_step(self, batch, batch_idx):
        if self.global_step == self.fails_at:
            raise ValueError("the cause")
        return super().training_step(batch, batch_idx)


LOADERS: dict[str, Any] = {
    "unsized": lambda: DataLoader(Stream(BATCHES), batch_size=None),
    "unsized, worker": lambda: DataLoader(Stream(BATCHES), batch_size=None, num_workers=1),
    "stateful": lambda: Stateful(BATCHES, 1),
}


def toy(folder: Path, mode: str, loader: Any, path: Path | None = None, fails_at: int = -1) -> dict[str, torch.Tensor]:
    pl.seed_everything(3)
    model = Failing()
    model.fails_at = fails_at
    every = ModelCheckpoint(folder, every_n_train_steps=1, save_top_k=-1, filename="{step}")
    trainer = pl.Trainer(**QUIET, devices=1, max_epochs=2, callbacks=[every], strategy=TurboGRStrategy(mode=mode))
    trainer.fit(model, loader, ckpt_path=path, weights_only=True if path else None)
    return {name: tensor.clone() for name, tensor in model.state_dict().items()}


@MODES
@pytest.mark.parametrize("name", LOADERS)
@pytest.mark.parametrize("step", [3, BATCHES, BATCHES + 2])
def test_an_error_leaves_a_checkpoint_to_go_on_from(tmp_path, mode, name, step):
    """With iterable data sets of unknown length, and with loaders that have a state."""
    whole = toy(tmp_path / "whole", mode, LOADERS[name]())
    with pytest.raises(ValueError, match="the cause"):
        toy(tmp_path / "failed", mode, LOADERS[name](), fails_at=step)
    resumed = toy(tmp_path / "resumed", mode, LOADERS[name](), tmp_path / "failed" / f"step={step}.ckpt")
    assert differing(resumed, whole) == []


def test_rows_are_told_apart_on_the_host_whatever_device_keeps_them():
    """As the rows that are asked for: on a device both could not be compared."""
    sharding = SimpleNamespace(owner=lambda rows: rows % 2, local=lambda rows, member: rows // 2)
    table = SimpleNamespace(weight=torch.empty(0, 4, device="meta"))
    engine: Any = SimpleNamespace(table=table, sharding=sharding, topology=SimpleNamespace(member=1))
    delayed = own_delayed({DELAYED_KEY: {"rows": torch.tensor([7, 4, 3]), "values": torch.randn(3, 4)}}, engine)
    assert delayed is not None
    assert delayed.rows.tolist() == [1, 3]
    assert (delayed.values.device.type, delayed.values.shape) == ("meta", (2, 4))
