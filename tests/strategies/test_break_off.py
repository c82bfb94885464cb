"""Checkpoints that Lightning writes where an exception ended a run, wherever in a step, are as good as any other."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.callbacks import OnExceptionCheckpoint

from tests.distributed.strategy_cases import QUIET, SizedBatches, Toy
from tests.strategies.test_resume import BATCHES, MODES, differing, end, folder, run  # noqa: F401, the fixture
from turbogr.strategies import TurboGRStrategy
from turbogr.strategies.checkpoint import DELAYED_KEY

HOOKS = ["on_train_batch_start", "on_before_backward", "on_after_backward", "on_before_optimizer_step", "on_train_batch_end"]


class Cause(Exception):
    pass


class Raises(pl.Callback):
    """In a hook, at an optimizer step."""

    def __init__(self, hook: str, step: int) -> None:
        setattr(self, hook, lambda trainer, *_: self._raise(trainer.global_step == step))

    def _raise(self, now: bool) -> None:
        if now:
            raise Cause


def broken_off(folder: Path, out: Path, hook: str, step: int, strategy: TurboGRStrategy, **options: Any) -> Path:  # noqa: F811
    with pytest.raises(Cause):
        run(folder, strategy, [OnExceptionCheckpoint(str(out), "broken"), Raises(hook, step)], **options)
    return out / "broken.ckpt"


@MODES
@pytest.mark.parametrize("hook", HOOKS)
@pytest.mark.parametrize("step", [3, BATCHES + 2])
def test_a_run_goes_on_where_an_exception_ended_it(folder, tmp_path, mode, hook, step):  # noqa: F811
    whole = end(run(folder, TurboGRStrategy(mode=mode), []), tmp_path / "whole.ckpt")
    for in_flight in (2, 6):
        path = broken_off(
            folder, tmp_path / str(in_flight), hook, step, TurboGRStrategy(mode=mode, batches_in_flight=in_flight)
        )
        resumed = run(folder, TurboGRStrategy(mode=mode), [], path)
        assert differing(end(resumed, tmp_path / "resumed.ckpt"), whole) == []
        assert (DELAYED_KEY in torch.load(path, weights_only=True)) == (mode == "semi_async")


@MODES
@pytest.mark.parametrize("hook", HOOKS[:2])
def test_with_accumulated_gradients(folder, tmp_path, mode, hook):  # noqa: F811
    """In the first batch of a window, before which none are pending."""
    options = {"accumulate_grad_batches": 2}
    whole = end(run(folder, TurboGRStrategy(mode=mode), [], **options), tmp_path / "whole.ckpt")
    path = broken_off(folder, tmp_path, hook, 2, TurboGRStrategy(mode=mode), **options)
    resumed = run(folder, TurboGRStrategy(mode=mode), [], path, **options)
    assert differing(end(resumed, tmp_path / "resumed.ckpt"), whole) == []


class Broken(SizedBatches):
    """Has five batches of its length."""

    def __iter__(self):
        for number, batch in enumerate(super().__iter__()):
            if number == 5:
                raise Cause
            yield batch


@MODES
@pytest.mark.parametrize("in_flight", range(2, 9))
def test_where_the_loader_failed(tmp_path, mode, in_flight):
    """It is not asked again."""

    def fit(loader: Any, path: Path | None = None) -> dict[str, torch.Tensor]:
        pl.seed_everything(3)
        model, strategy = Toy(), TurboGRStrategy(mode=mode, batches_in_flight=in_flight)
        keeps = OnExceptionCheckpoint(str(tmp_path), "broken")
        trainer = pl.Trainer(**QUIET, devices=1, max_epochs=2, strategy=strategy, callbacks=[keeps])
        trainer.fit(model, loader, ckpt_path=path, weights_only=True if path else None)
        return {name: tensor.clone() for name, tensor in model.state_dict().items()}

    whole = fit(SizedBatches(BATCHES, 1))
    with pytest.raises(Cause):
        fit(Broken(BATCHES, 1))
    assert differing(fit(SizedBatches(BATCHES, 1), tmp_path / "broken.ckpt"), whole) == []
