"""Runs on every rank: what Timeline and LoadBalance see of steps on two ranks."""

from __future__ import annotations

import hashlib
import sys
from functools import partial
from pathlib import Path
from typing import Any

import lightning.pytorch as pl

from tests.distributed.launch import report_checks
from tests.distributed.strategy_cases import QUIET, build, digest, fit
from turbogr.callbacks.load_balance import LoadBalance
from turbogr.callbacks.timeline import Timeline
from turbogr.strategies import TurboGRStrategy

RANKS = 2
USERS = 4
"""Of a step, on each rank."""
MODES = {
    "semi_async": {"mode": "semi_async"},
    "semi_async, 2 groups": {"mode": "semi_async", "groups": 2},
    "sync": {"mode": "sync"},
}


def trained(trainer: pl.Trainer) -> list[str]:
    """Digests of this rank's rows, and of the dense parameters."""
    dense = [p.detach().numpy().tobytes() for p in trainer.lightning_module.parameters() if p.requires_grad]
    return [digest(trainer.strategy), hashlib.sha256(b"".join(dense)).hexdigest()]


def timeline(folder: Path, out: Path, name: str) -> dict[str, Any]:
    """What the callback saw, which files there are then, and what is trained with it and without."""
    ends = []
    for seen in (Timeline(6, 3, path=out / "timeline.json", all_ranks=name == "semi_async"), None):
        strategy = TurboGRStrategy(**MODES[name], timeout_s=60.0)
        callbacks = [] if seen is None else [seen]
        trainer = fit(folder, RANKS, strategy, callbacks, data={"batch_size": USERS}, limit_train_batches=16)
        ends.append(trained(trainer))
        if seen is not None:
            window = seen.window
            trainer.strategy.barrier()
    return {
        "files": sorted(path.name for path in out.iterdir()),
        "ends": ends,
        "window": window and [window.epoch, window.first, window.steps],
        "spans": window and window.spans,
        "shares": window and window.shares,
    }


class Watched(LoadBalance):
    """Counts what is gathered, and notes the tokens of this rank."""

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        self.tokens: list[int] = []
        self.gathers = 0

    def setup(self, trainer, pl_module, stage):
        super().setup(trainer, pl_module, stage)
        gather = trainer.strategy.all_gather

        def counted(*args, **kwargs):
            self.gathers += 1
            return gather(*args, **kwargs)

        trainer.strategy.all_gather = counted

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        super().on_train_batch_end(trainer, pl_module, outputs, batch, batch_idx)
        self.tokens.append(batch.num_tokens)

    def report(self, out: Path) -> dict[str, Any]:
        sides = {name: list(getattr(self, name).differences) for name in ("before", "after")}
        return sides | {"tokens": self.tokens, "gathers": self.gathers, "files": [path.name for path in out.iterdir()]}


def balance(folder: Path, out: Path, **data: Any) -> dict[str, Any]:
    """Two epochs, the second cut short."""
    seen = Watched(out / "load_balance.png")
    trainer = fit(
        folder,
        RANKS,
        TurboGRStrategy(timeout_s=60.0),
        [seen],
        data={"batch_size": USERS, **data},
        max_epochs=2,
        limit_train_batches=1.0,
        max_steps=20,
    )
    trainer.strategy.barrier()
    return seen.report(out)


class Own:
    """A user's loader."""

    def __init__(self, batches: list[Any]) -> None:
        self.made = batches

    def __iter__(self):
        return iter(self.made)


def own_loader(folder: Path, out: Path) -> dict[str, Any]:
    """Of unlike lengths on the ranks."""
    seen = Watched(out / "load_balance.png")
    model, module = build(folder, RANKS)
    trainer = pl.Trainer(
        **QUIET,
        devices=RANKS,
        max_epochs=2,
        callbacks=[seen],
        enable_checkpointing=False,
        strategy=TurboGRStrategy(timeout_s=60.0),
    )
    rank = trainer.global_rank
    made = [batch for _, batch in zip(range(4 + rank), module.train_dataloader(), strict=False)]
    trainer.fit(model, Own(made[rank:] if rank else made))
    trainer.strategy.barrier()
    return seen.report(out)


def main() -> None:
    folder, out = map(Path, sys.argv[1:])
    checks = {name: partial(timeline, folder, out / name, name) for name in MODES}
    checks["balanced"] = partial(balance, folder, out / "balanced", balance="tokens", tokens_per_batch="auto")
    checks["unbalanced"] = partial(balance, folder, out / "unbalanced")
    checks["own loader"] = partial(own_loader, folder, out / "own loader")
    for name in checks:
        (out / name).mkdir(exist_ok=True)
    report_checks(checks, backend="")


if __name__ == "__main__":
    main()
