"""TurboGRStrategy in mode sync, on one rank, is strategy="auto", bit for bit."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.callbacks import EarlyStopping
from torch.utils.data import DataLoader, IterableDataset

from tests.data.make import write_prepared
from tests.distributed.strategy_cases import QUIET, SizedBatches, Toy, build, flat, sync
from turbogr.callbacks.resume import LastCheckpoint


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    return write_prepared(tmp_path_factory.mktemp("prepared") / "p", num_users=60, num_items=40, max_len=12, seed=1)


def trained(
    folder: Path, out: Path, strategy: Any, resume: bool = False, callbacks: Callable[[], list] = list, **options: Any
) -> dict[str, Any]:
    """A training of two epochs in batches of 16 users: everything that it leaves behind."""
    data = {"batch_size": 16, "num_workers": options.pop("num_workers", 0)}
    model, module = build(folder, 1, dropout=0.2, scheduled=True, **data)
    checkpoint = LastCheckpoint(out / "last.ckpt")
    settings = {"max_epochs": 2, "default_root_dir": out, "callbacks": [checkpoint, *callbacks()], "strategy": strategy}
    trainer = pl.Trainer(**QUIET, devices=1, **{**settings, **options})
    trainer.fit(model, module, ckpt_path=out / "last.ckpt" if resume else None, weights_only=True)
    evaluated = trainer.validate(model, module, verbose=False) + trainer.test(model, module, verbose=False)
    predicted = [torch.cat(part) for part in zip(*trainer.predict(model, module), strict=True)]
    trainer.save_checkpoint(out / "end.ckpt")
    return {
        "tensors": flat(torch.load(out / "end.ckpt", weights_only=True)),
        "steps": trainer.global_step,
        "epochs": trainer.current_epoch,
        "evaluated": evaluated,
        "predicted": predicted,
        "next draw": torch.rand(3),
    }


def assert_same(one: dict[str, Any], other: dict[str, Any]) -> None:
    for name in ("steps", "epochs", "evaluated"):
        assert one[name] == other[name], name
    assert one["tensors"].keys() == other["tensors"].keys()
    for name, tensor in one["tensors"].items():
        assert torch.equal(tensor, other["tensors"][name]), name
    for mine, theirs in zip([*one["predicted"], one["next draw"]], [*other["predicted"], other["next draw"]], strict=True):
        assert torch.equal(mine, theirs)


def stops_early() -> list[pl.Callback]:
    return [EarlyStopping("val/MRR", mode="max", patience=0, min_delta=1.0, check_on_train_epoch_end=False)]


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"accumulate_grad_batches": 2, "gradient_clip_val": 0.1},
        {"precision": "bf16-mixed", "num_workers": 1},
        {"limit_train_batches": 3},
        {"limit_train_batches": 0.5, "num_workers": 1},
        {"max_steps": 5},
        {"val_check_interval": 3, "max_epochs": 3, "check_val_every_n_epoch": None},
        {"val_check_interval": 0.5, "callbacks": stops_early, "max_epochs": 4},
        {"overfit_batches": 2},
    ],
    ids=lambda options: ", ".join(options) or "plain",
)
def test_one_rank_is_auto_bit_for_bit(folder, tmp_path, options):
    """With dropout and a scheduler, and whatever is said; test and predict as well."""
    runs = [trained(folder, tmp_path / str(n), s, **options) for n, s in enumerate(("auto", sync()))]
    assert runs[0]["steps"] > 1
    assert_same(*runs)


@pytest.mark.parametrize("steps", [2, 4, 6], ids=["within an epoch", "between epochs", "within the second"])
def test_runs_are_resumed_across_strategies(folder, tmp_path, steps):
    """Stopped under one, taken up under the other: the same bits as one run without a stop."""
    options = {"val_check_interval": 2, "accumulate_grad_batches": 1}
    whole = trained(folder, tmp_path / "whole", "auto", **options)
    for name, first, second in (("a", "auto", sync), ("b", sync, "auto"), ("c", sync, sync)):
        trained(folder, tmp_path / name, made(first), max_steps=steps, **options)
        assert_same(trained(folder, tmp_path / name, made(second), resume=True, **options), whole)


def made(strategy: str | Callable[[], Any]) -> Any:
    return strategy if isinstance(strategy, str) else strategy()


class Stream(IterableDataset):
    """Batches of no known number."""

    def __init__(self, count: int = 5) -> None:
        self.count = count

    def __iter__(self):
        yield from SizedBatches(self.count, 1)


class Stateful(SizedBatches):
    """Knows where it stands, as a loader that can be saved does."""

    position = 0

    def __iter__(self):
        for number, batch in enumerate(super().__iter__()):
            if number >= self.position:
                self.position = (number + 1) % self.count
                yield batch

    def state_dict(self):
        return {"position": self.position}

    def load_state_dict(self, state):
        self.position = state["position"]


class Skipping(Toy):
    """Skips a step now and then, and has a dropout that draws from the global stream."""

    def __init__(self) -> None:
        super().__init__()
        self.dropout = torch.nn.Dropout(0.3)

    def training_step(self, batch, batch_idx):
        rows = self.dropout(self.embeddings(self.sparse_features(batch))["ids"])
        loss = torch.nn.functional.mse_loss(self.layer(rows).squeeze(-1), batch[1])
        return None if batch_idx == 2 else loss


def toy(strategy: Any, loader: Any, model: Toy, path: Path | None = None, **options: Any) -> dict[str, torch.Tensor]:
    callbacks = [LastCheckpoint()] if "max_steps" in options else []
    settings = {"max_epochs": 3, "enable_checkpointing": bool(callbacks), "callbacks": callbacks, **options}
    trainer = pl.Trainer(**QUIET, devices=1, strategy=strategy, **settings)
    trainer.fit(model, loader, ckpt_path=path, weights_only=True if path else None)
    return {name: tensor.clone() for name, tensor in model.state_dict().items()}


LOADERS: dict[str, Callable[[], Any]] = {
    "sized": lambda: SizedBatches(5, 1),
    "shuffled": lambda: DataLoader(list(SizedBatches(5, 1)), batch_size=None, shuffle=True),
    "worker": lambda: DataLoader(list(SizedBatches(5, 1)), batch_size=None, shuffle=True, num_workers=1),
    "unsized": lambda: DataLoader(Stream(), batch_size=None),
    "stateful": lambda: Stateful(5, 1),
}


@pytest.mark.parametrize("name", LOADERS)
def test_loaders_of_ones_own_and_skipped_steps(name):
    ends = []
    for strategy in ("auto", sync()):
        pl.seed_everything(3)
        ends.append(toy(strategy, LOADERS[name](), OwnUpdates(strategy == "auto")))
    for key, tensor in ends[0].items():
        assert torch.equal(tensor, ends[1][key]), key


class OwnUpdates(Skipping):
    """Under auto a module calls the row update itself, as GenerativeRetriever does."""

    def __init__(self, plain: bool) -> None:
        super().__init__()
        self.plain = plain

    def on_before_optimizer_step(self, optimizer):
        if self.plain:
            self.embeddings.apply_gradients()


@pytest.mark.parametrize("name", ["sized", "stateful", "unsized"])
def test_a_loader_is_taken_up_where_it_was_left(tmp_path, name):
    """Lightning by itself would begin the epoch again with a loader that has no state."""
    options = {"default_root_dir": tmp_path, "max_epochs": 2}
    pl.seed_everything(3)
    whole = toy(sync(), LOADERS[name](), Toy(), **options)
    pl.seed_everything(3)
    stopped = toy(sync(), LOADERS[name](), Toy(), max_steps=3, **options)
    resumed = toy(sync(), LOADERS[name](), Toy(), tmp_path / "checkpoints" / "last.ckpt", **options)
    assert all(torch.equal(tensor, resumed[key]) for key, tensor in whole.items())
    assert not torch.equal(stopped["layer.weight"], whole["layer.weight"])


def test_the_table_is_given_back(folder):
    """After a fit on one rank the model is as it would be after one under auto: it can be used, and trained on."""
    model, data = build(folder, 1)
    for strategy in (sync(), "auto", sync()):
        options = {"max_epochs": 1, "limit_train_batches": 2, "limit_val_batches": 0, "enable_checkpointing": False}
        pl.Trainer(**QUIET, **options, devices=1, strategy=strategy).fit(model, data)
        assert model.embeddings.engine is None
        assert len(model.embeddings.weight) == model.embeddings.num_rows


def test_rows_may_be_made_by_the_ranks_that_keep_them(folder):
    """In `Trainer.init_module()`: they start as they would have."""
    ends = []
    for late in (False, True):
        options = {"max_epochs": 1, "limit_train_batches": 2, "limit_val_batches": 0, "enable_checkpointing": False}
        trainer = pl.Trainer(**QUIET, **options, devices=1, strategy=sync())
        with trainer.init_module() if late else nullcontext():
            model, data = build(folder, 1)
        assert model.embeddings.weight.is_meta == late
        trainer.fit(model, data)
        ends.append(model.state_dict())
    assert all(torch.equal(tensor, ends[1][name]) for name, tensor in ends[0].items())


def test_rows_follow_the_schedule_and_are_clipped_if_asked():
    """Against the same by hand."""

    class Clipped(Toy):
        def configure_optimizers(self):
            optimizer = super().configure_optimizers()
            return [optimizer], [{"scheduler": torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5), "interval": "step"}]

    class ByHand(Clipped):
        def on_before_optimizer_step(self, optimizer):
            self.embeddings.apply_gradients(0.5**self.global_step, 0.01)

    ends = []
    for kind, strategy in ((ByHand, "auto"), (Clipped, sync(sparse_lr="follow", sparse_clip_norm=0.01))):
        pl.seed_everything(3)
        ends.append(toy(strategy, SizedBatches(5, 1), kind(), max_epochs=1))
    for key, tensor in ends[0].items():
        assert torch.equal(tensor, ends[1][key]), key
