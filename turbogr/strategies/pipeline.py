"""The batches in flight: loaded, agreed on, their ids sent and their rows found steps before they are trained."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from enum import IntEnum
from typing import Any, Literal, NamedTuple, Protocol

from torch import distributed as dist

from turbogr.sparse.engine import SparseEngine
from turbogr.sparse.lane import Ticket
from turbogr.sparse.table import Features
from turbogr.sparse.transport import SparseBatch
from turbogr.sparse.updates import RowValues
from turbogr.strategies.aggregation import loss_weight
from turbogr.strategies.agreement import Agreed, Agreement, StopRequest
from turbogr.strategies.transfer import Transfer
from turbogr.tracing import Trace

Mode = Literal["sync", "semi_async"]


class Stage(IntEnum):
    """How far a batch in flight has come; each stage is reached from the one before."""

    LOADED = 0  # on the device, its distinct rows known to this rank, its numbers on their way to all ranks
    AGREED = 1  # every rank has such a batch; weights and sizes are known
    SENT = 2  # ids are on their way to the owners of the rows
    ARRIVED = 3  # the owner's distinct rows, and those of the other groups, are being found in a thread
    READY = 4  # they are found: all is there but the rows themselves
    ASKED = 5  # the rows have been read by their owners and are on their way
    FETCHED = 6  # the rows are here, as the batch's leaf


class Schedule(NamedTuple):
    """How many batches ahead of the trained one each stage is reached, within a step.

    Of n batches in flight one is behind the trained one (its rows are being updated) and n - 2 are ahead. Each of the three
    stages that take time (loading and agreement, ids, distinct rows) has a step of its own as far as n allows, and rows have
    what is left of the step before: 4, 3, 2 and 1 steps ahead in the paper's six (TurboGR, Algorithm 1). With fewer, stages
    share a step; with more, loading and ids have more time.

    Attributes:
        loaded: at the step's end.
        sent: after the forward pass; its ids have arrived at the step's end.
        ready: after the forward pass.
        asked: after the forward pass, behind the update of the batch before; 0 where rows are read as the step begins.
    """

    loaded: int
    sent: int
    ready: int
    asked: int

    @classmethod
    def of(cls, mode: Mode, batches_in_flight: int) -> Schedule:
        """The schedule of a mode with n batches in flight, 2 or more."""
        ahead = batches_in_flight - 2
        ready = max(ahead - 2, 0)
        return cls(ahead, max(ahead - 1, 0), ready, 1 if mode == "semi_async" and ready > 0 else 0)


class _Due(NamedTuple):
    """An update of rows that is still to come.

    Attributes:
        last: index of the last batch whose gradient is in it.
        lr_scale: as in SparseEngine.update.
        clip_norm: the same.
    """

    last: int
    lr_scale: float
    clip_norm: float | None


class InFlight:
    """A batch on its way. What the loader hands to Lightning in place of the batch, and Lightning back to the strategy.

    Not a dataclass or a NamedTuple on purpose: Lightning moves and clones what is one.

    Attributes:
        index: of the batch in its epoch.
        batch: on its way to the device; None where this rank has no further batch.
        sparse: its rows' way.
        agreement: with the other ranks.
        stage: how far it has come.
        weight: factor of its loss, from stage AGREED on.
        receive_counts: as in SparseEngine.start_ids, from stage AGREED on.
    """

    def __init__(self, index: int, batch: Ticket[Any] | None, sparse: SparseBatch | None, agreement: Agreement) -> None:
        self.index, self.batch, self.sparse, self.agreement = index, batch, sparse, agreement
        self.stage = Stage.LOADED
        self.weight = 1.0
        self.receive_counts: list[int] = []


class SparseModule(Protocol):
    """What the strategy asks of a module: two functions of a batch, of nothing else."""

    def sparse_features(self, batch: Any) -> Features:
        """Feature name -> ids that the batch will look up."""

    def sample_count(self, batch: Any) -> int:
        """Terms that the batch's mean loss averages over."""


class Source(Protocol):
    """Where batches come from."""

    def pull(self) -> Any | None:
        """The next batch, on the host; None at the end, and ever after."""


class Pipeline:
    """A queue of batches in flight, and the order in which they advance.

    Everything that the ranks do together hangs on what they have agreed on, never on what one of them has: a rank whose loader
    ends goes on to tell so until all know, and then the batch and all after it are dropped everywhere.

    Step k of mode "semi_async" with six batches in flight is Algorithm 1 of TurboGR, whose i is k - 1:

        prepare     (1) gradients of the rows of k - 1 to their owners, and on into the exchange between groups
        forward     (2) dense forward of k
        run_ahead   (3) ids of k + 3 are sent; (4) what the thread finds for k + 2;
                    the exchange of k - 1 ends, rows are updated; (5) rows of k + 1 are read and sent
        backward    (6) dense backward of k, step of the dense optimizer
        send_back   (7) ids of k + 3 have arrived, to the thread with them
        exchange    (8) k + 4 is loaded

    So the rows of k hold the updates of all batches up to k - 2 (tau = 1), while dense parameters are never late. Nothing is
    late across the end of an epoch.

    In mode "sync" (1) and (5) move behind (6): `send_back` sends k's own gradients to the owners, `exchange` begins the
    exchange, `update` ends it behind the dense step, and the next `prepare` fetches rows that hold all updates.

    Args:
        engine: keeps the rows.
        module: says what a batch looks up.
        transfer: moves batches; applied as they are loaded.
        stop: tells of signals.
        mode: see above.
        batches_in_flight: n, 2 or more. What is trained does not depend on it.
        trace: takes down what is done when.

    Attributes:
        delayed: rows of this rank that the last update changed, as the next batch reads them: as they were before. None where
            the next batch reads the tables as they are.
    """

    def __init__(
        self,
        engine: SparseEngine,
        module: SparseModule,
        transfer: Transfer,
        stop: StopRequest,
        mode: Mode = "sync",
        batches_in_flight: int = 6,
        trace: Trace | None = None,
    ) -> None:
        self.engine, self.module, self.transfer, self.stop, self.mode = engine, module, transfer, stop, mode
        self.schedule = Schedule.of(mode, batches_in_flight)
        self._trace = Trace() if trace is None else trace
        topology = engine.topology
        self._host_pg: dist.ProcessGroup | None = topology.host_pg if topology.world_size > 1 else None
        self._queue: deque[InFlight] = deque()
        self._source: Source | None = None
        self._span: Callable[[], tuple[int, float]] = lambda: (0, 0)
        self._primed = self._ended = False
        self._first = self._next = self._handed = 0
        self._end = 0.0
        self._current: InFlight | None = None
        self._trailing: InFlight | None = None  # trained, its gradients are still here
        self._sent_back = False  # there are gradients since the last update
        self._due: _Due | None = None
        self._exchanging = False
        self.delayed: RowValues | None = None

    @property
    def current(self) -> InFlight:
        """The batch that is being trained."""
        if self._current is None:
            raise RuntimeError("Pipeline: no batch is being trained")
        return self._current

    # The loader's side.

    def begin(self, source: Source, span: Callable[[], tuple[int, float]]) -> None:
        """Starts an epoch, or the rest of one.

        Args:
            source: of its batches.
            span: index of its first batch in the epoch, and of the one after its last; asked as the first one is handed out.
        """
        self._return_gradients()
        self._update()  # without looking ahead: the loader has begun anew, and what it gives belongs to this epoch
        self.drop()
        self._source, self._span = source, span
        self._primed = self._ended = False

    def hand_out(self) -> InFlight:
        """The next batch of the epoch.

        Raises:
            StopIteration: there is none, on this rank or another.
        """
        if not self._primed:
            self._prime()
        batch = self._at(self._handed)
        if batch is None:
            self._load()
            batch = self._at(self._handed)
        self._ensure(batch, Stage.AGREED)
        if batch is None or batch.stage < Stage.AGREED:
            raise StopIteration
        self._handed += 1
        return batch

    # The strategy's side, in the order of a step.

    def take(self, batch: InFlight) -> Any:
        """Names the batch that will be trained next, and returns it as it lies on the device."""
        while self._queue and self._queue[0].index < batch.index:
            self._queue.popleft()
        self._current = batch
        assert batch.batch is not None
        return batch.batch.wait()

    def prepare(self) -> None:
        """Before the forward pass: the current batch's rows are here, gradients of the one before are on their way."""
        current = self.current
        self._load(upto=current.index + max(self.schedule.loaded - 1, 0))
        self._ensure(current, Stage.ASKED)  # before rows are updated
        self.delayed = None
        self._return_gradients()
        self._ensure(current, Stage.FETCHED)
        self.engine.current(current.sparse)

    def run_ahead(self) -> None:
        """After the forward pass."""
        index, schedule = self.current.index, self.schedule
        self._ensure(self._at(index + schedule.sent), Stage.SENT)
        self._ensure(self._at(index + schedule.ready), Stage.READY)
        self._update()
        self._ensure(self._at(index + schedule.asked), Stage.ASKED)

    def send_back(self) -> None:
        """After the backward pass."""
        self._trailing, self._sent_back = self.current, True
        if self.mode == "sync":
            self._return_gradients()
        self._ensure(self._at(self.current.index + self.schedule.sent), Stage.ARRIVED)

    def exchange(self) -> None:
        """After the last backward pass before an update."""
        if self.mode == "sync" and self._sent_back:
            self._start_exchange()
        self._load(upto=self.current.index + self.schedule.loaded)

    def update(self, lr_scale: float, clip_norm: float | None) -> None:
        """After the dense step; arguments as in SparseEngine.update. Nothing if no gradient was sent back."""
        if self._sent_back:
            self._due = _Due(self.current.index, lr_scale, clip_norm)
        self._sent_back = False
        if self.mode == "sync":
            self._update()

    # Between steps.

    def flush(self) -> None:
        """Brings the tables up to date. What is trained is the same without: the next batch's rows are read before."""
        self._return_gradients()
        if self._due is not None:
            index = self._due.last + 1
            self._load(upto=index)
            self._ensure(self._at(index), Stage.ASKED)
            following = self._at(index)
            earlier = self._update(None if following is None else following.sparse)
            self.delayed = None if following is None else earlier
        self.engine.settle()

    def break_off(self, trained: int) -> None:
        """Brings the tables up to date after an exception. No loader is asked for a batch, and none is trained afterwards.

        Args:
            trained: batches of the epoch whose steps have come to their end.
        """
        sparse = None if self._current is None or self._current.index != trained else self._current.sparse
        if self._due is not None:
            self._return_gradients()
            self.delayed = self._update("any batch")
        elif self.mode == "semi_async" and sparse is not None and sparse.lookup is not None and self._host_pg is None:
            # Within a step, behind the update that its rows do not hold: they are here as they were read.
            self.delayed = RowValues(sparse.asked, sparse.lookup.values())
        self.engine.settle()

    def drop(self) -> None:
        """Forgets batches that will not be trained, once what they have begun together with other ranks has ended."""
        for batch in self._queue:
            if batch.stage == Stage.LOADED:
                batch.agreement.wait()
        self.engine.settle()
        self._queue.clear()
        self._current = None
        self.engine.current(None)

    # Within.

    def _prime(self) -> None:
        self._primed = True
        self._first, self._end = self._span()
        self._next = self._handed = self._first
        if self._first == 0:
            self.delayed = None
        ahead = self.schedule.loaded
        self._load(upto=self._first + max(ahead - 1, 0))
        for index in range(ahead - 1):
            self._ensure(self._at(self._first + index), Stage.READY if index < ahead - 2 else Stage.ARRIVED)

    def _load(self, upto: int | None = None) -> None:
        """Loads batches up to an index, or one."""
        upto = self._next if upto is None else upto
        while self._next <= upto and self._next < self._end and not self._ended:
            assert self._source is not None
            batch, sparse, samples = None, None, None
            send_counts = [0] * self.engine.topology.group_size
            with self._trace.span("load", self._next, "data"):
                host = self._source.pull()
                if host is not None:
                    readable, batch = self.transfer.begin(host)
            if host is not None:
                sparse = self.engine.prepare(self.module.sparse_features(readable), self._next)
                samples, send_counts = self.module.sample_count(readable), sparse.send_counts
            agreement = Agreement(samples, send_counts, self.stop.asked, self._host_pg)
            self._queue.append(InFlight(self._next, batch, sparse, agreement))
            self._next += 1

    def _at(self, index: int) -> InFlight | None:
        return next((batch for batch in self._queue if batch.index == index), None)

    def _ensure(self, batch: InFlight | None, stage: Stage) -> None:
        """Brings a batch to a stage, if it is there and every rank has one."""
        while batch is not None and batch.stage < stage:
            if batch.stage == Stage.LOADED:
                if not self._agree(batch):
                    return
            else:
                assert batch.sparse is not None
                if batch.stage == Stage.AGREED:
                    self.engine.start_ids(batch.sparse, batch.receive_counts)
                elif batch.stage == Stage.SENT:
                    self.engine.finish_ids(batch.sparse)
                elif batch.stage == Stage.ARRIVED:
                    self.engine.join_unique(batch.sparse)
                elif batch.stage == Stage.READY:
                    self.engine.start_rows(batch.sparse, self.delayed if batch.index == self._first else None)
                else:
                    self.engine.finish_rows(batch.sparse)
            batch.stage = Stage(batch.stage + 1)

    def _agree(self, batch: InFlight) -> bool:
        topology = self.engine.topology
        with self._trace.span("wait for agreement", batch.index, "wait"):
            told = batch.agreement.wait()
        agreed = Agreed(told, topology.rank, topology.group_size)
        self.stop.agree(agreed.signum)
        if agreed.goes_on:
            batch.weight = loss_weight(agreed.samples, topology.rank)
            batch.receive_counts = agreed.receive_counts
            return True
        self._ended = True
        while self._queue and self._queue[-1].index >= batch.index:
            self._queue.pop().agreement.wait()
        return False

    def _return_gradients(self) -> None:
        """Instruction 1."""
        if self._trailing is not None:
            assert self._trailing.sparse is not None
            self.engine.backward(self._trailing.sparse)
            self._trailing = None
        if self._due is not None:
            self._start_exchange()

    def _start_exchange(self) -> None:
        if not self._exchanging:
            self.engine.start_exchange(1.0 / self.engine.topology.world_size)
            self._exchanging = True

    def _update(self, read_by: SparseBatch | Literal["any batch"] | None = None) -> RowValues | None:
        """Ends the exchange and updates rows, if that is due."""
        if self._due is None:
            return None
        due, self._due, self._exchanging = self._due, None, False
        return self.engine.update(due.lr_scale, due.clip_norm, read_by)
