"""The batches in flight: loaded, agreed on, their ids sent and their rows found steps before they are trained."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from enum import IntEnum
from typing import Any, Protocol

from torch import distributed as dist

from turbogr.sparse.engine import SparseBatch, SparseEngine
from turbogr.sparse.table import Features
from turbogr.strategies.aggregation import loss_weight
from turbogr.strategies.agreement import Agreed, Agreement, StopRequest


class Stage(IntEnum):
    """How far a batch in flight has come; each stage is reached from the one before."""

    LOADED = 0  # on the device, its distinct rows known to this rank, its numbers on their way to all ranks
    AGREED = 1  # every rank has such a batch; weights and sizes are known
    SENT = 2  # ids are on their way to the owners of the rows
    ARRIVED = 3  # the owner's distinct rows, and those of the other groups, are being found in a thread
    READY = 4  # they are found: all is there but the rows themselves
    FETCHED = 5  # the rows are here, as the batch's leaf


class InFlight:
    """A batch on its way. What the loader hands to Lightning in place of the batch, and Lightning back to the strategy.

    Not a dataclass or a NamedTuple on purpose: Lightning moves and clones what is one.

    Attributes:
        index: of the batch in its epoch.
        batch: on the device; None where this rank has no further batch.
        sparse: its rows' way.
        agreement: with the other ranks.
        stage: how far it has come.
        weight: factor of its loss, from stage AGREED on.
        receive_counts: as in SparseEngine.start_ids, from stage AGREED on.
    """

    def __init__(self, index: int, batch: Any, sparse: SparseBatch | None, agreement: Agreement) -> None:
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

    Step k of mode "sync", with the numbers of Algorithm 1 of TurboGR:

        prepare     fetch the rows of k (5), which hold all updates so far
        (2)         dense forward of k
        run_ahead   send the ids of k + 3 (3); what the thread finds for k + 2 (4)
        (6)         dense backward of k
        send_back   gradients of k's rows to their owners (1); ids of k + 3 have arrived, to the thread with them (7)
        exchange    begin to exchange between groups; meanwhile load k + 4 (8)
        update      rows, after the dense step

    Args:
        engine: keeps the rows.
        module: says what a batch looks up.
        to_device: moves a host batch; applied as it is loaded.
        stop: tells of signals.
    """

    def __init__(self, engine: SparseEngine, module: SparseModule, to_device: Callable[[Any], Any], stop: StopRequest) -> None:
        self.engine, self.module, self.to_device, self.stop = engine, module, to_device, stop
        topology = engine.topology
        self._host_pg: dist.ProcessGroup | None = topology.host_pg if topology.world_size > 1 else None
        self._queue: deque[InFlight] = deque()
        self._source: Source | None = None
        self._span: Callable[[], tuple[int, float]] = lambda: (0, 0)
        self._primed = self._ended = False
        self._next = self._handed = 0
        self._end = 0.0
        self._current: InFlight | None = None
        self._sent_back = False

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
        return batch.batch

    def prepare(self) -> None:
        """Before the forward pass: the current batch's rows are here."""
        current = self.current
        self._load(upto=current.index + 3)
        self._ensure(current, Stage.FETCHED)
        self.engine.current(current.sparse)

    def run_ahead(self) -> None:
        """After the forward pass."""
        self._ensure(self._at(self.current.index + 3), Stage.SENT)
        self._ensure(self._at(self.current.index + 2), Stage.READY)

    def send_back(self) -> None:
        """After the backward pass."""
        current = self.current
        assert current.sparse is not None
        self.engine.backward(current.sparse)
        self._sent_back = True
        self._ensure(self._at(current.index + 3), Stage.ARRIVED)

    def exchange(self) -> None:
        """After the last backward pass before an update."""
        if self._sent_back:
            self.engine.start_exchange(1.0 / self.engine.topology.world_size)
        self._load(upto=self.current.index + 4)

    def update(self, lr_scale: float, clip_norm: float | None) -> None:
        """After the dense step; arguments as in SparseEngine.update. Nothing if no gradient was sent back."""
        if self._sent_back:
            self.engine.update(lr_scale, clip_norm)
        self._sent_back = False

    def drop(self) -> None:
        """Forgets batches that will not be trained, once what they have begun together with other ranks has ended."""
        for batch in self._queue:
            self._finish(batch)
        self._queue.clear()
        self._current = None
        self.engine.current(None)

    # Within.

    def _prime(self) -> None:
        self._primed = True
        self._next, self._end = self._span()
        self._handed = self._next
        self._load(upto=self._next + 3)
        for ahead, stage in enumerate((Stage.READY, Stage.READY, Stage.ARRIVED)):
            self._ensure(self._at(self._handed + ahead), stage)

    def _load(self, upto: int | None = None) -> None:
        """Loads batches up to an index, or one."""
        upto = self._next if upto is None else upto
        while self._next <= upto and self._next < self._end and not self._ended:
            assert self._source is not None
            host = self._source.pull()
            batch, sparse, samples = None, None, None
            send_counts = [0] * self.engine.topology.group_size
            if host is not None:
                batch = self.to_device(host)
                sparse = self.engine.prepare(self.module.sparse_features(batch))
                samples, send_counts = self.module.sample_count(batch), sparse.send_counts
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
                else:
                    self.engine.forward(batch.sparse)
            batch.stage = Stage(batch.stage + 1)

    def _agree(self, batch: InFlight) -> bool:
        topology = self.engine.topology
        agreed = Agreed(batch.agreement.wait(), topology.rank, topology.group_size)
        self.stop.agree(agreed.signum)
        if agreed.goes_on:
            batch.weight = loss_weight(agreed.samples, topology.rank)
            batch.receive_counts = agreed.receive_counts
            return True
        self._ended = True
        while self._queue and self._queue[-1].index >= batch.index:
            self._queue.pop().agreement.wait()
        return False

    def _finish(self, batch: InFlight) -> None:
        if batch.stage == Stage.LOADED:
            batch.agreement.wait()
        elif batch.stage == Stage.SENT:
            assert batch.sparse is not None
            self.engine.finish_ids(batch.sparse)
            self.engine.join_unique(batch.sparse)
        elif batch.stage == Stage.ARRIVED:
            assert batch.sparse is not None
            self.engine.join_unique(batch.sparse)
