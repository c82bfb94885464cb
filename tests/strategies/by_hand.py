"""Training whose rows are updated late, written down as plainly as can be: what mode semi_async is compared with."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Sequence
from contextlib import nullcontext
from typing import Any, NamedTuple

import lightning.pytorch as pl
import torch
from lightning.fabric.utilities.data import _set_sampler_epoch

from turbogr.sparse.catalogue import LocalCatalogue
from turbogr.sparse.table import EmbeddingTable, Lookup


class Rows:
    """Stands for an engine: a training step finds the rows that it was given, evaluation those of the table."""

    lookup: Lookup

    def __init__(self, table: EmbeddingTable) -> None:
        self.table = table

    def take(self, features):
        return self.lookup

    def fetch(self, request):
        return self.table.weight.detach()[request.ids]

    def catalogue(self, vectors):
        return LocalCatalogue(vectors)


class Update(NamedTuple):
    """One update of rows, with the rate of its own step."""

    last: int  # batch whose step it belongs to
    ids: torch.Tensor
    gradient: torch.Tensor
    scale: float

    def apply(self, table: EmbeddingTable) -> None:
        with torch.no_grad():
            table.optimizer.step(table.weight, self.ids, self.gradient, "auto", self.scale)


def train(
    model: pl.LightningModule,
    loader: Iterable[Any],
    epochs: int = 2,
    tau: int = 1,
    accumulate: int = 1,
    clip: float | None = None,
    sparse_clip: float | None = None,
    follow: bool = False,
    seed: Callable[[int, int], None] | None = None,
    validation: Sequence[Any] = (),
    every: int = 0,
    autocast: bool = False,
) -> dict[str, Any]:
    """Trains; rows of batch k hold the updates of all steps up to batch k - 1 - tau of its epoch, and of earlier epochs.

    Args:
        model: with one EmbeddingTable, `embeddings`; without a trainer.
        loader: of its batches.
        epochs: how many.
        tau: steps by which rows are late.
        accumulate: batches of a step; the last step of an epoch may have fewer.
        clip: largest norm of the dense gradients.
        sparse_clip: largest norm of a step's rows' gradients.
        follow: rows follow the schedule of the dense rate.
        seed: called with epoch and batch before each step.
        validation: batches of a validation, which sees all updates.
        every: batches after which it takes place; 0 for none.
        autocast: to bfloat16.

    Returns:
        The tensors of the model and of its dense optimizer, and the metrics of every validation.
    """
    table = model.embeddings
    rows = table.engine = Rows(table)
    optimizer, schedulers = configured(model)
    first_rate = optimizer.param_groups[0]["lr"]
    waiting: list[Update] = []
    metrics = []
    for epoch in range(epochs):
        _set_sampler_epoch(loader, epoch)
        batches = list(loader)
        window: list[tuple[torch.Tensor, torch.Tensor]] = []
        for k, batch in enumerate(batches):
            while waiting and waiting[0].last < k - tau:
                waiting.pop(0).apply(table)
            if seed is not None:
                seed(epoch, k)
            request = table.request(model.sparse_features(batch), trains=True)
            lookup = rows.lookup = Lookup.of(request, reader(table.weight.detach()[request.ids]), table.apart, trains=True)
            if k % accumulate == 0:
                optimizer.zero_grad()
            with torch.autocast("cpu", torch.bfloat16) if autocast else nullcontext():
                loss = model.training_step(batch, k)
            if loss is not None:
                (loss / accumulate).backward()
                window.append((request.ids, lookup.take_gradient()))
            if (k + 1) % accumulate == 0 or k + 1 == len(batches):
                if clip is not None:
                    torch.nn.utils.clip_grad_norm_(model.parameters(), clip)
                optimizer.step()
                if window:
                    scale = optimizer.param_groups[0]["lr"] / first_rate if follow else 1.0
                    waiting.append(Update(k, *together(window, sparse_clip), scale))
                    window = []
                for scheduler in schedulers:
                    scheduler.step()
            if every and (k + 1) % every == 0:
                metrics.append(validated(model, waiting, validation))
        while waiting:
            waiting.pop(0).apply(table)
    table.engine = None
    return {"tensors": tensors(model, optimizer), "metrics": metrics}


def reader(rows: torch.Tensor) -> Callable[[torch.Tensor | None], torch.Tensor]:
    """What a look-up reads its rows with."""
    return lambda places: rows if places is None else rows[places]


def tensors(model: pl.LightningModule, optimizer: torch.optim.Optimizer) -> dict[str, torch.Tensor]:
    """Copies of the weights, the rows, the rows' state and the dense optimizer's."""
    found = dict(model.state_dict())
    for key, state in optimizer.state_dict()["state"].items():
        found |= {f"optimizer, {key}, {name}": value for name, value in state.items() if value is not None}
    return {name: tensor.clone() for name, tensor in found.items()}


def configured(model: pl.LightningModule) -> tuple[torch.optim.Optimizer, list[Any]]:
    """What `configure_optimizers` returns, in its three forms that are used here."""
    made = model.configure_optimizers()
    if isinstance(made, dict):
        return made["optimizer"], [made["lr_scheduler"]["scheduler"]]
    if isinstance(made, tuple):
        return made[0][0], [one["scheduler"] for one in made[1]]
    return made, []


def together(window: list[tuple[torch.Tensor, torch.Tensor]], clip: float | None) -> tuple[torch.Tensor, torch.Tensor]:
    """Every row of a window once, with the sum of its gradients, batch after batch."""
    ids = torch.cat([one for one, _ in window]).unique()
    gradient = window[0][1].new_zeros(len(ids), window[0][1].shape[1])
    for own, part in window:
        gradient.index_add_(0, torch.searchsorted(ids, own), part)
    if clip is not None:
        norm = gradient.double().square().sum().sqrt()
        gradient = gradient * (clip / (norm + 1e-6)).clamp(max=1.0).float()
    return ids, gradient


def validated(model: pl.LightningModule, waiting: list[Update], batches: Sequence[Any]) -> dict[str, float]:
    """Metrics of a copy of the model that has all updates."""
    model = copy.deepcopy(model).eval()
    for update in waiting:
        update.apply(model.embeddings)
    with torch.no_grad():
        model.on_validation_epoch_start()
        for number, batch in enumerate(batches):
            model.validation_step(batch, number)
    return {name: float(value) for name, value in model.val_metrics.compute().items()}
