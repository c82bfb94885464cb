"""SparseEngine: a table's rows, sharded inside a group and copied between groups, looked up and updated once a step.

One training batch on its way (TurboGR, §4.2.1), and what it sends:

    prepare        distinct rows of all features, their owners                              nothing
    start_ids      each owner is told the rows that are asked of it                         ids, inside the group
    finish_ids     in a thread: the owner's distinct rows, and those of the other groups    sizes and row ids, between groups
    forward        rows to those who asked: the batch's leaf [U, D]                         rows, inside the group
    backward       the leaf's gradient to the owners, who sum it                            gradients, inside the group
    start_exchange all batches since the last update merged; sums over the groups           values, between groups
    update         one step of the row optimizer on the rows that any rank touched          nothing

Rows are made distinct before anything is sent, so a row travels once for a rank, however often the rank's batch names it. A
group of one rank sends nothing inside, one group nothing between. Every sum is made in the order of ranks, then of groups,
whatever arrives first: the same inputs give the same bits, and all groups hold the same.

**If one rank raises** (an id outside its table is found by `prepare`, before anything is sent), the others are not told: they
wait in their next collective, which fails as soon as the rank's process ends (its connections close), or after the topology's
timeout. So let the error end the process. The engine makes no collective while it is closed or discarded.
"""

from __future__ import annotations

from collections.abc import Mapping
from concurrent.futures import Future, ThreadPoolExecutor

import torch
from torch import Tensor
from torch import distributed as dist

from turbogr.errors import ConfigurationError
from turbogr.ops.embedding_lookup import jagged_embedding_lookup, sum_by_row
from turbogr.ops.unique import unique_ids
from turbogr.sparse.accumulation import Touched, merge
from turbogr.sparse.catalogue import Catalogue, LocalCatalogue
from turbogr.sparse.exchange import ExchangeForm, ValueExchange, union_of_rows
from turbogr.sparse.sharded_catalogue import ShardedCatalogue
from turbogr.sparse.sharding import Route, Sharding
from turbogr.sparse.shards import ShardedState, is_sharded, keep_part, local_tensors
from turbogr.sparse.table import ITEMS, EmbeddingTable, Features, ItemFeature, Lookup, RowRequest, SparseFeature, clipped
from turbogr.sparse.topology import HSPTopology


class SparseBatch:
    """A batch in flight.

    Not a dataclass on purpose: Lightning moves and clones what is one.

    Attributes:
        features: what it looks up.
        request: the distinct rows behind them.
        send_counts: [I], rows that this rank asks of each member.
        receive_counts: [I], rows that each member asks of this rank; from `start_ids` on.
        lookup: what `take` hands out; from `forward` to `backward`.
    """

    def __init__(self, features: Features, request: RowRequest, route: Route) -> None:
        self.features, self.request, self.route = features, request, route
        self.send_counts = route.counts
        self.receive_counts: list[int] = []
        self.lookup: Lookup | None = None
        self.asked = route.local
        """int64 [R], rows of this rank's weight that the members ask for, member by member; once they have arrived."""
        self.arrival: dist.Work | None = None
        self.touched: Future[tuple[Touched, Tensor | None]] | None = None


class SparseEngine:
    """Keeps an EmbeddingTable's rows; implements `turbogr.sparse.table.RowEngine`.

    Made by all ranks together, at the same point: each takes its part of the table's weight and of the optimizer's state, and
    group 0's values become those of all groups. From then on the table's `weight` and row state are this member's part.

    All methods but `prepare`, `current`, `take`, `local_state`, `load_full_state`, `discard` and `close` communicate: ranks
    call them in the same order, each with its own part of the same batch.

    Args:
        table: with all rows; allocated alike on all ranks.
        topology: who is who.
        sharding: of the table's rows over the members of a group.
        exchange: form of the exchange between groups; see ValueExchange.

    Raises:
        ConfigurationError: if the sharding is for another number of members, or the exchange is unknown.
        ValueError: if the sharding is for other tables.
    """

    def __init__(
        self, table: EmbeddingTable, topology: HSPTopology, sharding: Sharding, exchange: ExchangeForm = "auto"
    ) -> None:
        if sharding.members != topology.group_size:
            raise ConfigurationError(f"tables sharded over {sharding.members} ranks, in groups of {topology.group_size}")
        if sharding.spans != table.spans:
            raise ValueError(f"SparseEngine: the sharding is of the tables {sharding.spans}, the table has {table.spans}")
        self.table, self.topology, self.sharding = table, topology, sharding
        self._values = ValueExchange(topology.replica_pg, exchange)
        rows = frozenset(name for name, x in table.state_dict().items() if is_sharded(x, table.num_rows))
        keep_part(table, sharding, topology.member)
        self._state = ShardedState(table, sharding, topology.member, topology.shard_pg, rows)
        if topology.groups > 1:
            for tensor in local_tensors(table).values():
                # A strategy shards tables before the module goes to its device, whose back end may not send from a CPU.
                on_host = tensor.device.type == "cpu"
                dist.broadcast(tensor, group=topology.meta_pg if on_host else topology.replica_pg, group_src=0)
        table.engine = self
        self._thread = ThreadPoolExecutor(1, "turbogr-rows")
        self._current: SparseBatch | None = None
        self._pending: list[Touched] = []
        self._started: Touched | None = None
        self._abandoned = False  # an exchange is under way whose sums nobody wants

    # One batch, in the order of its steps.

    def prepare(self, features: Features) -> SparseBatch:
        """Finds a batch's distinct rows and their owners.

        Args:
            features: name -> ids, as for the table.

        Raises:
            DataError: if an id lies outside its table, with the feature, the id and the table's size.
        """
        request = self.table.request(features)
        return SparseBatch(features, request, self.sharding.route(request.ids))

    def receive_counts(self, batch: SparseBatch) -> list[int]:
        """Asks the group what `start_ids` needs to know, and waits; for those who have no better occasion to send it along."""
        if self.topology.group_size == 1:
            return batch.send_counts
        counts = torch.tensor(batch.send_counts, device=self.table.weight.device)
        received = torch.empty_like(counts)
        dist.all_to_all_single(received, counts, group=self.topology.shard_pg)
        return received.tolist()

    def start_ids(self, batch: SparseBatch, receive_counts: list[int]) -> None:
        """Begins to tell every owner the rows that are asked of it; returns at once.

        Args:
            batch: from `prepare`.
            receive_counts: for every member m of the group, `send_counts[this member]` of m's batch.
        """
        batch.receive_counts = receive_counts
        if self.topology.group_size > 1:
            batch.asked = batch.route.local.new_empty(sum(receive_counts))
            batch.arrival = dist.all_to_all_single(
                batch.asked, batch.route.local, receive_counts, batch.send_counts, group=self.topology.shard_pg, async_op=True
            )

    def finish_ids(self, batch: SparseBatch) -> None:
        """Waits for the ids, and leaves to the thread what has to be found out about them before the update."""
        if batch.arrival is not None:
            batch.arrival.wait()
            batch.arrival = None
        batch.touched = self._thread.submit(self._find_touched, batch.asked)

    def join_unique(self, batch: SparseBatch) -> None:
        """Waits for the thread.

        Raises:
            RuntimeError: what it raised, as when another group's rank is gone.
        """
        self._touched(batch)

    def forward(self, batch: SparseBatch) -> None:
        """Fetches the batch's rows as they are now; `batch.lookup` is there afterwards."""
        rows = self._rows(batch).requires_grad_()
        batch.lookup = Lookup(batch.request.ids, rows, batch.request.index, self.table.backend)

    def backward(self, batch: SparseBatch) -> None:
        """Sends the gradient of the batch's leaf to the owners; zeros where none has arrived.

        Raises:
            RuntimeError: if the batch was not looked up.
        """
        if batch.lookup is None:
            raise RuntimeError("SparseEngine: backward before forward")
        leaf, batch.lookup = batch.lookup.rows, None
        touched, inverse = self._touched(batch)
        gradient = torch.zeros_like(leaf) if leaf.grad is None else leaf.grad
        if inverse is not None:
            sent = batch.route.to_travel(gradient)
            received = sent.new_empty(len(inverse), sent.shape[1])
            dist.all_to_all_single(received, sent, batch.receive_counts, batch.send_counts, group=self.topology.shard_pg)
            gradient = sum_by_row(received, inverse, len(touched.rows), backend=self.table.backend)
        touched.gradient = gradient
        self._pending.append(touched)
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
        if self._started is not None:
            raise RuntimeError("SparseEngine: start_exchange twice without an update")
        if not self._pending:
            return
        if self._abandoned:
            self._values.wait()
            self._abandoned = False
        touched = merge(self._pending, self.table.backend)
        self._pending = []
        if scale != 1.0:
            touched.gradient.mul_(scale)
        if touched.union is not None:
            self._values.start(touched.gradient, touched.union)
        self._started = touched

    def update(self, lr_scale: float = 1.0, clip_norm: float | None = None) -> None:
        """Waits for the exchange and updates the rows that any rank touched; nothing if there was no batch.

        The optimizer takes a step on every rank, even where it owns none of the rows, so that its count of steps is the same
        everywhere.

        Args:
            lr_scale: factor of the learning rate.
            clip_norm: largest norm of the gradient of all rows of all tables together, summed over all ranks.
        """
        touched, self._started = self._started, None
        if touched is None:
            return
        rows, gradient = touched.rows, touched.gradient
        if touched.union is not None:
            rows, gradient = touched.union.ids.to(gradient.device), self._values.wait()
        if clip_norm is not None:
            gradient = clipped(gradient, self._over_members(gradient.double().square().sum()), clip_norm)
        with torch.no_grad():
            self.table.optimizer.step(self.table.weight, rows, gradient, self.table.backend, lr_scale)

    def discard(self) -> None:
        """Forgets gradients and look-ups that must not be used (an interrupted or failed step); no communication.

        An exchange under way is waited for by the next one, so that this can be called while an error is on its way out.
        """
        self._abandoned |= self._started is not None and self._started.union is not None
        self._pending, self._started, self._current = [], None, None

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
        batch = SparseBatch({}, request, self.sharding.route(request.ids))
        self.start_ids(batch, self.receive_counts(batch))
        if batch.arrival is not None:
            batch.arrival.wait()
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
        """Ends the thread; what it has not begun is dropped."""
        self._thread.shutdown(wait=False, cancel_futures=True)

    def _find_touched(self, asked: Tensor) -> tuple[Touched, Tensor | None]:
        """The rows that the group touches, with the union; where each asked one stands. In the thread that owns `meta_pg`."""
        rows, inverse = asked, None
        if self.topology.group_size > 1:
            rows, inverse = unique_ids(asked, len(self.table.weight), backend=self.table.backend)
        union = union_of_rows(rows.cpu(), self.topology.meta_pg) if self.topology.groups > 1 else None
        return Touched(rows, union), inverse

    def _touched(self, batch: SparseBatch) -> tuple[Touched, Tensor | None]:
        if batch.touched is None:
            raise RuntimeError("SparseEngine: finish_ids comes first")
        return batch.touched.result()

    def _rows(self, batch: SparseBatch) -> Tensor:
        """The rows that this rank asked for, in the order of the request; a new tensor."""
        weight = self.table.weight.detach()
        rows = jagged_embedding_lookup([weight], batch.asked, backend=self.table.backend)
        if self.topology.group_size == 1:
            return rows
        received = rows.new_empty(len(batch.request.ids), rows.shape[1])
        dist.all_to_all_single(received, rows, batch.send_counts, batch.receive_counts, group=self.topology.shard_pg)
        return batch.route.from_travel(received)

    def _over_members(self, value: Tensor) -> Tensor:
        """Sum of a number over the group, in the order of the members."""
        if self.topology.group_size == 1:
            return value
        values = value.new_empty(self.topology.group_size)
        dist.all_gather_single(values, value.view(1), group=self.topology.shard_pg)
        return values.sum()


def _same(a: Tensor | SparseFeature | ItemFeature, b: Tensor | SparseFeature | ItemFeature) -> bool:
    """Whether two features name the same rows; free where they are the same tensors, which is what modules return."""
    if isinstance(a, Tensor) and isinstance(b, Tensor):
        where = a.data_ptr() == b.data_ptr() and a.stride() == b.stride()
        return a is b or (a.shape == b.shape and a.device == b.device and (where or torch.equal(a, b)))
    if isinstance(a, Tensor) or isinstance(b, Tensor):
        return False
    return type(a) is type(b) and a[0] == b[0] and _same(a[1], b[1])
