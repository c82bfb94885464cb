"""EmbeddingTable: unique rows in, one leaf out, one row update back."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from turbogr.errors import ConfigurationError, DataError
from turbogr.ops.backend import Backend, check_backend
from turbogr.ops.embedding_lookup import jagged_embedding_lookup, sum_by_row
from turbogr.ops.unique import unique_ids
from turbogr.sparse.optimizers import LazyAdam, RowOptimizer


class Lookup:
    """The rows of one batch: each distinct row once, and where every id of every feature finds its own.

    Not a dataclass on purpose: Lightning moves and clones what is one.

    Attributes:
        ids: int64 [U], distinct table rows, ascending.
        rows: float [U, D], their embeddings; in training the leaf on which the batch's one gradient arrives.
        index: feature -> int64 in the shape of its ids, with `ids[index[feature]]` equal to them.
        backend: of the look-ups below.
    """

    def __init__(self, ids: Tensor, rows: Tensor, index: dict[str, Tensor], backend: Backend = "auto") -> None:
        self.ids, self.rows, self.index = ids, rows, index
        self.backend: Backend = backend

    def __getitem__(self, feature: str) -> Tensor:
        """Embeddings of a feature, float [*shape of its ids, D]."""
        index = self.index[feature]
        return jagged_embedding_lookup([self.rows], index.flatten(), backend=self.backend).view(
            *index.shape, self.rows.shape[1]
        )


class EmbeddingTable(nn.Module):
    """One table of item embeddings with its row optimizer.

    The size is not known when a recipe is read, so the table is empty until `allocate`. Training calls
    `lookup = table(features)`, lets gradients arrive on `lookup.rows`, and `apply_gradients()` once an optimizer step; look-ups
    between two updates (gradient accumulation) are summed.

    Args:
        optimizer: how touched rows are updated; LazyAdam if None, as the public code trains tables with AdamW.
        init_std: standard deviation of the truncated normal (at two deviations) that rows start from.
        backend: of distinct ids, look-ups and row updates; see `turbogr.ops.backend.Backend`.

    Raises:
        ConfigurationError: if `init_std` is negative or `backend` is unknown.
    """

    weight: nn.Parameter

    def __init__(self, optimizer: RowOptimizer | None = None, init_std: float = 0.02, backend: Backend = "auto") -> None:
        super().__init__()
        check_backend("EmbeddingTable", backend)
        if init_std < 0:
            raise ConfigurationError(f"EmbeddingTable: init_std must not be negative, got {init_std}")
        self.optimizer = LazyAdam() if optimizer is None else optimizer
        self.init_std = init_std
        self.backend: Backend = backend
        self._pending: list[Lookup] = []

    def allocate(self, num_rows: int, dim: int) -> None:
        """Creates the rows and the optimizer's state.

        Raises:
            ConfigurationError: if a size is not positive.
        """
        if num_rows < 1 or dim < 1:
            raise ConfigurationError(f"EmbeddingTable: num_rows and dim must be positive, got {num_rows} x {dim}")
        weight = nn.init.trunc_normal_(torch.empty(num_rows, dim), std=self.init_std, a=-2 * self.init_std, b=2 * self.init_std)
        # No requires_grad: gradients arrive on a batch's leaf, and no dense optimizer may ever see the table.
        self.weight = nn.Parameter(weight, requires_grad=False)
        self.optimizer.allocate(num_rows, dim)

    @property
    def num_rows(self) -> int:
        """V."""
        return self.weight.shape[0]

    def forward(self, features: Mapping[str, Tensor]) -> Lookup:
        """Looks up all features at once.

        Args:
            features: name -> int64 ids of any shape, in [0, num_rows).

        Returns:
            The batch's Lookup; in training mode with gradients enabled, its rows are a leaf that requires grad.

        Raises:
            DataError: if an id lies outside the table; names the feature, the id and the table's size.
        """
        flat = torch.cat([ids.reshape(-1) for ids in features.values()])
        try:
            unique, inverse = unique_ids(flat, self.num_rows, backend=self.backend)
        except IndexError as error:
            raise DataError(self._out_of_range(features)) from error
        sizes = [ids.numel() for ids in features.values()]
        index = {name: part.view(features[name].shape) for name, part in zip(features, inverse.split(sizes), strict=True)}
        rows = jagged_embedding_lookup([self.weight.detach()], unique, backend=self.backend)
        lookup = Lookup(unique, rows, index, self.backend)
        if self.training and torch.is_grad_enabled():
            lookup.rows.requires_grad_()
            self._pending.append(lookup)
        return lookup

    def apply_gradients(self) -> None:
        """Updates the rows that received gradients since the last call, once each; rows looked up in vain stay as they are."""
        pending = [(look.ids, look.rows.grad) for look in self._pending if look.rows.grad is not None]
        self._pending.clear()
        if not pending:
            return
        ids, gradient = pending[0]
        if len(pending) > 1:
            ids, inverse = unique_ids(torch.cat([rows for rows, _ in pending]), self.num_rows, backend=self.backend)
            parts = torch.cat([grad for _, grad in pending])
            gradient = sum_by_row(parts, inverse, len(ids), backend=self.backend)
        self.optimizer.step(self.weight, ids, gradient, self.backend)

    def refuse_copies(self, copies: int) -> None:
        """Raises ConfigurationError if this is one of several copies of the table: nothing brings their updates together."""
        if copies > 1:
            raise ConfigurationError(
                f"{copies} processes would each update a table of their own, and the tables would drift apart: train with "
                "trainer.devices 1 and trainer.strategy auto"
            )

    def discard_gradients(self) -> None:
        """Forgets look-ups whose gradients must not be used (an interrupted or failed step)."""
        self._pending.clear()

    def _out_of_range(self, features: Mapping[str, Tensor]) -> str:
        for name, ids in features.items():
            wrong = (ids < 0) | (ids >= self.num_rows)
            if wrong.any():
                first = int(ids[wrong][0])
                return (
                    f"feature {name!r} holds id {first}, outside the table's rows 0..{self.num_rows - 1}; "
                    "was the model built for another prepared folder?"
                )
        raise AssertionError("every id is inside the table")
