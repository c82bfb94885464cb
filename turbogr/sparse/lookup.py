"""RowRequest and Lookup: what a batch looks up, and what it gets."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import NamedTuple

import torch
from torch import Tensor

from turbogr.ops.backend import Backend
from turbogr.ops.copies import note_host_copy, to_device
from turbogr.ops.embedding_lookup import jagged_embedding_lookup
from turbogr.sparse.apart import Apart, ApartRows, Places, kept, whole_gradient


class SparseFeature(NamedTuple):
    """Ids of a table other than the items'.

    Attributes:
        table: its name.
        ids: int64 of any shape, rows of that table.
    """

    table: str
    ids: Tensor


class ItemFeature(NamedTuple):
    """One row of another table for every distinct item that is looked up along with it: a property of the item.

    Attributes:
        table: its name.
        rows: int64 [V], by item row: the row of that table.
    """

    table: str
    rows: Tensor


Features = Mapping[str, Tensor | SparseFeature | ItemFeature]
"""Feature name -> ids; a plain tensor holds item rows."""


class RowRequest:
    """The distinct rows that a batch looks up.

    Not a dataclass on purpose: Lightning moves and clones what is one.

    Attributes:
        ids: int64 [U], rows of EmbeddingTable's row space, ascending.
        index: feature -> int64 in the shape of its ids: where in `ids` each of them stands. An ItemFeature has one for each
            distinct item, of which there are U_i: int64 [U_i], in the order of the items, which are the first of `ids`.
        sizes: table -> how many of `ids` are its rows; all tables, in the order of the row space.
        places: which of `ids` are kept apart, and which not; None where no feature is. An index then refers to the rows of its
            own part.
    """

    def __init__(self, ids: Tensor, index: dict[str, Tensor], sizes: dict[str, int], places: Places | None = None) -> None:
        self.ids, self.index, self.sizes, self.places = ids, index, sizes, places

    def to(self, device: torch.device) -> RowRequest:
        """The same request of a device's rows, copied in the current stream; its `ids` stay where they are."""
        if self.ids.device.type == device.type:
            return self
        index = {name: to_device(where, device) for name, where in self.index.items()}
        if self.places is None:
            return RowRequest(self.ids, index, self.sizes)
        for name in self.places.apart:
            note_host_copy(index[name], self.index[name])
        return RowRequest(self.ids, index, self.sizes, self.places.to(device))


class Lookup:
    """The rows of one batch: each distinct row once, and where every id of every feature finds its own.

    Not a dataclass on purpose: Lightning moves and clones what is one.

    Where a feature is kept apart (`turbogr.sparse.apart`), `rows` are those that the other features look up.

    Attributes:
        ids: int64 [U], distinct rows of EmbeddingTable's row space, ascending, on the device where they were found.
        rows: float [U, D], their embeddings; in training the leaf on which the batch's one gradient arrives.
        index: feature -> int64 in the shape of its ids: where in `rows` each of them stands; as in RowRequest.
        sizes: table -> how many of `rows` are its own.
        apart: by feature, what is kept apart.
        backend: of the look-ups below.
    """

    def __init__(
        self,
        request: RowRequest,
        rows: Tensor,
        index: dict[str, Tensor],
        apart: dict[str, ApartRows] | None = None,
        backend: Backend = "auto",
    ) -> None:
        self.ids, self.rows, self.index, self.apart = request.ids, rows, index, apart or {}
        self.places = request.places
        self.sizes = request.sizes if request.places is None else request.places.main_sizes
        self.backend: Backend = backend
        self._taken = False

    @classmethod
    def of(
        cls,
        request: RowRequest,
        read: Callable[[Tensor | None], Tensor],
        apart: Mapping[str, Apart],
        trains: bool,
        backend: Backend = "auto",
    ) -> Lookup:
        """The look-up of a request whose index lies where its rows do.

        Args:
            request: what is looked up.
            read: gives the rows at some of `request.ids`, int64 [n] places, or at all (None): float [n, D] in a new tensor.
            apart: how features are kept apart; `EmbeddingTable.apart`.
            trains: whether gradients are wanted.
            backend: of the look-ups.
        """
        places = request.places
        if places is None:
            return cls(request, read(None).requires_grad_(trains), request.index, None, backend)
        parts = {
            name: ApartRows(
                places.ids[name], kept(read, where, apart[name]), request.index[name], where, len(request.ids), trains
            )
            for name, where in places.apart.items()
        }
        return cls(request, read(places.main).requires_grad_(trains), request.index, parts, backend)

    def take_gradient(self) -> Tensor | None:
        """float [U, D], of `ids`; None if none has arrived. On the host, if a feature's rows are kept there.

        Once: where a feature is kept apart, the parts are added up in place, to need no further [U, D].

        Raises:
            RuntimeError: if it has been taken before.
        """
        if self._taken:
            raise RuntimeError("Lookup: its gradient has been taken already, and its parts added up in place")
        self._taken = True
        if self.places is None:
            return self.rows.grad
        if self.rows.grad is None and all(part.gradient is None for part in self.apart.values()):
            return None
        return whole_gradient(self.rows, self.places.main, self.apart)

    def values(self) -> Tensor:
        """float [U, D], the rows of `ids` as they were looked up: those that were kept apart alone as they were kept."""
        rows = self.rows.detach()
        if self.places is None:
            return rows
        whole = rows.new_empty(len(self.ids), rows.shape[1])
        for part in self.apart.values():
            whole[part.places.to(rows.device)] = part.values.to(rows.device, rows.dtype)
        whole[self.places.main] = rows
        return whole

    def __getitem__(self, feature: str) -> Tensor:
        """Embeddings of a feature, float [*shape of its ids, D]."""
        index = self.index[feature]
        return jagged_embedding_lookup([self.rows], index.flatten(), backend=self.backend).view(
            *index.shape, self.rows.shape[1]
        )
