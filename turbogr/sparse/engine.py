"""SparseEngine: a table's rows, sharded inside a group and copied between groups, looked up and updated once a step.

One training batch on its way (TurboGR, §4.2.1), and what it sends:

    prepare          distinct rows of all features, their owners                              nothing
    start_ids        each owner is told the rows that are asked of it                         ids, inside the group
    finish_ids       the owner's distinct rows, and those of the other groups, are sought     sizes and row ids, between groups
    join_unique      they are found
    start_rows       rows to those who asked                                                  rows, inside the group
    finish_rows      they are here: the batch's leaf [U, D]                                   nothing
    backward         the leaf's gradient to the owners, who sum it                            gradients, inside the group
    start_exchange   all batches since the last update merged; sums over the groups           values, between groups
    update           one step of the row optimizer on the rows that any rank touched          nothing

All that is sent runs in two lanes, beside the caller: ids and what is found out about them in a thread of the host, rows,
gradients and values in another lane (on a CPU a thread, else a stream). Each lane works in the order of these calls, so ranks
that make the same calls send the same things in the same order; nothing but `join_unique`, `finish_ids`, `finish_rows` and
`update` waits. Rows that `start_rows` reads hold every update that returned before it was called, and no other.

Rows are made distinct before anything is sent, so a row travels once for a rank, however often the rank's batch names it. A
group of one rank sends nothing inside, one group nothing between. Every sum is made in the order of ranks, then of groups,
whatever arrives first: the same inputs give the same bits, and all groups hold the same.

**If one rank raises** (an id outside its table is found by `prepare`, before anything is sent), the others are not told: they
wait in their next collective, which fails as soon as the rank's process ends (its connections close), or after the topology's
timeout. So let the error end the process. The engine makes no collective while it is closed or discarded.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cached_property, partial
from typing import Literal

import torch
from torch import Tensor
from torch import distributed as dist

from turbogr.errors import ConfigurationError
from turbogr.ops.copies import to_device
from turbogr.ops.embedding_lookup import jagged_embedding_lookup
from turbogr.sparse.accumulation import Touched
from turbogr.sparse.catalogue import Catalogue, LocalCatalogue
from turbogr.sparse.exchange import ExchangeForm, ValueExchange
from turbogr.sparse.host_features import HostFeatures
from turbogr.sparse.lane import Lane, NoLane, ThreadLane, copy_lane, lane_for
from turbogr.sparse.lookup import Features, ItemFeature, Lookup, RowRequest, SparseFeature
from turbogr.sparse.narrow_rows import Packing, narrow_dtype, narrow_ones
from turbogr.sparse.sharded_catalogue import ShardedCatalogue
from turbogr.sparse.sharding import Sharding
from turbogr.sparse.shards import ShardedState, is_sharded, keep_part, local_tensors
from turbogr.sparse.table import ITEMS, EmbeddingTable
from turbogr.sparse.topology import HSPTopology
from turbogr.sparse.transport import SparseBatch, Transport
from turbogr.sparse.updates import RowUpdates, RowValues, SentGradient
from turbogr.tracing import Trace


class SparseEngine:
    """Keeps an EmbeddingTable's rows; implements `turbogr.sparse.table.RowEngine`.

    Made by all ranks together, at the same point: each takes its part of the table's weight and of the optimizer's state, and
    group 0's values become those of all groups. From then on the table's `weight` and row state are this member's part.

    All methods but `prepare`, `current`, `take`, `local_state`, `load_full_state`, `discard` and `close` communicate: ranks
    call them in the same order, each with its own part of the same batch; `fetch` and what reads whole tables only after
    `settle`.

    Args:
        table: with all rows; allocated alike on all ranks.
        topology: who is who.
        sharding: of the table's rows over the members of a group.
        exchange: form of the exchange between groups; see ValueExchange.
        trace: takes down what is done when.

    Raises:
        ConfigurationError: if the sharding is for another number of members, or the exchange is unknown.
        ValueError: if the sharding is for other tables.
    """

    def __init__(
        self,
        table: EmbeddingTable,
        topology: HSPTopology,
        sharding: Sharding,
        exchange: ExchangeForm = "auto",
        trace: Trace | None = None,
    ) -> None:
        if sharding.members != topology.group_size:
            raise ConfigurationError(f"tables sharded over {sharding.members} ranks, in groups of {topology.group_size}")
        if sharding.spans != table.spans:
            raise ValueError(f"SparseEngine: the sharding is of the tables {sharding.spans}, the table has {table.spans}")
        self.table, self.topology, self.sharding = table, topology, sharding
        values = ValueExchange(topology.replica_pg, exchange)
        rows = frozenset(name for name, x in table.state_dict().items() if is_sharded(x, table.num_rows))
        keep_part(table, sharding, topology.member)
        self._state = ShardedState(table, sharding, topology.member, topology.shard_pg, rows)
        if topology.groups > 1:
            for tensor in local_tensors(table).values():
                # A strategy shards tables before the module goes to its device, whose back end may not send from a CPU.
                on_host = tensor.device.type == "cpu"
                dist.broadcast(tensor, group=topology.meta_pg if on_host else topology.replica_pg, group_src=0)
        table.engine = self
        self._trace = Trace() if trace is None else trace
        self._transport = Transport(topology, table.backend, self._trace)
        self._host_lane: Lane = NoLane() if topology.world_size == 1 else ThreadLane("turbogr-ids")
        self._host_features = HostFeatures()
        self._current: SparseBatch | None = None
        self._updates = RowUpdates(table, values, self._over_members, self._trace)

    # Made when they are first used: a strategy shards tables before the module goes to its device.

    @cached_property
    def _lane(self) -> Lane:
        alone = self.topology.world_size == 1
        return NoLane() if alone else lane_for(self.table.weight.device, "turbogr-values")

    @property
    def _narrow(self) -> torch.dtype | None:
        return narrow_dtype(self.table.apart)

    @cached_property
    def _copies(self) -> Lane:
        return copy_lane(self.table.weight.device)

    # One batch, in the order of its steps.

    def prepare(self, features: Features, number: int = -1) -> SparseBatch:
        """Finds a batch's distinct rows and their owners.

        Args:
            features: name -> ids, as for the table, on the host; those of items may be on the device.
            number: of the batch, for the trace.

        Raises:
            DataError: if an id lies outside its table, with the feature, the id and the table's size.
        """
        with self._trace.span("distinct rows", number, "unique"):
            request = self.table.request(self._host_features.of(features), trains=True)
            batch = SparseBatch(features, request, self.sharding.route(request.ids), number)
            if self._narrow is not None and self.topology.group_size > 1:
                batch.received = Packing(batch.route.to_travel(narrow_ones(request)), batch.send_counts)
        batch.on_device = self._copies.submit(partial(request.to, self.table.weight.device))
        return batch

    def receive_counts(self, batch: SparseBatch) -> list[int]:
        """Asks the group what `start_ids` needs to know, and waits; for those who have no better occasion to send it along."""
        if self.topology.group_size == 1:
            return batch.send_counts
        return self._host_lane.submit(partial(self._transport.send_counts, batch.send_counts)).wait()

    def start_ids(self, batch: SparseBatch, receive_counts: list[int]) -> None:
        """Begins to tell every owner the rows that are asked of it; returns at once.

        Args:
            batch: from `prepare`.
            receive_counts: for every member m of the group, `send_counts[this member]` of m's batch.
        """
        batch.receive_counts = receive_counts
        if self.topology.group_size > 1:
            batch.arrival = self._host_lane.submit(partial(self._transport.send_ids, batch))

    def finish_ids(self, batch: SparseBatch) -> None:
        """Waits for the ids, and leaves to the thread what has to be found out about them before the update."""
        if batch.arrival is not None:
            with self._trace.span("wait for ids", batch.number, "wait"):
                batch.asked = batch.arrival.wait()
            batch.arrival = None
            if batch.received is not None:
                narrow = batch.asked < 0
                batch.asked = torch.where(narrow, ~batch.asked, batch.asked)
                batch.sent = Packing(narrow, batch.receive_counts)
        batch.touched = self._host_lane.submit(partial(self._transport.find_touched, batch, len(self.table.weight)))

    def join_unique(self, batch: SparseBatch) -> None:
        """Waits for the thread.

        Raises:
            RuntimeError: what it raised, as when another group's rank is gone.
        """
        with self._trace.span("wait for owner's rows", batch.number, "wait"):
            self._touched(batch)

    def start_rows(self, batch: SparseBatch, earlier: RowValues | None = None) -> None:
        """Reads the rows that are asked of this rank, as they are now, and begins to send them; returns at once.

        Args:
            batch: its ids have arrived.
            earlier: rows that are read as they were, instead.
        """
        with self._trace.span("look-up", batch.number, "compute"):
            weight = self.table.weight.detach()
            rows = jagged_embedding_lookup([weight], to_device(batch.asked, weight.device), backend=self.table.backend)
            if earlier is not None and len(earlier.rows):
                place = torch.searchsorted(earlier.rows, batch.asked).clamp_(max=len(earlier.rows) - 1)
                known = earlier.rows[place] == batch.asked
                rows[known] = earlier.values[place[known]].to(rows.device)
        received = rows
        if batch.received is not None and batch.sent is not None and self._narrow is not None:
            rows = batch.sent.pack(rows, self._narrow)
            received = rows.new_empty(batch.received.total, rows.shape[1])
        elif self.topology.group_size > 1:
            received = rows.new_empty(len(batch.request.ids), rows.shape[1])
        batch.rows = self._lane.submit(partial(self._transport.send_rows, batch, rows, received))

    def finish_rows(self, batch: SparseBatch) -> None:
        """Waits for the rows; `batch.lookup` is there afterwards."""
        rows, request = self._rows(batch), batch.on_device.wait()

        def read(places: Tensor | None) -> Tensor:
            return rows if places is None else rows[places]

        batch.lookup = Lookup.of(request, read, self.table.apart, True, self.table.backend)

    def backward(self, batch: SparseBatch) -> None:
        """Begins to send the gradient of the batch's leaf to the owners, zeros where none has arrived; returns at once.

        Raises:
            RuntimeError: if the batch was not looked up.
        """
        if batch.lookup is None:
            raise RuntimeError("SparseEngine: backward before finish_rows")
        lookup, batch.lookup = batch.lookup, None
        touched, inverse = self._touched(batch)
        gradient = lookup.take_gradient()
        if gradient is None:
            gradient = lookup.rows.new_zeros(len(lookup.ids), lookup.rows.shape[1])
        gradient = to_device(gradient, lookup.rows.device)
        received = gradient
        if inverse is not None:
            gradient = batch.route.to_travel(gradient)
            received = gradient.new_empty(len(inverse), gradient.shape[1])
        work = partial(self._transport.send_gradient, batch, gradient, received, inverse, len(touched.rows))
        self._updates.add(SentGradient(batch.number, touched, self._lane.submit(work)))
        if self._current is batch:
            self._current = None

    # One update.

    def start_exchange(self, scale: float) -> None:
        """Merges what has been sent back since the last update, and begins to sum it over the groups; returns at once.

        Args:
            scale: of the gradients; 1 / W where each rank's loss was scaled so that the mean over the ranks is meant.

        Raises:
            RuntimeError: if the exchange before has not been followed by an update.
        """
        self._updates.start(scale, self._lane)

    def update(
        self,
        lr_scale: float = 1.0,
        clip_norm: float | None = None,
        read_by: SparseBatch | Literal["any batch"] | None = None,
    ) -> RowValues:
        """Waits for the exchange and updates the rows that any rank touched; nothing if there was no batch.

        The optimizer takes a step on every rank, even where it owns none of the rows, so that its count of steps is the same
        everywhere.

        Args:
            lr_scale: factor of the learning rate.
            clip_norm: largest norm of the gradient of all rows of all tables together, summed over all ranks.
            read_by: a batch that reads rows; its ids have been joined. "any batch" where it is not known which.

        Returns:
            What is updated and any group's `read_by` reads, or may read, as it was before; nothing without `read_by`.
        """
        if read_by is None or read_by == "any batch":
            return self._updates.finish(lr_scale, clip_norm, None if read_by is None else "any")
        touched, _ = self._touched(read_by)
        return self._updates.finish(lr_scale, clip_norm, touched.by_any_group)

    def settle(self) -> None:
        """Waits until nothing that was begun is under way any more."""
        for lane in (self._host_lane, self._lane):
            lane.settle()

    def discard(self) -> None:
        """Forgets gradients and look-ups that must not be used (an interrupted or failed step); no communication.

        What is under way goes on, and whatever comes later is sent behind it.
        """
        self._updates.forget()
        self._current = None

    # What the table asks.

    def current(self, batch: SparseBatch | None) -> None:
        """Names the batch whose look-up `take` hands out; None for none."""
        self._current = batch

    def take(self, features: Features) -> Lookup:
        """The current batch's look-up.

        Raises:
            ConfigurationError: if no batch is current, or the module asks for other features than it named beforehand.
        """
        if self._current is None or self._current.lookup is None:
            raise ConfigurationError(
                "no rows were fetched for this look-up: under this strategy a module looks up rows in training_step only, once "
                "a batch, as self.embeddings(self.sparse_features(batch))"
            )
        prepared = self._current.features
        for name in {**prepared, **features}:
            if name not in features or name not in prepared or not _same(features[name], prepared[name]):
                raise ConfigurationError(
                    f"training_step looks up other rows of feature {name!r} than sparse_features(batch) named for its batch: "
                    "call self.embeddings with what sparse_features returns, and let it depend on the batch alone"
                )
        return self._current.lookup

    def fetch(self, request: RowRequest) -> Tensor:
        """float [U, D], the rows as they are now; called by all ranks of a group together."""
        batch = SparseBatch({}, request, self.sharding.route(request.ids.cpu()))
        self.start_ids(batch, self.receive_counts(batch))
        if batch.arrival is not None:
            batch.asked = batch.arrival.wait()
        self.start_rows(batch)
        return self._rows(batch)

    def catalogue(self, vectors: Tensor) -> Catalogue:
        """The catalogue of the items of all members, of which `vectors`, float [owned items, D], are this rank's."""
        if self.topology.group_size == 1:
            return LocalCatalogue(vectors)
        items = self.table.owned[ITEMS]
        return ShardedCatalogue(vectors, items, len(self.table.spans[ITEMS]), self.topology.shard_pg)

    # State.

    def full_state(self, to_member: int | None = None) -> dict[str, Tensor]:
        """The whole table's state under the keys of its `state_dict`; the members of a group call it together.

        Args:
            to_member: the only member of each group that gets it, the others returning {}; None gives it to all.
        """
        return self._state.gathered(to_member)

    def local_state(self) -> dict[str, Tensor]:
        """This member's part, under the same keys; the tensors themselves, not copies."""
        return local_tensors(self.table)

    @property
    def sharded_keys(self) -> frozenset[str]:
        """Keys of the state that has a row for each of the table's; the rest is the same on every rank."""
        return self._state.names

    def load_full_state(self, state: Mapping[str, Tensor]) -> None:
        """Takes this member's part of a whole table's state, as from `full_state` or an unsharded table's `state_dict`.

        Raises:
            DataError: if keys or shapes are another table's; nothing is changed then.
        """
        self._state.load(state)

    def close(self) -> None:
        """Ends the lanes; what they have not begun is dropped (`settle` first, where ranks still wait for it)."""
        self._host_lane.close()
        self._lane.close()

    # Within.

    def _touched(self, batch: SparseBatch) -> tuple[Touched, Tensor | None]:
        if batch.touched is None:
            raise RuntimeError("SparseEngine: finish_ids comes first")
        return batch.touched.wait()

    def _rows(self, batch: SparseBatch) -> Tensor:
        """The rows that this rank asked for, in the order of the request; a new tensor."""
        if batch.rows is None:
            raise RuntimeError("SparseEngine: start_rows comes first")
        with self._trace.span("wait for rows", batch.number, "wait"):
            received = batch.rows.wait()
        batch.rows = None
        return batch.route.from_travel(received)

    def _over_members(self, value: Tensor) -> Tensor:
        """Sum of a number over the group, in the order of the members."""
        if self.topology.group_size == 1:
            return value
        return self._lane.submit(partial(self._transport.sum_over_members, value)).wait()


def _same(a: Tensor | SparseFeature | ItemFeature, b: Tensor | SparseFeature | ItemFeature) -> bool:
    """Whether two features name the same rows; free where they are the same tensors, which is what modules return.

    Of tensors on a device shapes are compared, and nothing else: reading what is in them would wait for the device.
    """
    if isinstance(a, Tensor) and isinstance(b, Tensor):
        if a.device.type != "cpu":
            return a.shape == b.shape
        where = a.data_ptr() == b.data_ptr() and a.stride() == b.stride()
        return a is b or (a.shape == b.shape and a.device == b.device and (where or torch.equal(a, b)))
    if isinstance(a, Tensor) or isinstance(b, Tensor):
        return False
    return type(a) is type(b) and a[0] == b[0] and _same(a[1], b[1])
