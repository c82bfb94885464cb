"""What training will cost: sizes of the model, lengths of the data, operations and bytes of a step. Nothing is trained.

The parts of a plan that depend on lengths come from batches that training will really draw: an epoch's order is known before it
begins. Two of them are taken through a `DryRun` of the model's own training step, so that any backbone, loss or optimizer is
counted, and neither the table nor the activations need memory.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

import turbogr
from turbogr.batch import JaggedBatch
from turbogr.data.datamodule import SequenceDataModule
from turbogr.data.histories import TrainingHistories
from turbogr.data.negatives import Int64Array
from turbogr.dry_run import Allocations, DryRun
from turbogr.errors import ConfigurationError
from turbogr.flops import Pairs, attention_formulas, causal_pairs, padded_pairs
from turbogr.models.retriever import GenerativeRetriever
from turbogr.negative_bytes import NegativeBytes, NegativeLoad, choices, offload_below

QUANTILES = {"p50": 0.5, "p99": 0.99}
"""The batches of an epoch that are looked at, by their number of tokens."""

SHARING = 2
"""Expansion factor of shared logits with which negatives are counted."""

PREFETCHED = 2
"""Batches that a loader's worker holds ready: the default of `torch.utils.data.DataLoader`."""

KINDS = {"attention": "attention", "sampled_softmax": "loss", "negative_logits": "loss", "embedding_lookup": "item table"}
"""What an operator is for, by a part of its name; PyTorch's own products are "products", others go by their name."""

_MIXED = {"bf16": torch.bfloat16, "bf16-mixed": torch.bfloat16, "16": torch.float16, "16-mixed": torch.float16}

T = TypeVar("T")


@dataclass(frozen=True)
class Spread:
    """How a number varies."""

    mean: float
    p50: float
    p99: float
    most: float

    @classmethod
    def of(cls, values: Int64Array) -> Spread:
        """Of int64 [N], N at least 1."""
        p50, p99 = np.quantile(values, [0.5, 0.99])
        return cls(float(values.mean()), float(p50), float(p99), float(values.max()))


@dataclass(frozen=True)
class DataCost:
    """An epoch of training.

    Attributes:
        users: that are trained on.
        steps: batches of an epoch.
        tokens: of an epoch.
        history: tokens of a user.
        batch_tokens: tokens of a batch.
        batch_pairs: pairs of tokens in a batch that causal attention computes, n (n + 1) / 2 for a history of n.
        mapped_bytes: the prepared arrays, which are mapped into memory and read as needed.
        workers: processes that build batches.
    """

    users: int
    steps: int
    tokens: int
    history: Spread
    batch_tokens: Spread
    batch_pairs: Spread
    mapped_bytes: int
    workers: int


@dataclass(frozen=True)
class ModelCost:
    """What is there all the time.

    Attributes:
        backbone: its class.
        dense: parameters of each part of the model that the dense optimizer trains.
        dense_bytes: bytes of these parameters, and once more of their gradients.
        optimizer: class of the dense optimizer; empty where it could not be tried.
        optimizer_bytes: its state after a step.
        tables: rows of each table, the items' first.
        table_rows: of all tables: the sparse parameters.
        table_width: width of a row.
        table_bytes: bytes of the tables.
        table_optimizer: class of the tables' row optimizer.
        table_optimizer_bytes: its state.
        item_rows_bytes: which row each item has in the tables of its features.
    """

    backbone: str
    dense: dict[str, int]
    dense_bytes: int
    optimizer: str
    optimizer_bytes: int
    tables: dict[str, int]
    table_rows: int
    table_width: int
    table_bytes: int
    table_optimizer: str
    table_optimizer_bytes: int
    item_rows_bytes: int

    @property
    def resident_bytes(self) -> int:
        """All of it, without gradients."""
        sparse = self.table_bytes + self.table_optimizer_bytes + self.item_rows_bytes
        return self.dense_bytes + self.optimizer_bytes + sparse


@dataclass(frozen=True)
class StepCost:
    """One training step on one batch.

    Attributes:
        users: histories of the batch.
        tokens: of the batch.
        longest: tokens of its longest history.
        pairs: of tokens that causal attention computes.
        negatives: drawn for each token.
        distinct_rows: of the table that the batch looks up.
        forward: operations by kind; two for a multiplication and its addition.
        backward: operations by kind.
        padded: operations, forward and backward, if all histories were padded to the longest and attention were a full square.
        batch_bytes: the batch's own tensors: ids, times, negatives.
        negative_bytes: the drawn ids, and where each of them finds its row.
        negative_choices: all that negatives take, by how they are looked up and kept (`turbogr.negative_bytes.choices`).
        offload_below: bytes of a device's memory below which `NegativeOffload` of mode auto would offload them; 0 for never.
        kept: bytes that wait for backward, by part: "look-up" (distinct rows, tokens, where each id finds its row), "backbone",
            "loss" (normalised rows, logits of targets and negatives).
        row_gradient_bytes: the gradient of the distinct rows.
        most_bytes: the most that operators' results take at once during a step, gradients of all parameters included.
    """

    users: int
    tokens: int
    longest: int
    pairs: int
    negatives: int
    distinct_rows: int
    forward: dict[str, int]
    backward: dict[str, int]
    padded: int
    batch_bytes: int
    negative_bytes: int
    negative_choices: dict[str, NegativeBytes]
    offload_below: float
    kept: dict[str, int]
    row_gradient_bytes: int
    most_bytes: int

    @property
    def operations(self) -> int:
        """Forward and backward."""
        return sum(self.forward.values()) + sum(self.backward.values())


@dataclass(frozen=True)
class Plan:
    """What training will cost.

    Attributes:
        data: an epoch.
        model: what is there all the time.
        steps: costs of a step by the key of QUANTILES; empty where the step could not be taken without computing.
        precision: the trainer's.
        notes: what was left out, and why.
    """

    data: DataCost
    model: ModelCost
    steps: dict[str, StepCost]
    precision: str
    notes: list[str] = field(default_factory=list)

    def total_bytes(self, step: StepCost) -> int:
        """On the device, when a step takes most; without workspaces inside operators."""
        return self.model.resident_bytes + step.batch_bytes + step.most_bytes

    def host_bytes(self, step: StepCost) -> int:
        """Of the data, on the host: the mapped arrays, and the batches that are ready or in use."""
        return self.data.mapped_bytes + step.batch_bytes * (1 + self.data.workers * PREFETCHED)

    def as_dict(self) -> dict[str, Any]:
        """For JSON: all of the above with the sums that the tables show."""
        sums = {
            name: {
                "operations": step.operations,
                "device_bytes": self.total_bytes(step),
                "host_bytes": self.host_bytes(step),
                "negatives": {choice: found.device for choice, found in step.negative_choices.items()},
            }
            for name, step in self.steps.items()
        }
        return {"turbogr": turbogr.__version__, **asdict(self), "sums": sums}


def plan(model: GenerativeRetriever, data: SequenceDataModule, precision: str = "32-true") -> Plan:
    """Plans the training of a model.

    Args:
        model: built on the device `meta`; its tensors are replaced by fake ones, it cannot be trained afterwards.
        data: what it is to be trained on.
        precision: the trainer's; mixed precision decides what products and attention keep.

    Raises:
        DataError: if there is nothing to train on.
        ConfigurationError: if an epoch would have no batch.
    """
    loader = data.train_dataloader()
    assert isinstance(loader.dataset, TrainingHistories)
    histories, keys = loader.dataset, list(loader.batches)
    lengths = [histories.batch_lengths(key) for key in keys]
    tokens = np.array([x.sum() for x in lengths])
    prepared = data.prepared
    cost = DataCost(
        users=len(loader.batches.samples),
        steps=len(keys),
        tokens=int(tokens.sum()),
        history=Spread.of(np.concatenate(lengths)),
        batch_tokens=Spread.of(tokens),
        batch_pairs=Spread.of(np.array([(x * (x + 1) // 2).sum() for x in lengths])),
        mapped_bytes=prepared.items.nbytes + prepared.times.nbytes + prepared.offsets.nbytes + _feature_bytes(data),
        workers=data.num_workers,
    )
    order = np.argsort(tokens, kind="stable")
    chosen = {name: keys[order[round(q * (len(keys) - 1))]] for name, q in QUANTILES.items()}

    dry = DryRun()
    dry.adopt(model)
    steps: dict[str, StepCost] = {}
    notes: list[str] = []
    optimizer = None
    try:
        with torch.random.fork_rng(devices=[]):  # seeds of dropout are drawn
            for name, key in chosen.items():
                steps[name] = _step(model, histories[key], dry, precision)
            optimizer = _optimizer_after_a_step(model, dry)
    except ConfigurationError:
        raise
    except (RuntimeError, TypeError, ValueError) as error:
        # What fake tensors raise where code reads values, and what code raises that finds no values.
        missing = "the optimizer's state is" if steps.keys() == chosen.keys() else "operations and activations are"
        reason = " ".join(str(error).split()) or type(error).__name__
        notes.append(f"{missing} not counted, because a step cannot be taken without computing: {reason}")
    return Plan(cost, _model_cost(model, optimizer), steps, precision, notes)


def _feature_bytes(data: SequenceDataModule) -> int:
    """Of the arrays of the features in use."""
    of_events = data.prepared.event_features
    arrays = [of_events[f.name] if f.item_rows is None else f.item_rows for f in data.features]
    return sum(array.nbytes for array in arrays)


def _step(model: GenerativeRetriever, batch: JaggedBatch, dry: DryRun, precision: str) -> StepCost:
    assert batch.negatives is not None
    kept, most = _step_bytes(model, batch, dry, precision)
    with dry:
        loss, forward = _counted(lambda: _forward(model, batch, precision))
        _, backward = _counted(loss.backward)
    of_backbone = _backbone_operations(model, batch, dry, precision, causal_pairs)
    of_padded = _backbone_operations(model, _padded(batch), dry, precision, padded_pairs)
    others = sum(forward.values()) + sum(backward.values()) - of_backbone
    lengths, weight = batch.lengths, model.embeddings.weight
    padded_tokens = batch.num_users * int(lengths.max())
    rows = len(model.embeddings.request(model.sparse_features(batch)).ids)
    negatives = NegativeLoad.of(batch, weight.shape[1])
    return StepCost(
        users=batch.num_users,
        tokens=batch.num_tokens,
        longest=int(lengths.max()),
        pairs=causal_pairs(batch.offsets),
        negatives=batch.negatives.shape[1],
        distinct_rows=rows,
        forward=forward,
        backward=backward,
        padded=of_padded + round(others * padded_tokens / batch.num_tokens),
        batch_bytes=sum(x.nbytes for x in (*vars(batch).values(), *batch.features.values()) if isinstance(x, Tensor)),
        negative_bytes=2 * batch.negatives.nbytes,
        negative_choices=choices(negatives, NegativeLoad.of(batch, weight.shape[1], -(-negatives.drawn // SHARING)), SHARING),
        offload_below=offload_below(negatives),
        kept=kept,
        row_gradient_bytes=rows * weight.shape[1] * weight.element_size(),
        most_bytes=most,
    )


def _step_bytes(model: GenerativeRetriever, batch: JaggedBatch, dry: DryRun, precision: str) -> tuple[dict[str, int], int]:
    """What is kept for backward, by part, and the most at once. A step of its own: counting operations keeps tensors alive."""
    model.zero_grad()
    model.embeddings.discard_gradients()
    dry.allocations, dry.part = Allocations(), "look-up"
    hooks = [
        model.backbone.register_forward_pre_hook(partial(_enter, dry, "backbone")),
        model.backbone.register_forward_hook(partial(_enter, dry, "loss")),
    ]
    with dry:
        loss = _forward(model, batch, precision)
        kept = dry.allocations.by_part()
        loss.backward()
    for hook in hooks:
        hook.remove()
    return kept, dry.allocations.most


def _enter(dry: DryRun, part: str, *_: object) -> None:
    dry.part = part


def _forward(model: GenerativeRetriever, batch: JaggedBatch, precision: str) -> Tensor:
    with warnings.catch_warnings(), _autocast(precision):
        warnings.filterwarnings("ignore", message=".*self.trainer. reference is not registered.*")
        return model.training_step(batch, 0)


def _autocast(precision: str) -> torch.autocast | nullcontext[None]:
    return torch.autocast("cpu", _MIXED[precision]) if precision in _MIXED else nullcontext()


def _counted(function: Callable[[], T], formulas: Mapping[Any, Any] | None = None) -> tuple[T, dict[str, int]]:
    """What the function gives, and its operations by kind."""
    with FlopCounterMode(display=False, custom_mapping=dict(formulas or {})) as counter:
        result = function()
    kinds: dict[str, int] = {}
    for operator, count in counter.get_flop_counts().get("Global", {}).items():
        name = str(operator)
        products = "products" if name.startswith("aten.") else name
        kind = next((kind for part, kind in KINDS.items() if part in name), products)
        kinds[kind] = kinds.get(kind, 0) + count
    return result, kinds


def _padded(batch: JaggedBatch) -> JaggedBatch:
    """A batch of the same users, all with the longest history; of its items and times only the number counts."""
    length = int(batch.lengths.max())
    nothing = torch.zeros(batch.num_users * length, dtype=torch.int64)
    offsets = torch.arange(batch.num_users + 1) * length
    return replace(
        batch,
        values=nothing,
        timestamps=nothing,
        targets=nothing,
        target_times=nothing,
        offsets=offsets,
        negatives=None,
        features={},
    )


def _backbone_operations(model: GenerativeRetriever, batch: JaggedBatch, dry: DryRun, precision: str, pairs: Pairs) -> int:
    """Of the backbone alone, forward and backward."""
    with dry, _autocast(precision):
        tokens = torch.empty(batch.num_tokens, model.backbone.dim, requires_grad=True)
        _, kinds = _counted(lambda: model.backbone(tokens, batch).sum().backward(), attention_formulas(pairs))
    return sum(kinds.values())


def _optimizer_after_a_step(model: GenerativeRetriever, dry: DryRun) -> torch.optim.Optimizer:
    """The dense optimizer with the state that its first step creates."""
    made = model.configure_optimizers()
    optimizer = made["optimizer"] if isinstance(made, dict) else made
    assert isinstance(optimizer, torch.optim.Optimizer)
    with dry:
        optimizer.step()
    return optimizer


def _model_cost(model: GenerativeRetriever, optimizer: torch.optim.Optimizer | None) -> ModelCost:
    dense = {name: x for name, x in model.named_parameters() if x.requires_grad}
    parts: dict[str, int] = {}
    for name, parameter in dense.items():
        part = ".".join(name.split(".")[:2])
        parts[part] = parts.get(part, 0) + parameter.numel()
    table = model.embeddings
    state = [] if optimizer is None else [x for values in optimizer.state.values() for x in values.values()]
    return ModelCost(
        backbone=type(model.backbone).__name__,
        dense=parts,
        dense_bytes=sum(x.nbytes for x in dense.values()),
        optimizer="" if optimizer is None else type(optimizer).__name__,
        optimizer_bytes=sum(x.nbytes for x in state if isinstance(x, Tensor)),
        tables=dict(model.tokens.tables),
        table_rows=table.weight.shape[0],
        table_width=table.weight.shape[1],
        table_bytes=table.weight.nbytes,
        table_optimizer=type(table.optimizer).__name__,
        table_optimizer_bytes=sum(x.nbytes for x in table.optimizer.buffers()),
        item_rows_bytes=sum(model.tokens.item_rows(name).nbytes for name in model.tokens.names["item"]),
    )
