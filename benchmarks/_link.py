"""A slow link between ranks of one machine, by waiting: a back end of torch.distributed that hands results out late.

Two cores cannot show overlap over loopback: there, to communicate is to copy, and copying needs the cores that compute. On a
real link the bytes travel by themselves. So the back end "link" lets gloo do each collective, and then keeps the result back
for as long as a link would have needed, in a thread that sleeps. Whoever waits for the result sleeps as well; nothing of it
takes CPU time. Python's calls and those of DDP's reducer in C++ come through alike, so every side has the same link.

The model is one serial network card a rank, for all communicators of the rank together:

    start = max(the collective has ended over gloo, the card is free)         all ranks are there: nothing moves before
    the card is free again at start + bytes / bandwidth                       first come, first served
    the result is there at start + bytes / bandwidth + latency                latency does not occupy the card

Bytes of a collective are the larger of what this rank sends and what it receives (the card is full-duplex), as the usual
algorithms have it (`traffic`): all-to-all leaves out a rank's own part; an all-gather of x bytes from each of W ranks moves
(W - 1) x; a ring all-reduce of x bytes 2 (W - 1) / W x.

While the record is on, it holds a span for each collective and for each time somebody waited for one.
"""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch import distributed as dist
from torch.autograd import Variable
from torch.futures import Future

from turbogr.tracing import Span

BACKEND = "link"


@dataclass(frozen=True)
class Speed:
    """Of a link.

    Attributes:
        bandwidth: bytes a second; None does not keep anything back.
        latency: seconds.
    """

    bandwidth: float | None = None
    latency: float = 0.0


class Card:
    """A rank's network card: says when a transfer begins and when it has arrived. Times are any clock's.

    Args:
        speed: of its link; may be changed when nothing is under way.
    """

    def __init__(self, speed: Speed) -> None:
        self.speed = speed
        self._free_at = float("-inf")

    def book(self, nbytes: float, now: float) -> tuple[float, float]:
        """Start and arrival of so many bytes that could go now; calls come in the order of `now`."""
        if self.speed.bandwidth is None:
            return now, now
        start = max(now, self._free_at)
        self._free_at = start + nbytes / self.speed.bandwidth
        return start, self._free_at + self.speed.latency


class Moved(NamedTuple):
    """A collective that is over.

    Attributes:
        name: of the method of dist.ProcessGroup.
        nbytes: by `traffic`.
        begun: when this rank called it, in seconds of `time.perf_counter`.
        start: when it went onto the link.
        end: when its result was there.
    """

    name: str
    nbytes: float
    begun: float
    start: float
    end: float


def traffic(name: str, arguments: tuple[Any, ...], ranks: int, rank: int) -> float:
    """Bytes that a collective moves through this rank's card, the larger of both directions.

    Args:
        name: of the method of dist.ProcessGroup.
        arguments: its own.
        ranks: of the group.
        rank: this one's, in the group.

    Raises:
        NotImplementedError: for a collective that no side of a benchmark uses.
    """
    others = ranks - 1
    if name == "barrier":
        return 0.0
    if name == "all_to_all_single":
        out, sent, out_rows, sent_rows = arguments[:4]
        return max(_foreign(out, out_rows, ranks, rank), _foreign(sent, sent_rows, ranks, rank))
    if name == "all_gather_single":
        return float(others * arguments[1].nbytes)
    if name in ("allgather", "gather"):
        return float(others * sum(x.nbytes for x in arguments[1]))
    size = float(sum(x.nbytes for x in arguments[0]))
    if name == "broadcast":
        return size
    if name == "allreduce":
        return 2 * others / ranks * size
    raise NotImplementedError(f"_link.py: no traffic is known of {name}")


def _foreign(x: Tensor, rows: list[int], ranks: int, rank: int) -> float:
    """Bytes of an all-to-all's buffer that are another rank's; no rows: equal parts."""
    own = rows[rank] / sum(rows) if sum(rows) else 1 / ranks
    return x.nbytes * (1 - own)


class Link:
    """This process's card, its record, and the thread that hands results out.

    Args:
        speed: of the link.

    Attributes:
        card: as above.
    """

    def __init__(self, speed: Speed) -> None:
        self.card = Card(speed)
        self._recording = False
        self._moved: list[Moved] = []
        self._waits: list[Span] = []
        self._reduced: Future[Any] | None = None
        self._due: queue.SimpleQueue[tuple[float, Callable[[], None]]] = queue.SimpleQueue()
        self._lock = threading.Lock()
        threading.Thread(target=self._hand_out, name="link", daemon=True).start()

    def record(self) -> None:
        """Begins anew."""
        self._moved, self._waits, self._recording = [], [], True

    def recorded(self) -> tuple[list[Moved], list[Span]]:
        """Collectives that have ended, and waits, since `record`; ends the record."""
        self._recording = False
        return self._moved, self._waits

    def waited(self, name: str, start: float) -> None:
        """Somebody waited from then until now."""
        if self._recording:
            self._waits.append(Span(f"wait for {name}", -1, "wait", start, time.perf_counter(), threading.get_ident()))

    def follow(self, name: str, nbytes: float, work: dist.Work) -> Future[Any]:
        """The result of a collective that has been begun over gloo: there when it would have arrived."""
        begun = time.perf_counter()
        result: Future[Any] = Future()

        def over_gloo(future: Future[Any]) -> None:
            try:
                value = future.value()
            except RuntimeError as error:
                result.set_exception(error)
                return
            with self._lock:
                start, end = self.card.book(nbytes, time.perf_counter())
                # Under the lock: due times rise, as latency is the same for all, so the queue is in their order.
                if self.card.speed.bandwidth is not None:
                    self._due.put((end, lambda: arrive(value, start)))
                    return
            arrive(value, start)

        def arrive(value: Any, start: float) -> None:
            if self._recording:
                self._moved.append(Moved(name, nbytes, begun, start, time.perf_counter()))
            result.set_result(value)

        work.get_future().add_done_callback(over_gloo)
        if name == "allreduce" and torch._C._current_graph_task_id() != -1:
            self._reduced_in_backward(result)
        return result

    def _hand_out(self) -> None:
        while True:
            due, arrive = self._due.get()
            time.sleep(max(0.0, due - time.perf_counter()))
            arrive()

    def _reduced_in_backward(self, result: Future[Any]) -> None:
        # DDP waits in C++, at the very end of the backward pass: seen by what is called back there, before DDP is.
        first, self._reduced = self._reduced is None, result
        if first:
            Variable._execution_engine.queue_callback(self._backward_ends)

    def _backward_ends(self) -> None:
        last, self._reduced = self._reduced, None
        start = time.perf_counter()
        assert last is not None
        last.wait()
        self.waited("allreduce", start)


class _Late(dist.Work):
    """What a collective over the link returns."""

    def __init__(self, name: str, future: Future[Any], work: dist.Work, link: Link) -> None:
        super().__init__()
        self._name, self._future, self._work, self._link = name, future, work, link

    def wait(self, timeout: timedelta | None = None) -> bool:
        start = time.perf_counter()
        self._future.wait()
        self._link.waited(self._name, start)
        return True

    def is_completed(self) -> bool:
        return self._future.done()

    def get_future(self) -> Future[Any]:
        return self._future


class LinkGroup(dist.ProcessGroup):
    """A communicator over the link; gloo does the work.

    Args:
        link: of this process.
        store: as torch.distributed hands it to a back end, like the rest.
        rank: of the group.
        size: of the group.
        timeout: of each collective.
    """

    def __init__(self, link: Link, store: dist.Store, rank: int, size: int, timeout: timedelta) -> None:
        super().__init__(rank, size)  # type: ignore[call-arg]
        kind = dist.ProcessGroup.BackendType.GLOO
        self.link, self._place, self._size = link, rank, size
        self._inner = dist.ProcessGroup(store, rank, size)
        self._inner._register_backend(torch.device("cpu"), kind, dist.ProcessGroupGloo(store, rank, size, timeout=timeout))
        self._inner._set_default_backend(kind)

    def getBackendName(self) -> str:
        """As torch asks for it."""
        return BACKEND

    @property
    def group_name(self) -> str:  # type: ignore[override]
        """As torch knows it; what C++ would ask is a back end's own, of which a group written in Python has none."""
        return dist.distributed_c10d._world.pg_names[self]

    def _send(self, name: str, *arguments: Any, **options: Any) -> dist.Work:
        nbytes = traffic(name, arguments, self._size, self._place)
        work = getattr(self._inner, name)(*arguments, **options)
        return _Late(name, self.link.follow(name, nbytes, work), work, self.link)


def _collective(name: str) -> Callable[..., dist.Work]:
    def send(self: LinkGroup, *arguments: Any, **options: Any) -> dist.Work:
        return self._send(name, *arguments, **options)

    return send


for _name in ("all_to_all_single", "all_gather_single", "allgather", "allreduce", "broadcast", "gather", "barrier"):
    setattr(LinkGroup, _name, _collective(_name))


def open_link(speed: Speed) -> Link:
    """Makes the back end "link" known to torch.distributed; once a process, before its process group is opened.

    Communicators that ask for gloo by name (TurboGRStrategy's, for what is small and lies on the host) get the link too.
    """
    link = Link(speed)

    def create(store: dist.Store, rank: int, size: int, timeout: timedelta) -> LinkGroup:
        return LinkGroup(link, store, rank, size, timeout)

    dist.Backend.register_backend(BACKEND, create, devices=["cpu"])
    new_group = dist.new_group

    def over_the_link(*arguments: Any, **options: Any) -> Any:
        if options.get("backend") == "gloo":
            options["backend"] = BACKEND
        return new_group(*arguments, **options)

    dist.new_group = over_the_link
    return link
