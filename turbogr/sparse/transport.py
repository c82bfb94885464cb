"""What SparseEngine sends for a batch, and what owners make of it: the work that runs in its lanes."""

from __future__ import annotations

import torch
from torch import Tensor
from torch import distributed as dist

from turbogr.ops.backend import Backend
from turbogr.ops.copies import to_device
from turbogr.ops.embedding_lookup import sum_by_row
from turbogr.ops.unique import unique_ids
from turbogr.sparse.accumulation import Touched
from turbogr.sparse.exchange import union_of_rows
from turbogr.sparse.lane import Done, Ticket
from turbogr.sparse.lookup import Features, Lookup, RowRequest
from turbogr.sparse.narrow_rows import Packing
from turbogr.sparse.sharding import Route
from turbogr.sparse.topology import HSPTopology
from turbogr.tracing import Trace


class SparseBatch:
    """A batch in flight.

    Not a dataclass on purpose: Lightning moves and clones what is one.

    Attributes:
        number: of the batch, for the trace.
        features: what it looks up.
        request: the distinct rows behind them; found on the host, whatever device trains.
        on_device: the request, on its way to the device.
        send_counts: [I], rows that this rank asks of each member.
        receive_counts: [I], rows that each member asks of this rank; from `start_ids` on.
        asked: int64 [R], rows of this rank's weight that the members ask for, member by member; from `finish_ids` on.
        sent: how their rows travel to the members, where some travel in half precision; from `finish_ids` on.
        received: how this rank's travel, likewise; from `start_ids` on.
        lookup: what `take` hands out; from `finish_rows` to `backward`.
    """

    def __init__(self, features: Features, request: RowRequest, route: Route, number: int = -1) -> None:
        self.features, self.request, self.route, self.number = features, request, route, number
        self.send_counts = route.counts
        self.receive_counts: list[int] = []
        self.asked: Tensor = route.local
        self.lookup: Lookup | None = None
        self.arrival: Ticket[Tensor] | None = None
        self.touched: Ticket[tuple[Touched, Tensor | None]] | None = None
        self.rows: Ticket[Tensor] | None = None
        self.on_device: Ticket[RowRequest] = Done(request)
        self.sent: Packing | None = None
        self.received: Packing | None = None


class Transport:
    """Sends and receives; every method blocks until what it sends has arrived.

    Args:
        topology: who is who.
        backend: see `turbogr.ops.backend.Backend`.
        trace: takes down what is sent when.
    """

    def __init__(self, topology: HSPTopology, backend: Backend, trace: Trace) -> None:
        self.topology, self.backend, self.trace = topology, backend, trace

    # In the lane of the host.

    def send_counts(self, counts: list[int]) -> list[int]:
        """[I], rows that each member asks of this rank, given how many this one asks of each."""
        received = torch.empty(len(counts), dtype=torch.int64)
        dist.all_to_all_single(received, torch.tensor(counts), group=self.topology.ids_pg)
        return received.tolist()

    def send_ids(self, batch: SparseBatch) -> Tensor:
        """int64 [R], rows of this rank's weight that the members ask for, member by member."""
        with self.trace.span("ids", batch.number, "communication"):
            sent = batch.route.local
            if batch.received is not None:
                sent = torch.where(batch.received.narrow, ~sent, sent)
            asked = sent.new_empty(sum(batch.receive_counts))
            dist.all_to_all_single(asked, sent, batch.receive_counts, batch.send_counts, group=self.topology.ids_pg)
            return asked

    def find_touched(self, batch: SparseBatch, rows: int) -> tuple[Touched, Tensor | None]:
        """The rows that the group touches, of the `rows` that lie here, with the union; where each asked one stands."""
        distinct, inverse, union = batch.asked, None, None
        if self.topology.group_size > 1:
            with self.trace.span("owner's rows", batch.number, "unique"):
                distinct, inverse = unique_ids(batch.asked, rows, backend=self.backend)
        if self.topology.groups > 1:
            with self.trace.span("row numbers", batch.number, "communication"):
                union = union_of_rows(distinct, self.topology.meta_pg)
        return Touched(distinct, union), inverse

    # In the lane of values.

    def send_rows(self, batch: SparseBatch, rows: Tensor, received: Tensor) -> Tensor:
        """float [U, D] in the order of travel: the rows that the owners read for this rank.

        Args:
            batch: whose.
            rows: float [R, D], read for the members, or [pieces, D], packed.
            received: room for them, [U, D] or [pieces, D]; `rows` itself where there is one member.
        """
        if self.topology.group_size == 1:
            return received
        counts = batch.send_counts, batch.receive_counts
        if batch.received is not None and batch.sent is not None:
            counts = batch.received.splits, batch.sent.splits
        with self.trace.span("rows", batch.number, "communication"):
            dist.all_to_all_single(received, rows, *counts, group=self.topology.shard_pg)
        return received if batch.received is None else batch.received.unpack(received)

    def send_gradient(
        self, batch: SparseBatch, gradient: Tensor, received: Tensor, inverse: Tensor | None, rows: int
    ) -> Tensor:
        """float [rows, D], the members' sum for each distinct row that they asked for.

        Args:
            batch: whose.
            gradient: float [U, D] in the order of travel.
            received: float [R, D], room for what the members send.
            inverse: int64 [R], where each asked row stands among the distinct ones; None where there is one member.
            rows: how many are distinct.
        """
        if inverse is None:
            return gradient
        with self.trace.span("gradients", batch.number, "communication"):
            counts = (batch.receive_counts, batch.send_counts)
            dist.all_to_all_single(received, gradient, *counts, group=self.topology.shard_pg)
        with self.trace.span("sum", batch.number, "compute"):
            return sum_by_row(received, to_device(inverse, received.device), rows, backend=self.backend)

    def sum_over_members(self, value: Tensor) -> Tensor:
        """Sum of a number over the group, in the order of the members."""
        values = value.new_empty(self.topology.group_size)
        dist.all_gather_single(values, value.view(1), group=self.topology.shard_pg)
        return values.sum()
