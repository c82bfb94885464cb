"""What training costs, as numbers: of an epoch, of the model, of a step. `turbogr.planning` counts them."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np

import turbogr
from turbogr.data.negatives import Int64Array
from turbogr.negative_bytes import NegativeBytes

PREFETCHED = 2
"""Batches that a loader's worker holds ready: the default of `torch.utils.data.DataLoader`."""


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
