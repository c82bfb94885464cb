"""Runs on two ranks: the same trainings with and without balancing, which test_balance.py compares."""

from __future__ import annotations

import sys
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import lightning.pytorch as pl
import torch

from tests.distributed.launch import report_checks
from tests.distributed.strategy_cases import SignalOn, digest, fit
from turbogr.callbacks.resume import LastCheckpoint, TrainingInterrupted
from turbogr.data.balance import CostModel
from turbogr.data.samplers import EpochBatches
from turbogr.data.stochastic_length import StochasticLength
from turbogr.errors import ConfigurationError
from turbogr.strategies import TurboGRStrategy

PREPARED: Path
OUT: Path

OFF: dict[str, Any] = {}
TOKENS = {"balance": "tokens"}
ATTENTION = {"balance": "attention", "balance_cost": CostModel(1.0, 0.1), "balance_method": "karmarkar_karp"}
CUT = {"tokens_per_batch": "auto"}
WHOLE: dict[str, Any] = {"limit_train_batches": 1.0, "max_epochs": 2}
# Name -> options of the data module and of the training. 97 users make three batches of 32 and one of a single user.
CASES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "a step, off": (OFF, {"limit_train_batches": 1}),
    "a step, tokens": (TOKENS, {"limit_train_batches": 1}),
    "a step, attention": (ATTENTION, {"limit_train_batches": 1}),
    "epochs, off": (OFF, WHOLE),
    "epochs, tokens": (TOKENS, WHOLE),
    "epochs, attention": (ATTENTION, WHOLE),
    "cut, off": (CUT, WHOLE),
    "cut, tokens": (CUT | TOKENS, WHOLE),
    "accumulated, off": (OFF, WHOLE | {"accumulate_grad_batches": 3}),
    "accumulated, tokens": (TOKENS, WHOLE | {"accumulate_grad_batches": 3}),
    "validated, off": (OFF, WHOLE | {"val_check_interval": 3}),
    "validated, tokens": (TOKENS, WHOLE | {"val_check_interval": 3}),
    "thinned": ({"stochastic_length": StochasticLength(1.4, 1.0)}, WHOLE),
    "worker, tokens": (TOKENS | {"num_workers": 1}, WHOLE),
}
MODES = ("sync", "semi_async")


def sgd(parameters: Any) -> torch.optim.Optimizer:
    """Of the dense parameters; with state, but no first step that is as large for a gradient of rounding as for any other."""
    return torch.optim.SGD(parameters, lr=0.1, momentum=0.9)


class Users(pl.Callback):
    """Who was trained at each step, and the metrics of each validation."""

    def __init__(self) -> None:
        self.steps: list[list[int]] = []
        self.tokens: list[int] = []
        self.metrics: list[dict[str, float]] = []

    def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
        self.steps.append(batch.user_ids.tolist())
        self.tokens.append(batch.num_tokens)

    def on_validation_end(self, trainer, pl_module):
        self.metrics.append({name: float(value) for name, value in trainer.callback_metrics.items() if "val/" in name})


def train(name: str, mode: str, data: dict[str, Any], training: dict[str, Any], **others: Any) -> dict[str, Any]:
    users, strategy = Users(), TurboGRStrategy(2, mode=mode, timeout_s=60)
    callbacks = [users, *others.pop("callbacks", [])]
    # Lightning's `use_distributed_sampler` is on, as it is unless somebody turns it off.
    trainer = fit(PREPARED, 2, strategy, callbacks, rows="adagrad", data=data, **training, **others)
    trainer.save_checkpoint(OUT / f"{name}, {mode}.ckpt")
    return {
        "users": users.steps,
        "tokens": users.tokens,
        "metrics": users.metrics,
        "steps": trainer.global_step,
        "digest": digest(strategy),
    }


def lost(batches: EpochBatches, batch: Any, name: str = "") -> list[Any]:
    """A plan that forgets the last user of rank 1."""
    first, second = _shares(batches, batch, name)
    return [first, second[:-1]]


_shares = EpochBatches.shares
MISTAKES = {
    "lost": patch.object(EpochBatches, "shares", lost),
    "unweighted": patch("turbogr.strategies.pipeline.loss_weight", lambda samples, rank: 1.0),
}


def mistaken(name: str) -> dict[str, Any]:
    with MISTAKES[name]:
        return train(name, "sync", ATTENTION, {"limit_train_batches": 1})


def resumed(mode: str, data: dict[str, Any], then: dict[str, Any]) -> dict[str, Any]:
    """Stopped in the middle of the second epoch, and taken up again with other options; beside it the same without a stop."""
    name = f"resumed {mode} {len(data)}{len(then)}"
    last = OUT / f"{name}.ckpt"
    options = WHOLE | {"dropout": 0.0, "val_check_interval": 3}
    stopped = train(f"{name} stopped", mode, data, options | {"max_steps": 5}, callbacks=[LastCheckpoint(last)])
    assert stopped["steps"] == 5
    rest = train(f"{name} rest", mode, then, options, ckpt_path=last)
    whole = train(f"{name} whole", mode, data, options)
    return {"name": name, "stopped": stopped, "rest": rest, "whole": whole}


def interrupted(mode: str) -> dict[str, Any]:
    """By a signal to one rank, anywhere."""
    last = OUT / f"interrupted {mode}.ckpt"
    data = CUT | TOKENS
    first = Users()
    strategy = TurboGRStrategy(1, mode=mode, timeout_s=60)
    callbacks = [first, LastCheckpoint(last), SignalOn(1, 2)]
    try:
        fit(PREPARED, 2, strategy, callbacks, rows="adagrad", data=data, **WHOLE)
    except TrainingInterrupted:
        pass
    else:
        raise AssertionError("went through")
    rest, whole = Users(), Users()
    digests = []
    for users, path in ((rest, last), (whole, None)):
        strategy = TurboGRStrategy(1, mode=mode, timeout_s=60)
        fit(PREPARED, 2, strategy, [users], rows="adagrad", data=data, ckpt_path=path, **WHOLE)
        digests.append(digest(strategy))
    return {"first": first.steps, "rest": rest.steps, "whole": whole.steps, "digests": digests}


def refused(mode: str) -> str:
    last = OUT / f"refused {mode}.ckpt"
    options = WHOLE | {"max_steps": 2}
    train("refused", mode, CUT | TOKENS, options, callbacks=[LastCheckpoint(last)])
    try:
        train("refused", mode, TOKENS, WHOLE, ckpt_path=last)
    except ConfigurationError as error:
        return str(error)
    return "went through"


def checks() -> dict[str, Any]:
    found: dict[str, Any] = {}
    for mode in MODES:
        found |= {f"{name}, {mode}": partial(train, name, mode, *case) for name, case in CASES.items()}
        found[f"resumed, {mode}"] = partial(resumed, mode, CUT | TOKENS, CUT | TOKENS)
        found[f"resumed otherwise, {mode}"] = partial(resumed, mode, TOKENS, ATTENTION)
        found[f"interrupted, {mode}"] = partial(interrupted, mode)
        found[f"refused, {mode}"] = partial(refused, mode)
    return found | {name: partial(mistaken, name) for name in MISTAKES}


if __name__ == "__main__":
    PREPARED, OUT = Path(sys.argv[1]), Path(sys.argv[2])
    with patch("tests.distributed.strategy_cases.adam", sgd):
        report_checks(checks(), backend="")
