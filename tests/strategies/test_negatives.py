"""NegativeOffload, NegativeQuantization and LogitSharing together: under both strategies, in the pipeline, resumed."""

from __future__ import annotations

from itertools import permutations
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch

from tests.data.make import write_prepared
from tests.distributed.strategy_cases import QUIET, build
from tests.strategies import by_hand
from tests.strategies.test_semi_async import BATCHES, differing, seeded
from turbogr.callbacks.logit_sharing import LogitSharing
from turbogr.callbacks.negative_offload import NegativeOffload
from turbogr.callbacks.negative_quantization import NegativeQuantization
from turbogr.models.negatives import SharedLogits
from turbogr.models.tokens import NEGATIVES
from turbogr.sparse.apart import Apart
from turbogr.strategies import TurboGRStrategy


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("prepared") / "p"
    return write_prepared(path, num_users=8 * BATCHES - 3, num_items=40, min_len=5, max_len=12, seed=1)


def all_three() -> list[pl.Callback]:
    return [NegativeOffload(segment=7, mode="offload"), NegativeQuantization(), LogitSharing(k=3)]


def trained(folder: Path, strategy: Any, callbacks: list[pl.Callback], ckpt_path: Path | None = None, **options: Any):
    """The trainer, and what training leaves behind."""
    model, data = build(folder, 1, rows="adagrad", dropout=0.2, batch_size=8)
    settings = {"max_epochs": 2, "enable_checkpointing": False, "limit_val_batches": 0, **options}
    trainer = pl.Trainer(**QUIET, devices=1, strategy=strategy, callbacks=callbacks, **settings)
    trainer.fit(model, data, ckpt_path=ckpt_path, weights_only=True)
    return trainer, {"tensors": by_hand.tensors(model, trainer.optimizers[0]), "metrics": []}


def semi_async() -> TurboGRStrategy:
    return TurboGRStrategy(mode="semi_async")


def test_sync_is_auto_and_the_order_of_callbacks_is_nothing(folder):
    expected = trained(folder, "auto", all_three())[1]
    for callbacks in permutations(all_three()):
        assert differing(trained(folder, TurboGRStrategy(mode="sync"), list(callbacks))[1], expected) == []
    for one_less in range(3):
        callbacks = [callback for place, callback in enumerate(all_three()) if place != one_less]
        found = trained(folder, "auto", callbacks)[1]
        assert "embeddings.weight" in differing(found, expected), "each of them changes the bits of what is trained"


@pytest.mark.parametrize(
    ("options", "loop"),
    [
        ({}, {}),
        ({"accumulate_grad_batches": 2}, {"accumulate": 2}),
        ({"precision": "bf16-mixed"}, {"autocast": True}),
    ],
    ids=["plain", "accumulated", "bf16-mixed"],
)
def test_semi_async_is_a_loop_by_hand(folder, options, loop):
    model, data = build(folder, 1, rows="adagrad", dropout=0.2, batch_size=8)
    model.negatives.sharing, model.negatives.segment = SharedLogits(3), 7
    model.embeddings.apart[NEGATIVES] = Apart(torch.float16, on_host=True)
    expected = by_hand.train(model, data.train_dataloader(), seed=seeded, epochs=1, **loop)
    found = trained(folder, semi_async(), all_three(), max_epochs=1, **options)[1]
    assert differing(found, expected) == []
    assert differing(trained(folder, TurboGRStrategy(mode="sync"), all_three(), max_epochs=1, **options)[1], expected)


class Keep(pl.Callback):
    """Writes a checkpoint after a number of steps."""

    def __init__(self, path: Path, step: int) -> None:
        self.path, self.step = path, step

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        if trainer.global_step == self.step:
            trainer.save_checkpoint(self.path)


@pytest.mark.parametrize("mode", ["sync", "semi_async"])
@pytest.mark.parametrize("step", [4, BATCHES, BATCHES + 2])
def test_resumed_it_goes_on_where_it_was(folder, tmp_path, mode, step):
    path = tmp_path / "kept.ckpt"
    expected = trained(folder, TurboGRStrategy(mode=mode), [*all_three(), Keep(path, step)])[1]
    assert differing(trained(folder, TurboGRStrategy(mode=mode), all_three(), path)[1], expected) == []
    without = trained(folder, TurboGRStrategy(mode=mode), all_three()[:2], path)[1]
    assert "embeddings.weight" in differing(without, expected)


def test_they_leave_the_model_as_it_was(folder):
    model, data = build(folder, 1, rows="adagrad", batch_size=8)
    trainer = pl.Trainer(
        **QUIET, devices=1, callbacks=all_three(), max_epochs=1, enable_checkpointing=False, limit_val_batches=0
    )
    trainer.fit(model, data)
    assert model.negatives.sharing is None
    assert model.negatives.segment is None
    assert model.embeddings.apart == {}
