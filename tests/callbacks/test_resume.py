"""LastCheckpoint where Lightning itself ends training within an epoch: the rest of the epoch is trained when it is resumed."""

from pathlib import Path

import pytest
import torch
from lightning.pytorch import Callback
from lightning.pytorch.callbacks import EarlyStopping, ModelCheckpoint

from tests.data.make import write_prepared
from tests.data.test_resume import BATCHES, EPOCHS, Run, assert_resumes_exactly
from tests.data.test_resume import run as run_without_checkpoints
from turbogr.callbacks.resume import LastCheckpoint


class StopAt(Callback):
    """Asks Lightning to stop after a batch, counted over all epochs, or after a validation."""

    def __init__(self, batch: int = 0, validation: int = 0) -> None:
        self.batch, self.validation = batch, validation

    def on_train_batch_end(self, trainer, *_):
        self.batch -= 1
        if self.batch == 0:
            trainer.should_stop = True

    def on_validation_end(self, trainer, *_):
        if not trainer.sanity_checking:
            self.validation -= 1
            trainer.should_stop |= self.validation == 0


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_prepared(tmp_path_factory.mktemp("prepared") / "p", num_users=34, num_items=40, max_len=12, seed=1)


def run(folder: Path, tmp_path: Path, *callbacks: Callback, trainer_options: dict | None = None, **options) -> Run:
    checkpoint = LastCheckpoint(tmp_path / "last.ckpt")
    trainer_options = {"enable_checkpointing": True, **(trainer_options or {})}
    return run_without_checkpoints(folder, tmp_path, checkpoint, *callbacks, trainer_options=trainer_options, **options)


WITHIN = {"val_check_interval": 2}
PENDING = {"accumulate_grad_batches": 2}
# what stops the first part; trainer options of all parts; batches trained when it has stopped
STOPS = {
    "max_steps": ({"max_steps": 8}, None, {}, 8),
    "max_steps at an epoch's end": ({"max_steps": 10}, None, {}, 10),
    "max_steps within the first epoch": ({"max_steps": 1}, None, {}, 1),
    "max_steps where validation follows": ({"max_steps": 7}, None, WITHIN, 7),
    "should_stop": ({}, StopAt(batch=8), {}, 8),
    "should_stop at an epoch's end": ({}, StopAt(batch=10), {}, 10),
    "should_stop where validation follows": ({}, StopAt(batch=7), WITHIN, 7),
    "should_stop between validations": ({}, StopAt(batch=8), WITHIN, 8),
    "should_stop in a validation": ({}, StopAt(validation=4), WITHIN, 9),
    "should_stop with gradients pending": ({}, StopAt(batch=8), PENDING, 9),
    "should_stop with gradients pending at an epoch's end": ({}, StopAt(batch=10), PENDING, 10),
    "validation with gradients pending": ({}, StopAt(validation=1), PENDING | {"val_check_interval": 3}, 4),
    "max_steps, accumulated": ({"max_steps": 4}, None, PENDING, 7),
    "before min_steps": ({"min_steps": 8}, StopAt(batch=6), {}, 8),
}


@pytest.mark.parametrize("name", STOPS)
def test_rest_of_the_epoch_is_trained(folder: Path, tmp_path: Path, name: str):
    first, stop, options, batches = STOPS[name]
    whole = run(folder, tmp_path / "whole", trainer_options=options)
    assert len(whole.model.batches) == EPOCHS * BATCHES
    last = tmp_path / "parts" / "last.ckpt"
    stops = [] if stop is None else [StopAt(stop.batch, stop.validation)]
    one = run(folder, tmp_path / "parts", *stops, trainer_options=options | first)
    assert len(one.model.batches) == batches
    two = run(folder, tmp_path / "parts", resume=last, trainer_options=options)
    assert_resumes_exactly(whole, [one, two])
    assert two.trainer.global_step == whole.trainer.global_step
    assert two.trainer.current_epoch == whole.trainer.current_epoch
    # what loggers count by
    loops = [part.trainer.fit_loop.epoch_loop for part in (whole, two)]
    assert loops[0]._batches_that_stepped == loops[1]._batches_that_stepped


def test_early_stopping_in_a_validation_within_an_epoch(folder: Path, tmp_path: Path):
    def stopper() -> EarlyStopping:
        return EarlyStopping("val/score", patience=1, min_delta=1e9, check_on_train_epoch_end=False)

    whole = run(folder, tmp_path / "whole", trainer_options=WITHIN)
    one = run(folder, tmp_path, stopper(), trainer_options=WITHIN)
    assert len(one.model.batches) == 4
    last = tmp_path / "last.ckpt"
    assert_resumes_exactly(whole, [one, run(folder, tmp_path, resume=last, trainer_options=WITHIN)])


def test_stopped_and_resumed_twice(folder: Path, tmp_path: Path):
    whole = run(folder, tmp_path / "whole")
    last = tmp_path / "last.ckpt"
    parts = [run(folder, tmp_path, trainer_options={"max_steps": 3})]
    parts += [run(folder, tmp_path, resume=last, trainer_options={"max_steps": 9})]
    parts += [run(folder, tmp_path, resume=last)]
    assert_resumes_exactly(whole, parts)


def test_last_checkpoint_knows_the_best_of_its_own_epoch(folder: Path, tmp_path: Path):
    # The one that it is added before saves after each epoch too.
    best = ModelCheckpoint(tmp_path, "best", monitor="epoch", mode="max")
    run(folder, tmp_path, best, trainer_options={"max_epochs": 1})
    states = torch.load(tmp_path / "last.ckpt", weights_only=True)["callbacks"]
    state = next(state for name, state in states.items() if name.startswith("ModelCheckpoint"))
    assert state["best_model_path"] == best.best_model_path != ""
