"""What training will cost: sizes of the model, lengths of the data, operations and bytes of a step. Nothing is trained.

The parts of a plan that depend on lengths come from batches that training will really draw: an epoch's order is known before it
begins. Two of them are taken through a `DryRun` of the model's own training step, so that any backbone, loss or optimizer is
counted, and neither the table nor the activations need memory.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

from turbogr.batch import JaggedBatch
from turbogr.costs import DataCost, ModelCost, Plan, Spread, StepCost
from turbogr.data.datamodule import SequenceDataModule
from turbogr.data.histories import TrainingHistories
from turbogr.dry_run import Allocations, DryRun
from turbogr.errors import ConfigurationError
from turbogr.flops import Pairs, attention_formulas, causal_pairs, padded_pairs
from turbogr.models.retriever import GenerativeRetriever
from turbogr.negative_bytes import NegativeLoad, choices, offload_below

QUANTILES = {"p50": 0.5, "p99": 0.99}
"""The batches of an epoch that are looked at, by their number of tokens."""

SHARING = 2
"""Expansion factor of shared logits with which negatives are counted."""

KINDS = {"attention": "attention", "sampled_softmax": "loss", "negative_logits": "loss", "embedding_lookup": "item table"}
"""What an operator is for, by a part of its name; PyTorch's own products are "products", others go by their name."""

_MIXED = {"bf16": torch.bfloat16, "bf16-mixed": torch.bfloat16, "16": torch.float16, "16-mixed": torch.float16}

T = TypeVar("T")


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
