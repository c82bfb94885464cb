"""Runs on every rank: trainings under TurboGRStrategy through the public API, which test_strategy.py compares."""

from __future__ import annotations

import os
import sys
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import lightning.pytorch as pl
import torch
from lightning.pytorch.callbacks import EarlyStopping, ModelCheckpoint

from tests.distributed import resume_worker
from tests.distributed.launch import report_checks
from tests.distributed.live_tensors import peaks
from tests.distributed.strategy_cases import (
    FOUR,
    QUIET,
    SHARED,
    TWO,
    Batches,
    OnTheWire,
    SignalOn,
    SizedBatches,
    Toy,
    build,
    digest,
    fit,
    sync,
)
from turbogr.callbacks.resume import LastCheckpoint, TrainingInterrupted
from turbogr.errors import ConfigurationError
from turbogr.sparse.engine import SparseEngine
from turbogr.strategies import TurboGRStrategy

SMALL = {"batch_size": 4}
"""Of which there are more than are ever in flight, whatever the folder."""

MODES = ("sync", "semi_async")

RANKS: int
PREPARED: Path
OUT: Path

_start_exchange = SparseEngine.start_exchange


def equal(name: str, options: dict[str, Any], training: dict[str, Any]) -> dict[str, Any]:
    strategy = TurboGRStrategy(timeout_s=60, **{"mode": "sync", **options})
    trainer = fit(PREPARED, RANKS, strategy, **training)
    trainer.save_checkpoint(OUT / f"{name}.ckpt")
    return {"member": strategy.topology.member, "digest": digest(strategy), "steps": trainer.global_step}


def on_the_wire() -> dict[str, Any]:
    """What look-ups send with and without negatives in half precision."""
    found = {}
    for name, negatives in (("fp32", ()), ("fp16", ("fp16",))):
        wire = OnTheWire()
        with wire.counting():
            fit(PREPARED, RANKS, sync(1), [wire], rows="adagrad", negatives=negatives)
        found[name] = {"sent": wire.sent, "added": wire.added}
    return found


# What must not be forgotten, forgotten.


def exchange_dropped(engine: SparseEngine, scale: float) -> None:
    for sent in engine._updates._sent:
        sent.touched.union = None
    _start_exchange(engine, scale)


def factor_left_in(engine: SparseEngine, scale: float) -> None:
    _start_exchange(engine, scale / engine.topology.group_size)


MISTAKES = {
    "exchange dropped": patch.object(SparseEngine, "start_exchange", exchange_dropped),
    "factor 1/I left in": patch.object(SparseEngine, "start_exchange", factor_left_in),
    "unweighted": patch("turbogr.strategies.pipeline.loss_weight", lambda samples, rank: 1.0),
}


def mistaken(name: str) -> dict[str, Any]:
    with MISTAKES[name]:
        return equal(name, {"groups": 2}, {"rows": "adagrad"})


# The rest, on two ranks.


def uneven(loader: type[Batches], mode: str) -> dict[str, Any]:
    """Rank 1 has three batches more; three epochs, validation within each."""
    pl.seed_everything(1)
    rank = int(os.environ["RANK"])
    options = {"max_epochs": 3, "val_check_interval": 2, "enable_checkpointing": False, "devices": RANKS}
    strategy = TurboGRStrategy(mode=mode, timeout_s=30)
    trainer = pl.Trainer(**QUIET, **options, strategy=strategy)
    model = Toy()
    trainer.fit(model, loader(5 + 3 * rank, rank), SizedBatches(2, 7))
    return {"steps": trainer.global_step, "epochs": trainer.current_epoch, "dense": model.layer.weight.tolist()}


def uneven_validation(loader: type[Batches]) -> str:
    rank = int(os.environ["RANK"])
    trainer = pl.Trainer(**QUIET, max_epochs=1, enable_checkpointing=False, devices=RANKS, strategy=sync())
    try:
        trainer.fit(Toy(), SizedBatches(4, rank), loader(2 + rank, 7))
    except ConfigurationError as error:
        return str(error)
    return "went through"


def resumed(mode: str, groups: int, checkpoint: str, steps: int, dropout: float = 0.2) -> dict[str, Any]:
    """Stopped after some steps and taken up again; beside it the same run without a stop."""
    name = f"{mode}-{groups}-{checkpoint}-{steps}"
    options = {"max_epochs": 2, "dropout": dropout, "val_check_interval": 3}

    def strategy() -> TurboGRStrategy:
        return TurboGRStrategy(groups, mode, checkpoint=checkpoint, timeout_s=60)

    last = OUT / f"last-{name}.ckpt"
    stopped = fit(PREPARED, RANKS, strategy(), [LastCheckpoint(last)], max_steps=steps, **options)
    assert stopped.global_step == steps
    ends = []
    for path in (last, None):
        trainer = fit(PREPARED, RANKS, strategy(), ckpt_path=path, **options)
        dense = {k: v.tolist() for k, v in trainer.model.backbone.state_dict().items()}
        ends.append({"steps": trainer.global_step, "digest": digest(trainer.strategy), "dense": dense})
    trainer.save_checkpoint(OUT / f"whole-{name}.ckpt")
    return {"ends": ends, "stopped": digest(stopped.strategy)}


def signalled(mode: str, name: str) -> dict[str, Any]:
    """Rank 1 gets a signal."""
    last, strategy = OUT / f"signalled-{mode}-{name}.ckpt", TurboGRStrategy(2, mode)
    try:
        fit(PREPARED, RANKS, strategy, [LastCheckpoint(last), SignalOn(1, 2, name)], limit_train_batches=8, data=SMALL)
    except TrainingInterrupted as interrupted:
        return {"said": str(interrupted), "step": torch.load(last, weights_only=True)["global_step"]}
    return {"said": "went through"}


def terminated() -> str:
    """The same without LastCheckpoint: what Lightning does is what all ranks do."""
    try:
        fit(PREPARED, RANKS, sync(2), [SignalOn(1, 2)], limit_train_batches=8, data=SMALL)
    except pl.utilities.exceptions.SIGTERMException as error:
        return type(error).__name__
    return "went through"


def early_stopped() -> int:
    stop = EarlyStopping("val/MRR", mode="max", patience=0, min_delta=1.0, check_on_train_epoch_end=False)
    return fit(PREPARED, RANKS, sync(2), [stop], val_check_interval=2, max_epochs=5).global_step


def evaluated() -> dict[str, Any]:
    """Validation, test and prediction of a trained model, by the trainer that trained it and by another from a file."""
    model, data = build(PREPARED, RANKS)
    options = {"max_epochs": 1, "limit_train_batches": 4, "enable_checkpointing": False, "devices": RANKS}
    results = []
    for groups in (1, 2):
        trainer = pl.Trainer(**QUIET, **options, strategy=sync(groups))
        if groups == 1:
            trainer.fit(model, data)
            trainer.save_checkpoint(OUT / "evaluated.ckpt")
            path = None
        else:
            model, path = build(PREPARED, RANKS)[0], OUT / "evaluated.ckpt"
        both = {**trainer.validate(model, data, path, verbose=False, weights_only=True)[0]}
        both |= trainer.test(model, data, path, verbose=False, weights_only=True)[0]
        users, items, _ = zip(*trainer.predict(model, data, ckpt_path=path, weights_only=True), strict=True)
        results.append({**both, "users": torch.cat(users).tolist(), "items": torch.cat(items).tolist()})
    return {"results": results}


def options_of_rows() -> dict[str, Any]:
    """Rows' learning rate that follows the schedule, rows' gradients that are clipped."""
    found = {}
    for name, options in {
        "plain": {},
        "follow": {"sparse_lr": "follow"},
        "clipped": {"sparse_clip_norm": 1e-6},
    }.items():
        trainer = fit(PREPARED, RANKS, sync(1, **options), rows="adagrad", scheduled=True)
        trainer.save_checkpoint(OUT / f"rows-{name}.ckpt")
        found[name] = trainer.global_step
    return found


def neutral(mode: str) -> dict[str, str]:
    """Digests of one training with and without what must not change it: checkpoints, loaders' workers, a trace, the depth."""

    def saved(form: str) -> tuple[TurboGRStrategy, list[pl.Callback]]:
        every = ModelCheckpoint(OUT / f"neutral-{mode}-{form}", every_n_train_steps=1, save_top_k=-1)
        return TurboGRStrategy(1, mode, checkpoint=form), [every]

    traced = TurboGRStrategy(1, mode)
    traced.trace.wanted = traced.trace.active = True

    found = {}
    for name, (strategy, callbacks) in {
        "plain": (TurboGRStrategy(1, mode), None),
        "traced": (traced, None),
        "two in flight": (TurboGRStrategy(1, mode, batches_in_flight=2), None),
        "gathered": saved("gathered"),
        "distributed": saved("distributed"),
        "worker": (TurboGRStrategy(1, mode), None),
    }.items():
        data = {"num_workers": 1} if name == "worker" else None
        fit(PREPARED, RANKS, strategy, callbacks, data=data, dropout=0.2, val_check_interval=2, max_epochs=2)
        found[name] = digest(strategy)
    return found


def mixed() -> dict[str, Any]:
    """bf16-mixed on two copies."""
    return equal("mixed", {"groups": 2}, {"rows": "adagrad", "precision": "bf16-mixed"})


def divided_otherwise() -> str:
    """A model whose tables one trainer has divided, given to another."""
    model, data = build(PREPARED, RANKS)
    options = {"max_epochs": 1, "limit_train_batches": 1, "limit_val_batches": 0, "enable_checkpointing": False}
    trainers = [pl.Trainer(**QUIET, **options, devices=RANKS, strategy=sync(1)) for _ in range(2)]
    trainers[0].fit(model, data)
    try:
        trainers[1].fit(model, data)
    except ConfigurationError as error:
        return str(error)
    return "went through"


def checks(which: str) -> dict[str, Any]:
    if which == "rest":
        both = {"sized": SizedBatches, "unsized": Batches}
        return {
            **{f"uneven, {name}, {mode}": partial(uneven, loader, mode) for name, loader in both.items() for mode in MODES},
            **{f"uneven validation, {name}": partial(uneven_validation, loader) for name, loader in both.items()},
            **{f"resumed from a directory, {mode}": partial(resumed, mode, 1, "distributed", 5) for mode in MODES},
            "signalled, sync": partial(signalled, "sync", "SIGTERM"),
            "signalled, semi_async": partial(signalled, "semi_async", "SIGINT"),
            "terminated": terminated,
            "early stopped": early_stopped,
            "evaluated": evaluated,
            "options of rows": options_of_rows,
            **{f"neutral, {mode}": partial(neutral, mode) for mode in MODES},
            "mixed": mixed,
            "divided otherwise": divided_otherwise,
            "live tensors": lambda: peaks(RANKS, int(os.environ["RANK"])),
        }
    cases = {4: FOUR, 2: {**TWO, **SHARED}}[RANKS]
    found = {name: partial(equal, name, *case) for name, case in cases.items()}
    if RANKS == 2:
        found["on the wire"] = on_the_wire
    if RANKS == 4:
        found |= {name: partial(mistaken, name) for name in MISTAKES}
        found["resumed, sync"] = partial(resumed, "sync", 2, "gathered", 2, 0.0)
        found |= {f"resumed, {form}": partial(resumed, "semi_async", 2, form, 2, 0.0) for form in ("gathered", "distributed")}
        resume_worker.PREPARED, resume_worker.OUT = PREPARED, OUT
        for name, case in resume_worker.ON_FOUR.items():
            found |= {f"resumed, {name}, {mode}": partial(resume_worker.resumed, name, case, mode) for mode in MODES}
    return found


if __name__ == "__main__":
    RANKS, PREPARED, OUT = int(sys.argv[2]), Path(sys.argv[3]), Path(sys.argv[4])
    report_checks(checks(sys.argv[1]), backend="")
