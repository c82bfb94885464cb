"""Runs on every rank: trains on the simulated device, and reports what was waited for, and what a CPU makes of the same."""

from __future__ import annotations

import contextlib
import functools
import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import lightning.pytorch as pl
import torch
from torch import distributed

from tests.accelerators import simulated
from tests.distributed.launch import report_checks
from tests.distributed.strategy_cases import QUIET, ROWS, Batches, Toy, adam
from turbogr.callbacks.logit_sharing import LogitSharing
from turbogr.callbacks.negative_offload import NegativeOffload
from turbogr.callbacks.negative_quantization import NegativeQuantization
from turbogr.data.datamodule import SequenceDataModule
from turbogr.errors import ConfigurationError
from turbogr.models.fuxi import FuXi
from turbogr.models.hstu import HSTU
from turbogr.models.retriever import GenerativeRetriever
from turbogr.models.sasrec import SASRec
from turbogr.sparse.table import EmbeddingTable
from turbogr.strategies import TurboGRStrategy, transfer

FIRST, LAST = 5, 8
"""Steps that are looked at: the pipeline is full, and everything has been compiled, allocated and logged once."""


class Strategy(TurboGRStrategy):
    """Without DDP, whose C++ knows nothing of Python's tensors; `Steps` brings dense gradients together."""

    def configure_ddp(self) -> None:
        """Nothing."""


class Steps(pl.Callback):
    """Notes what is written down from the begin of one step to the begin of another."""

    begin = end = 0

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
        if batch_idx == FIRST:
            self.begin = len(simulated.notes)
        if batch_idx == LAST:
            self.end = len(simulated.notes)

    def on_before_optimizer_step(self, trainer: Any, pl_module: Any, optimizer: Any) -> None:
        if trainer.world_size > 1:
            for parameter in pl_module.parameters():
                if parameter.grad is not None:
                    distributed.all_reduce(parameter.grad)
                    parameter.grad /= trainer.world_size


class Reading(pl.Callback):
    """Reads the loss at every step."""

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        outputs["loss"].item()


def model_of(data: SequenceDataModule, kind: str, combine: str) -> GenerativeRetriever:
    backbone = {
        "HSTU": functools.partial(HSTU, dim=8, num_blocks=1, num_heads=2),
        "FuXi": functools.partial(FuXi, dim=8, num_blocks=1),
        "SASRec": functools.partial(SASRec, dim=8, num_blocks=1),
    }[kind]
    pl.seed_everything(7)
    options = {"optimizer": adam, "top_k": (1, 10), "features": data.features, "combine": combine}
    return GenerativeRetriever(
        data.num_items, backbone(max_length=20, dropout=0.1), EmbeddingTable(ROWS["lazy_adam"]()), **options
    )


def run(accelerator: str, model: pl.LightningModule, data: Any, callbacks: Any = (), **options: Any) -> Steps:
    """Trains on one kind of device."""
    steps, own = Steps(), {key: options.pop(key) for key in ("mode", "groups", "sparse_clip_norm") if key in options}
    strategy = Strategy(**own, process_group_backend=f"cpu:gloo,{simulated.NAME}:gloo")
    world = int(os.environ["WORLD_SIZE"])
    settings = {"max_epochs": 1, "enable_checkpointing": False, "limit_val_batches": 1, "devices": world, **options}
    trainer = pl.Trainer(**{**QUIET, "accelerator": accelerator}, strategy=strategy, callbacks=[steps, *callbacks], **settings)
    trainer.fit(model, data)
    return steps


def found(steps: Steps) -> dict[str, list[str]]:
    """Kind of note -> what was written down in the steps that are looked at; of races and reuses, everywhere."""
    looked_at = simulated.notes[steps.begin : steps.end]
    kinds = {kind: [f"{x.what} < {' < '.join(x.where)}" for x in looked_at if x.kind == kind] for kind in ("wait", "copy")}
    return kinds | {
        kind: [f"{x.what} < {' < '.join(x.where)}" for x in simulated.notes if x.kind == kind] for kind in ("race", "reuse")
    }


def difference(one: pl.LightningModule, other: pl.LightningModule) -> float:
    """The largest relative one of all tensors."""
    theirs = other.state_dict()
    return max(
        float((raw(x).double() - raw(theirs[name]).double()).norm() / raw(theirs[name]).double().norm().clamp(min=1e-12))
        for name, x in one.state_dict().items()
        if x.is_floating_point() and not name.endswith("key.bias")  # of a softmax: its gradient is 0, but for rounding
    )


def raw(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.raw if isinstance(tensor, simulated.OnDevice) else tensor


def retriever(folder: Path, kind: str = "HSTU", combine: str = "concat", compared: bool = True, **options: Any) -> Any:
    """A model with features of events and items, on the device and on the CPU."""
    simulated.notes.clear()
    ranks = int(os.environ["WORLD_SIZE"])
    models = {}
    data_options = {"batch_size": 8 // ranks, "max_length": 20, "num_negatives": 6, "num_workers": 0, "seed": 1}
    result: dict[str, Any] = {}
    for accelerator in (simulated.NAME, "cpu") if compared else (simulated.NAME,):
        data = SequenceDataModule(folder, **data_options)
        models[accelerator] = model_of(data, kind, combine)
        steps = run(accelerator, models[accelerator], data, **options)
        if accelerator == simulated.NAME:
            result = found(steps)
            result["streams"] = sorted({x.stream for x in simulated.notes if x.kind == "copy"})
    if compared:
        result["difference"] = difference(models[simulated.NAME], models["cpu"])
    return result


def negatives(folder: Path, **options: Any) -> Any:
    """Negatives in half precision on the host, shared; without features of items, whose rows cannot be kept apart."""
    simulated.notes.clear()
    models = []
    for accelerator in (simulated.NAME, "cpu"):
        data = SequenceDataModule(folder, batch_size=8, max_length=20, num_negatives=6, num_workers=0, seed=1, features=["tab"])
        models.append(model_of(data, "HSTU", "sum"))
        callbacks = [NegativeOffload(segment=30, mode="offload"), NegativeQuantization(), LogitSharing()]
        steps = run(accelerator, models[-1], data, callbacks, **options)
        if accelerator == simulated.NAME:
            result = found(steps)
    return {**result, "difference": difference(*models)}


def toy(**options: Any) -> Any:
    """A module of one's own, whose loader pins nothing."""
    simulated.notes.clear()
    models = []
    for accelerator in (simulated.NAME, "cpu"):
        pl.seed_everything(7)
        models.append(Toy())
        steps = run(accelerator, models[-1], Batches(12, 1), limit_train_batches=12, limit_val_batches=0, **options)
        if accelerator == simulated.NAME:
            result = found(steps)
    return {**result, "difference": difference(*models)}


class Changing(Toy):
    """Changes batches on the device."""

    def on_after_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        return batch


class Shorter(Toy):
    """Looks up fewer ids than it named."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return self.layer(self.embeddings({"ids": batch[0][1:]})["ids"]).mean()


def refused(model: pl.LightningModule) -> str:
    try:
        run(simulated.NAME, model, Batches(4, 1), limit_train_batches=4, limit_val_batches=0)
    except ConfigurationError as error:
        return str(error)
    return "trained"


@contextlib.contextmanager
def without(owner: Any, name: str) -> Iterator[None]:
    """A negative control: a function that does nothing."""
    with mock.patch.object(owner, name, lambda *args: args[0] if owner is transfer else None):
        yield


def controlled(owner: Any, name: str, check: Callable[[], Any]) -> Any:
    with without(owner, name):
        return check()


def main() -> None:
    folder, ranks = Path(sys.argv[1]), int(os.environ["WORLD_SIZE"])
    simulated.install()
    of = functools.partial(retriever, folder)
    some = {"mode": "semi_async", "compared": False}
    checks: dict[str, Callable[[], Any]] = {}
    if ranks == 1:
        checks |= {
            f"{kind}, {mode}": functools.partial(of, kind, mode=mode)
            for kind, mode in (("HSTU", "semi_async"), ("HSTU", "sync"), ("FuXi", "semi_async"), ("SASRec", "semi_async"))
        }
        checks |= {
            "sums, accumulated, clipped": functools.partial(
                of, combine="sum", accumulate_grad_batches=2, gradient_clip_val=0.1, sparse_clip_norm=0.1
            ),
            "toy": toy,
            "negatives": functools.partial(negatives, folder),
            "reading": functools.partial(of, callbacks=[Reading()], **some),
            "unpinned": functools.partial(controlled, transfer, "pin_memory", toy),
            "no waiting for copies": functools.partial(
                controlled, simulated.Stream, "wait_event", functools.partial(of, **some)
            ),
            "copies that do not wait": functools.partial(
                controlled, simulated.Stream, "wait_stream", functools.partial(of, **some)
            ),
            "changing": functools.partial(refused, Changing()),
            "shorter": functools.partial(refused, Shorter()),
        }
    else:
        checks |= {
            f"{groups} groups, {mode}": functools.partial(of, mode=mode, groups=groups, sparse_clip_norm=0.1)
            for groups in (1, 2)
            for mode in ("semi_async", "sync")
        }
        checks["no waiting"] = functools.partial(
            controlled, simulated.Stream, "wait_event", functools.partial(of, groups=2, **some)
        )
    report_checks(checks, backend="")


if __name__ == "__main__":
    main()
