"""From gradients at the owners of rows to updated rows: merged over batches, summed over groups, one step of the optimizer."""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from turbogr.ops.copies import to_device
from turbogr.ops.embedding_lookup import sum_by_row
from turbogr.sparse.accumulation import Touched, merge
from turbogr.sparse.exchange import ValueExchange
from turbogr.sparse.lane import Lane, Ticket
from turbogr.sparse.table import EmbeddingTable, clipped
from turbogr.tracing import Trace


class RowValues(NamedTuple):
    """Some rows of this rank's weight as they were at some time.

    Attributes:
        rows: int64 [n], of the weight, ascending; on the host.
        values: float [n, D].
    """

    rows: Tensor
    values: Tensor


class SentGradient(NamedTuple):
    """A batch's gradient on its way to the owners of its rows.

    Attributes:
        number: of the batch, for the trace.
        touched: rows of this rank's weight that it is of.
        values: float [touched rows, D], once it is there.
    """

    number: int
    touched: Touched
    values: Ticket[Tensor]


class _Update(NamedTuple):
    """Under way: the rows that any rank touched, and the sums that their optimizer will get."""

    number: int
    rows: Tensor
    sums: Ticket[Tensor]


class RowUpdates:
    """The gradients of a table's rows since the last update, and the update that is under way.

    Args:
        table: whose rows; those of this rank are updated.
        exchange: sums over the groups.
        over_members: sums a number, float scalar, over the members of the group.
        trace: takes down what is done when.
    """

    def __init__(
        self, table: EmbeddingTable, exchange: ValueExchange, over_members: Callable[[Tensor], Tensor], trace: Trace
    ) -> None:
        self._table, self._exchange, self._over_members, self._trace = table, exchange, over_members, trace
        self._sent: list[SentGradient] = []
        self._under_way: _Update | None = None

    def add(self, gradient: SentGradient) -> None:
        """Takes in a batch's gradient."""
        self._sent.append(gradient)

    def start(self, scale: float, lane: Lane) -> None:
        """Merges what was taken in since the last update, and begins to sum it over the groups; returns at once.

        Args:
            scale: of the gradients.
            lane: where the exchange runs, behind the gradients on their way.

        Raises:
            RuntimeError: if the exchange before has not been followed by an update.
        """
        if self._under_way is not None:
            raise RuntimeError("SparseEngine: start_exchange twice without an update")
        if not self._sent:
            return
        sent, self._sent = self._sent, []
        number, backend = sent[-1].number, self._table.backend
        touched, inverse = merge([one.touched for one in sent], backend)
        exchanged = None if touched.union is None else self._exchange.prepare(touched.union, self._table.weight)

        def sums() -> Tensor:
            parts = [one.values.wait() for one in sent]
            gradient = parts[0]
            if inverse is not None:
                place = to_device(inverse, gradient.device)
                gradient = sum_by_row(torch.cat(parts), place, len(touched.rows), backend=backend)
            if scale != 1.0:
                gradient.mul_(scale)
            if exchanged is not None:
                with self._trace.span("values", number, "communication"):
                    gradient = exchanged(gradient)
            return gradient

        self._under_way = _Update(number, touched.by_any_group, lane.submit(sums))

    def finish(self, lr_scale: float, clip_norm: float | None, read: Tensor | Literal["any"] | None) -> RowValues:
        """Waits for the sums and updates the rows; nothing if no exchange was begun.

        Args:
            lr_scale: factor of the learning rate.
            clip_norm: largest norm of the gradient of all rows, summed over the members; None does not clip.
            read: int64 [n], rows of this rank's weight whose values before the update are wanted; "any", of all that change.

        Returns:
            Rows that change and are among `read`, as they were before.
        """
        weight, update = self._table.weight, self._under_way
        earlier = RowValues(torch.empty(0, dtype=torch.int64), weight.new_empty(0, weight.shape[1]))
        if update is None:
            return earlier
        self._under_way = None
        with self._trace.span("wait for values", update.number, "wait"):
            gradient = update.sums.wait()
        if clip_norm is not None:
            gradient = clipped(gradient, self._over_members(gradient.double().square().sum()), clip_norm)
        if read is not None:
            rows = update.rows if isinstance(read, str) else update.rows[torch.isin(update.rows, read)]
            earlier = RowValues(rows, weight.detach()[rows])
        with torch.no_grad(), self._trace.span("update", update.number, "compute"):
            rows = to_device(update.rows, weight.device)
            self._table.optimizer.step(weight, rows, gradient, self._table.backend, lr_scale)
        return earlier

    def forget(self) -> None:
        """Drops gradients and the update under way; what is being sent goes on."""
        self._sent, self._under_way = [], None
