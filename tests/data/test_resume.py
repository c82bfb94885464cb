"""A run that is stopped anywhere and resumed is, bit for bit, the run that was not stopped."""

import contextlib
import signal
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from lightning.pytorch import Callback, LightningModule, Trainer, seed_everything
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import Tensor, nn

from tests.data.make import write_prepared
from turbogr.batch import JaggedBatch
from turbogr.data.datamodule import SequenceDataModule
from turbogr.data.samplers import TrainingLoader
from turbogr.errors import ConfigurationError

EPOCHS = 3
BATCHES = 5  # of an epoch: 31 users, and 3 too short to train on, in batches of 7

Batch = tuple[Tensor, Tensor, Tensor]


class Toy(LightningModule):
    """A small model whose weights depend on every batch it saw, and on their order."""

    def __init__(self, num_items: int) -> None:
        super().__init__()
        self.items = nn.Embedding(num_items, 4)
        self.mix = nn.Linear(4, 4)
        self.batches: list[Batch] = []
        self.before_step: Any = None

    def training_step(self, batch: JaggedBatch, batch_idx: int) -> Tensor:
        if self.before_step is not None:
            self.before_step()
        self.batches.append((batch.user_ids, batch.targets, batch.negatives))
        query = self.mix(self.items(batch.values))
        positive = (query * self.items(batch.targets)).sum(-1)
        negative = torch.einsum("td,trd->tr", query, self.items(batch.negatives))
        return (torch.logsumexp(torch.cat([positive[:, None], negative], 1), 1) - positive).mean()

    def validation_step(self, batch: JaggedBatch, batch_idx: int) -> None:
        self.log("val/score", self.mix(self.items(batch.values)).mean(), batch_size=batch.num_users)

    def configure_optimizers(self) -> dict[str, Any]:
        # Asking for it makes Lightning set the loader up before the checkpoint's progress is restored.
        assert self.trainer.estimated_stepping_batches > 0
        optimizer = torch.optim.Adam(self.parameters(), lr=0.05)
        scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}


class Run(NamedTuple):
    model: Toy
    trainer: Trainer


class Stop(Callback):
    """Saves a checkpoint at one place and ends the run there, as a crash would: nothing is saved afterwards.

    Places are hooks of a callback, "interrupted step" (an error within `training_step`, saved in `on_exception`), and "Ctrl-C".
    """

    class Now(Exception):
        pass

    def __init__(self, path: Path, place: str, count: int) -> None:
        self.path, self.place, self.count = path, place, count

    def _at(self, trainer: Trainer, place: str) -> None:
        if place == self.place and not trainer.sanity_checking:
            self.count -= 1
            if self.count == 0:
                trainer.save_checkpoint(self.path)
                raise Stop.Now

    def _within_step(self) -> None:
        self.count -= 1
        if self.count == 0:
            raise KeyboardInterrupt if self.place == "Ctrl-C" else Stop.Now

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if self.place in ("interrupted step", "Ctrl-C"):
            pl_module.before_step = self._within_step

    def on_exception(self, trainer: Trainer, *_: Any) -> None:
        if self.place in ("interrupted step", "Ctrl-C"):
            trainer.save_checkpoint(self.path)

    def on_train_batch_end(self, trainer: Trainer, *_: Any) -> None:
        self._at(trainer, "on_train_batch_end")

    def on_validation_batch_end(self, trainer: Trainer, *_: Any) -> None:
        self._at(trainer, "on_validation_batch_end")

    def on_validation_end(self, trainer: Trainer, *_: Any) -> None:
        self._at(trainer, "on_validation_end")

    def on_train_epoch_end(self, trainer: Trainer, *_: Any) -> None:
        self._at(trainer, "on_train_epoch_end")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_prepared(tmp_path_factory.mktemp("prepared") / "p", num_users=34, num_items=40, max_len=12, seed=1)


def run(
    folder: Path,
    tmp_path: Path,
    *callbacks: Callback,
    resume: Path | None = None,
    workers: int = 0,
    data: type[SequenceDataModule] = SequenceDataModule,
    trainer_options: dict[str, Any] | None = None,
    **data_options: Any,
) -> Run:
    """Train to the end or until a callback stops it; from a checkpoint if `resume`, in new objects as a new process would."""
    seed_everything(5, verbose=False)
    options: dict[str, Any] = {"batch_size": 7, "max_length": 8, "num_negatives": 5, "num_workers": workers, "seed": 11}
    datamodule = data(folder, **(options | data_options))
    model = Toy(datamodule.num_items)
    trainer = Trainer(
        accelerator="cpu",
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        default_root_dir=tmp_path,
        callbacks=list(callbacks),
        **({"max_epochs": EPOCHS, "enable_checkpointing": False} | (trainer_options or {})),
    )
    handler = signal.getsignal(signal.SIGINT)
    try:
        # SystemExit is how Lightning ends after Ctrl-C.
        with contextlib.suppress(Stop.Now, SystemExit):
            trainer.fit(model, datamodule=datamodule, ckpt_path=resume)
    finally:
        signal.signal(signal.SIGINT, handler)
    return Run(model, trainer)


def assert_same_batches(found: list[Batch], expected: list[Batch]) -> None:
    assert len(found) == len(expected)
    for number, (one, other) in enumerate(zip(found, expected, strict=True)):
        for a, b in zip(one, other, strict=True):
            assert torch.equal(a, b), f"batch {number} differs"


def assert_same_state(a: Run, b: Run) -> None:
    for name, value in a.model.state_dict().items():
        assert torch.equal(value, b.model.state_dict()[name]), name
    one, other = (run.trainer.optimizers[0].state_dict()["state"] for run in (a, b))
    assert one.keys() == other.keys()
    assert one
    for key, values in one.items():
        for name, value in values.items():
            assert torch.equal(value, other[key][name]), name


def assert_resumes_exactly(whole: Run, parts: list[Run]) -> None:
    assert_same_batches([batch for part in parts for batch in part.model.batches], whole.model.batches)
    assert_same_state(parts[-1], whole)


SCHEDULES: dict[str, dict[str, Any]] = {
    "epochs": {},
    "steps": {"max_steps": EPOCHS * BATCHES, "max_epochs": -1},
    "validation within the epoch": {"val_check_interval": 2},
    "validation across epochs": {
        "max_steps": EPOCHS * BATCHES,
        "max_epochs": -1,
        "val_check_interval": 4,
        "check_val_every_n_epoch": None,
    },
}


@pytest.fixture(scope="module")
def uninterrupted(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Run]:
    runs = {name: run(folder, tmp_path_factory.mktemp("whole"), trainer_options=o) for name, o in SCHEDULES.items()}
    for whole in runs.values():
        assert len(whole.model.batches) == EPOCHS * BATCHES
        assert whole.trainer.global_step == EPOCHS * BATCHES
    return runs


# In the middle of an epoch, at its first batch, at its last batch, and in later epochs.
PLACES = [
    *[("on_train_batch_end", count) for count in (1, 3, 5, 6, 9, 10, 14, 15)],
    *[("interrupted step", count) for count in (1, 2, 5, 6, 11, 15)],
    *[("Ctrl-C", count) for count in (1, 5, 8)],
    *[("on_validation_end", count) for count in (1, 2, 3)],
    *[("on_validation_batch_end", count) for count in (1, 5, 6)],
    *[("on_train_epoch_end", count) for count in (1, 2, 3)],
]


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize(("place", "count"), PLACES)
def test_resumed_run_equals_uninterrupted_run(
    folder: Path, tmp_path: Path, uninterrupted: dict[str, Run], schedule: str, place: str, count: int
):
    checkpoint = tmp_path / "stop.ckpt"
    options = SCHEDULES[schedule]
    first = run(folder, tmp_path, Stop(checkpoint, place, count), trainer_options=options)
    assert checkpoint.exists(), f"the run never came to {place} number {count}"
    second = run(folder, tmp_path, resume=checkpoint, trainer_options=options)
    assert_resumes_exactly(uninterrupted[schedule], [first, second])


@pytest.mark.parametrize("place", ["on_train_batch_end", "interrupted step", "on_validation_end", "on_train_epoch_end"])
@pytest.mark.parametrize("count", [2, 5, 6])
@pytest.mark.parametrize("again", ["on_train_batch_end", "interrupted step", "on_train_epoch_end"])
@pytest.mark.parametrize("count_again", [1, 2])
def test_resuming_twice(
    folder: Path, tmp_path: Path, uninterrupted: dict[str, Run], place: str, count: int, again: str, count_again: int
):
    # Lightning's own counters come out one off after the first resume; the second would then repeat or skip batches.
    count = min(count, 2) if "epoch" in place or "validation" in place else count
    checkpoints = [tmp_path / "1.ckpt", tmp_path / "2.ckpt"]
    parts = [run(folder, tmp_path, Stop(checkpoints[0], place, count))]
    parts += [run(folder, tmp_path, Stop(checkpoints[1], again, count_again), resume=checkpoints[0])]
    if checkpoints[1].exists():
        parts += [run(folder, tmp_path, resume=checkpoints[1])]
    else:
        assert len(parts[1].model.batches) < 2 * BATCHES  # so few epochs were left that it never came to that place
    assert_resumes_exactly(uninterrupted["epochs"], parts)


@pytest.mark.parametrize("workers", [(1, 1), (2, 2), (0, 2), (2, 0)])
@pytest.mark.parametrize(
    ("place", "count"),
    [("on_train_batch_end", 3), ("on_train_batch_end", 5), ("Ctrl-C", 7), ("on_validation_end", 1), ("on_train_epoch_end", 2)],
)
def test_workers_may_have_prepared_more(
    folder: Path, tmp_path: Path, uninterrupted: dict[str, Run], workers: tuple[int, int], place: str, count: int
):
    checkpoint = tmp_path / "stop.ckpt"
    first = run(folder, tmp_path, Stop(checkpoint, place, count), workers=workers[0])
    second = run(folder, tmp_path, resume=checkpoint, workers=workers[1])
    assert_resumes_exactly(uninterrupted["epochs"], [first, second])


@pytest.mark.parametrize("every", [1, 2, 4, 5, 7])
def test_periodic_checkpoints(folder: Path, tmp_path: Path, uninterrupted: dict[str, Run], every: int):
    saver = ModelCheckpoint(tmp_path / "kept", every_n_train_steps=every, save_top_k=-1, filename="{step}")
    whole = run(folder, tmp_path, saver, trainer_options={"enable_checkpointing": True})
    assert_same_state(whole, uninterrupted["epochs"])
    saved = sorted((tmp_path / "kept").glob("*.ckpt"))
    assert len(saved) == EPOCHS * BATCHES // every
    for checkpoint in saved:
        done = int(checkpoint.stem.removeprefix("step="))
        rest = run(folder, tmp_path, resume=checkpoint)
        assert_same_batches(rest.model.batches, uninterrupted["epochs"].model.batches[done:])
        assert_same_state(rest, uninterrupted["epochs"])


def test_training_longer_goes_on_with_the_next_epoch(folder: Path, tmp_path: Path, uninterrupted: dict[str, Run]):
    one = run(folder, tmp_path, trainer_options={"max_epochs": 1})
    one.trainer.save_checkpoint(tmp_path / "one.ckpt")
    rest = run(folder, tmp_path, resume=tmp_path / "one.ckpt")
    assert_resumes_exactly(uninterrupted["epochs"], [one, rest])


def test_resuming_warns_of_nothing(folder: Path, tmp_path: Path, recwarn: pytest.WarningsRecorder):
    run(folder, tmp_path, Stop(tmp_path / "stop.ckpt", "on_train_batch_end", 3))
    recwarn.clear()
    run(folder, tmp_path, resume=tmp_path / "stop.ckpt")
    assert not [warning for warning in recwarn if "resum" in str(warning.message)]


class Forgetful(SequenceDataModule):
    """Starts from the first batch whatever was trained before: what the tests above must notice."""

    def train_dataloader(self) -> TrainingLoader:
        loader = super().train_dataloader()
        loader.load_state_dict = lambda state: None
        loader._trained = lambda: loader._position
        return loader


def test_a_loader_that_forgets_is_noticed(folder: Path, tmp_path: Path, uninterrupted: dict[str, Run]):
    checkpoint = tmp_path / "stop.ckpt"
    first = run(folder, tmp_path, Stop(checkpoint, "on_train_batch_end", 3), data=Forgetful)
    second = run(folder, tmp_path, resume=checkpoint, data=Forgetful)
    whole = uninterrupted["epochs"]
    with pytest.raises(AssertionError, match="batch 3 differs"):
        assert_same_batches(first.model.batches + second.model.batches, whole.model.batches)
    with pytest.raises(AssertionError):
        assert_same_state(second, whole)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"batch_size": 6}, "batch_size was 7 and is 6"),
        ({"max_length": 4}, "max_length was 8 and is 4"),
        ({"num_negatives": 4}, "num_negatives was 5 and is 4"),
        ({"protocol": "published"}, "protocol was 'three_way' and is 'published'"),
        ({"seed": 12, "drop_last": True}, "seed was 11 and is 12; drop_last was False and is True"),
    ],
)
def test_other_options_cannot_be_resumed(folder: Path, tmp_path: Path, changes: dict[str, Any], message: str):
    run(folder, tmp_path, Stop(tmp_path / "stop.ckpt", "on_train_batch_end", 3))
    with pytest.raises(ConfigurationError, match=message):
        run(folder, tmp_path, resume=tmp_path / "stop.ckpt", **changes)


def test_other_data_cannot_be_resumed(folder: Path, tmp_path: Path):
    other = write_prepared(tmp_path / "other", num_users=34, num_items=40, max_len=12, seed=2)
    run(folder, tmp_path, Stop(tmp_path / "stop.ckpt", "on_train_epoch_end", 1))
    with pytest.raises(ConfigurationError, match=r"content_hash was 'sha256:.*restore them, or start a new run"):
        run(other, tmp_path, resume=tmp_path / "stop.ckpt")


def test_other_options_may_be_evaluated(folder: Path, tmp_path: Path):
    run(folder, tmp_path, Stop(tmp_path / "stop.ckpt", "on_train_batch_end", 3))
    trainer = Trainer(accelerator="cpu", logger=False, enable_checkpointing=False, default_root_dir=tmp_path)
    data = SequenceDataModule(folder, batch_size=3, num_negatives=1, num_workers=0)
    trainer.validate(Toy(data.num_items), datamodule=data, ckpt_path=tmp_path / "stop.ckpt", verbose=False)
    other = write_prepared(tmp_path / "other", num_users=34, num_items=40, max_len=12, seed=2)
    with pytest.warns(UserWarning, match="trained on other data"):
        trainer.validate(
            Toy(data.num_items),
            datamodule=SequenceDataModule(other, num_negatives=1, num_workers=0),
            ckpt_path=tmp_path / "stop.ckpt",
            verbose=False,
        )
