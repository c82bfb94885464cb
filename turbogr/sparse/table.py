"""EmbeddingTable: unique rows in, one leaf out, one row update back."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Protocol

import torch
from torch import Tensor, nn

from turbogr.errors import ConfigurationError, DataError
from turbogr.ops.backend import Backend, check_backend
from turbogr.ops.embedding_lookup import jagged_embedding_lookup, sum_by_row
from turbogr.ops.unique import unique_ids
from turbogr.sparse.apart import Apart, find_places, refuse_item_features, renumbered
from turbogr.sparse.catalogue import Catalogue, LocalCatalogue
from turbogr.sparse.initial_rows import InitialRows, are_deferred
from turbogr.sparse.lookup import Features, ItemFeature, Lookup, RowRequest, SparseFeature
from turbogr.sparse.optimizers import LazyAdam, RowOptimizer

ITEMS = "items"
"""Name of the table of the catalogue's items; the first of every EmbeddingTable."""


def clipped(gradient: Tensor, squared_norm: Tensor, largest: float) -> Tensor:
    """The gradient, shrunk if its norm exceeds the largest; by the factor of `torch.nn.utils.clip_grad_norm_`.

    Args:
        gradient: float [U, D].
        squared_norm: float64 [], of all of which the gradient may be a part.
        largest: the norm that is let through.
    """
    factor = (largest / (squared_norm.sqrt() + 1e-6)).clamp(max=1.0)
    return gradient * factor.to(gradient.dtype)


class RowEngine(Protocol):
    """What keeps an EmbeddingTable's rows instead of the table itself: a strategy's sharded store."""

    def take(self, features: Features) -> Lookup:
        """The rows of the training batch whose features these are, fetched ahead; the leaf takes its gradient."""

    def fetch(self, request: RowRequest) -> Tensor:
        """float [U, D], the present rows, without gradients; called by all ranks of a group together."""

    def catalogue(self, vectors: Tensor) -> Catalogue:
        """The catalogue of which `vectors`, float [owned items, D], are this rank's part."""


class EmbeddingTable(nn.Module):
    """Tables of embeddings of one width in one row space, with their row optimizer.

    The sizes are not known when a recipe is read, so there is nothing until `allocate`. Training calls
    `lookup = table(features)`, lets gradients arrive on `lookup.rows`, and `apply_gradients()` once an optimizer step; look-ups
    between two updates (gradient accumulation) are summed.

    Several tables lie one after the other in `weight`, the items' first: distinct ids, look-up, update, and under a strategy
    every exchange, are one operation for all of them.

    Args:
        optimizer: how touched rows are updated; LazyAdam if None, as the public code trains tables with AdamW.
        init_std: standard deviation of the truncated normal (at two deviations) that rows start from.
        backend: of distinct ids, look-ups and row updates; see `turbogr.ops.backend.Backend`.

    Attributes:
        spans: table -> its rows in the row space.
        owned: table -> those of its own rows, numbered from 0, that lie in this process, one table after the other in `weight`:
            all of them, unless an engine keeps the rows.
        apart: feature -> how its rows are kept apart from the leaf in training (`turbogr.sparse.apart`); none is at first.
        initial: of rows that are still to be made (`turbogr.sparse.initial_rows.deferred_rows`), else None.

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
        self.spans: dict[str, range] = {}
        self.owned: dict[str, range] = {}
        self.engine: RowEngine | None = None
        self.initial: InitialRows | None = None
        self.apart: dict[str, Apart] = {}
        self._pending: list[Lookup] = []

    def allocate(self, tables: int | Mapping[str, int], dim: int) -> None:
        """Creates the rows and the optimizer's state.

        Args:
            tables: rows of the item table, or table -> rows with the items' (`ITEMS`) first.
            dim: D, width of every table.

        Raises:
            ConfigurationError: if a size is not positive, or the items' table is not the first.
        """
        tables = {ITEMS: tables} if isinstance(tables, int) else dict(tables)
        if next(iter(tables), None) != ITEMS:
            raise ConfigurationError(f"EmbeddingTable: the first table is {ITEMS!r}, got {list(tables)}")
        start = 0
        for name, rows in tables.items():
            if rows < 1 or dim < 1:
                raise ConfigurationError(
                    f"EmbeddingTable: {name} must have a positive number of rows and width, got {rows} x {dim}"
                )
            self.spans[name] = range(start, start + rows)
            self.owned[name] = range(rows)
            start += rows
        initial = InitialRows(start, dim, self.init_std)
        if are_deferred():
            self.initial = initial
            with torch.device("meta"):
                self._set_rows(torch.empty(start, dim))
        else:
            self._set_rows(initial.rows([range(start)]))

    def make_rows(self, pieces: Iterable[range]) -> None:
        """Makes some of the rows that `deferred_rows` put off, with the optimizer's state, and never any others.

        Args:
            pieces: of the row space, in the order of `weight`; an engine's part.
        """
        assert self.initial is not None, "nothing was put off"
        initial, self.initial = self.initial, None
        self._set_rows(initial.rows(pieces))

    def _set_rows(self, weight: Tensor) -> None:
        # No requires_grad: gradients arrive on a batch's leaf, and no dense optimizer may ever see the table.
        self.weight = nn.Parameter(weight, requires_grad=False)
        self.optimizer.allocate(*weight.shape)

    @property
    def num_rows(self) -> int:
        """Rows of all tables together, wherever they lie."""
        return max(span.stop for span in self.spans.values())

    @property
    def dim(self) -> int:
        """D."""
        return self.weight.shape[1]

    def request(self, features: Features, trains: bool = False) -> RowRequest:
        """The distinct rows behind all features: what a look-up fetches.

        Args:
            features: name -> ids of any shape.
            trains: whether features are kept apart, as in training.

        Raises:
            DataError: if an id lies outside its table; names the feature, the id and the table's size.
            ConfigurationError: if a feature is to be kept apart while another is a property of items.
        """
        requested: dict[str, list[str]] = {table: [] for table in self.spans}
        for name, feature in features.items():
            table, _ = _table_and_ids(feature)
            if table not in requested:
                raise DataError(f"feature {name!r} asks for a table {table!r}; there are {', '.join(self.spans)}")
            requested[table].append(name)
        found: list[Tensor] = []
        index: dict[str, Tensor] = {}
        sizes = dict.fromkeys(self.spans, 0)
        count = 0
        # Table by table, the items first: what a property of the items looks up is known once they are distinct. Rows of one
        # table come before those of the next, so that the parts are ascending as a whole.
        for table, names in requested.items():
            if not names:
                continue
            items = found[0] if found and requested[ITEMS] else None
            asked = [_wanted(features[name], items) for name in names]
            try:
                unique, inverse = unique_ids(
                    torch.cat([ids.reshape(-1) for ids in asked]), len(self.spans[table]), backend=self.backend
                )
            except IndexError:
                self._refuse_out_of_range(features)
                raise
            parts = (inverse + count if count else inverse).split([ids.numel() for ids in asked])
            index |= {name: part.view(ids.shape) for name, ids, part in zip(names, asked, parts, strict=True)}
            start = self.spans[table].start
            found.append(unique + start if start else unique)
            sizes[table] = len(unique)
            count += len(unique)
        ids = found[0] if len(found) == 1 else torch.cat(found)
        index = {name: index[name] for name in features}
        return self._kept_apart(ids, index, sizes, features) if trains else RowRequest(ids, index, sizes)

    def _kept_apart(self, ids: Tensor, index: dict[str, Tensor], sizes: dict[str, int], features: Features) -> RowRequest:
        apart = {name: how for name, how in self.apart.items() if name in index}
        if not apart:
            return RowRequest(ids, index, sizes)
        for name, feature in features.items():
            if isinstance(feature, ItemFeature):
                refuse_item_features(name, apart)
        places = find_places(ids, index, sizes, apart)
        for name, where in index.items():
            index[name] = renumbered(where, places.apart.get(name, places.main), len(ids))
        return RowRequest(ids, index, sizes, places)

    def forward(self, features: Features) -> Lookup:
        """Looks up all features at once.

        Args:
            features: name -> int64 ids of any shape, rows of their table.

        Returns:
            The batch's Lookup; in training mode with gradients enabled, its rows are a leaf that requires grad.

        Raises:
            DataError: if an id lies outside its table; names the feature, the id and the table's size.
        """
        trains = self.training and torch.is_grad_enabled()
        if self.engine is not None and trains:
            return self.engine.take(features)
        if self.initial is not None:
            raise ConfigurationError(
                "the table's rows were put off (deferred_rows, Trainer.init_module), and only TurboGRStrategy makes them: "
                "train with strategy turbogr, or build the model outside that context"
            )
        request = self.request(features, trains)
        if self.engine is not None:
            return Lookup(request, self.engine.fetch(request), request.index, None, self.backend)

        def read(places: Tensor | None) -> Tensor:
            ids = request.ids if places is None else request.ids[places]
            return jagged_embedding_lookup([self.weight.detach()], ids, backend=self.backend)

        lookup = Lookup.of(request, read, self.apart, trains, self.backend)
        if trains:
            self._pending.append(lookup)
        return lookup

    def catalogue(self, vectors: Tensor | None = None) -> Catalogue:
        """The items, to be ranked.

        Args:
            vectors: float [owned items, D], of the items whose rows lie in this process; None takes the rows themselves.
        """
        if vectors is None:
            vectors = self.weight[: len(self.owned[ITEMS])]
        return LocalCatalogue(vectors) if self.engine is None else self.engine.catalogue(vectors)

    def apply_gradients(self, lr_scale: float = 1.0, clip_norm: float | None = None) -> None:
        """Updates the rows that received gradients since the last call, once each; rows looked up in vain stay as they are.

        Where an engine keeps the rows, it updates them, and this does nothing.

        Args:
            lr_scale: factor of the learning rate.
            clip_norm: largest norm of the gradient of all rows of all tables together; None lets it be.
        """
        gradients = [(look.ids, look.take_gradient()) for look in self._pending]
        pending = [(ids.to(gradient.device), gradient) for ids, gradient in gradients if gradient is not None]
        self._pending.clear()
        if not pending:
            return
        ids, gradient = pending[0]
        if len(pending) > 1:
            ids, inverse = unique_ids(torch.cat([rows for rows, _ in pending]), self.num_rows, backend=self.backend)
            parts = torch.cat([grad for _, grad in pending])
            gradient = sum_by_row(parts, inverse, len(ids), backend=self.backend)
        if clip_norm is not None:
            gradient = clipped(gradient, gradient.double().square().sum(), clip_norm)
        self.optimizer.step(self.weight, ids, gradient, self.backend, lr_scale)

    def refuse_copies(self, copies: int) -> None:
        """Raises ConfigurationError if this is one of several copies of the table: nothing brings their updates together."""
        if copies > 1 and self.engine is None:
            raise ConfigurationError(
                f"{copies} processes would each update a table of their own, and the tables would drift apart: train with "
                "trainer.strategy turbogr (TurboGRStrategy), or on one device"
            )

    def discard_gradients(self) -> None:
        """Forgets look-ups whose gradients must not be used (an interrupted or failed step)."""
        self._pending.clear()

    def _refuse_out_of_range(self, features: Features) -> None:
        for name, feature in features.items():
            table, ids = _table_and_ids(feature)
            rows = len(self.spans[table])
            wrong = (ids < 0) | (ids >= rows)
            if wrong.any():
                raise DataError(
                    f"feature {name!r} holds id {int(ids[wrong][0])}, outside the table's rows 0..{rows - 1}; "
                    "was the model built for another prepared folder?"
                )


def _table_and_ids(feature: Tensor | SparseFeature | ItemFeature) -> tuple[str, Tensor]:
    """Its table; the ids of it that may be looked up."""
    return (ITEMS, feature) if isinstance(feature, Tensor) else (feature[0], feature[1])


def _wanted(feature: Tensor | SparseFeature | ItemFeature, items: Tensor | None) -> Tensor:
    """The ids that are looked up, given the distinct items (None: there are none)."""
    _, ids = _table_and_ids(feature)
    if not isinstance(feature, ItemFeature):
        return ids
    return ids[:0] if items is None else ids[items]
