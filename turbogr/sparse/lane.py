"""Lanes: work beside the caller's, one piece after the other in the order in which it was given.

On a CPU a lane is a thread, on an accelerator a stream of its own. Collectives that are given to one lane run in the same order
on all ranks if the ranks give them in the same order, whatever the callers do meanwhile.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import suppress
from typing import Any, Generic, Protocol, TypeVar

import torch
from torch import Tensor

T = TypeVar("T")
T_co = TypeVar("T_co", covariant=True)
_Item = tuple[Callable[[], Any], Future[Any]] | None


class Ticket(Protocol[T_co]):
    """A piece of work that was given to a lane."""

    def wait(self) -> T_co:
        """What the work returned, once the caller's own work may use it; raises what it raised."""


class Lane(Protocol):
    """Where work runs beside the caller's."""

    def submit(self, work: Callable[[], T]) -> Ticket[T]:
        """Gives a piece of work to the lane; returns at once."""

    def settle(self) -> None:
        """Waits until what it was given is done, or has failed."""

    def close(self) -> None:
        """Ends the lane; what it has not begun is dropped."""


class Done(Generic[T]):
    """A Ticket of work that is finished."""

    def __init__(self, result: T) -> None:
        self._result = result

    def wait(self) -> T:
        """The result."""
        return self._result


class NoLane:
    """Runs work at once, where there is no other rank to wait for."""

    def submit(self, work: Callable[[], T]) -> Ticket[T]:
        """As in Lane."""
        return Done(work())

    def settle(self) -> None:
        """As in Lane."""

    def close(self) -> None:
        """Nothing to end."""


class ThreadLane:
    """A thread, begun with its first work. Gradients are off in it.

    It is a daemon: where a peer has failed, the process must be able to end before a collective's timeout.

    Args:
        name: of the thread.
    """

    def __init__(self, name: str) -> None:
        self.name = name
        self._work: queue.SimpleQueue[_Item] | None = None

    def submit(self, work: Callable[[], T]) -> Ticket[T]:
        """As in Lane."""
        if self._work is None:
            self._work = queue.SimpleQueue()
            threading.Thread(target=self._run, args=(self._work,), name=self.name, daemon=True).start()
        future: Future[T] = Future()
        self._work.put((work, future))
        return _OfThread(future)

    def settle(self) -> None:
        """As in Lane; begins no thread."""
        if self._work is not None:
            self.submit(lambda: None).wait()

    def close(self) -> None:
        """As in Lane; a later `submit` begins another thread, with a queue of its own."""
        if self._work is not None:
            with suppress(queue.Empty):  # the thread takes from it too
                while True:
                    self._work.get_nowait()
            self._work.put(None)
            self._work = None

    @staticmethod
    @torch.no_grad()
    def _run(queued: queue.SimpleQueue[_Item]) -> None:
        while (item := queued.get()) is not None:
            work, future = item
            try:
                future.set_result(work())
            except BaseException as error:  # raised again where the result is waited for
                future.set_exception(error)
            del item, work, future  # what they hold shall not live until the next work comes


class _OfThread(Generic[T]):
    def __init__(self, future: Future[T]) -> None:
        self._future = future

    def wait(self) -> T:
        return self._future.result()


class StreamLane:
    """A stream of an accelerator. The caller queues the work at once; only the device runs it beside the caller's own.

    Work begins when all that the caller had queued before is done, so it may use whatever the caller made. What it holds is
    kept until its ticket is waited for: memory that it reads is not given away before.

    Args:
        device: whose stream.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.stream = torch.Stream(device=device)

    @torch.no_grad()
    def submit(self, work: Callable[[], T]) -> Ticket[T]:
        """As in Lane."""
        self.stream.wait_stream(torch.accelerator.current_stream(self.device))
        with self.stream:
            result = work()
        return _OfStream(result, self.stream.record_event(), work, self.stream)

    def settle(self) -> None:
        """As in Lane: the caller's stream waits."""
        self.submit(lambda: None).wait()

    def close(self) -> None:
        """Nothing to end: what was queued will run."""


class _OfStream(Generic[T]):
    def __init__(self, result: T, done: torch.Event, work: Callable[[], T], own: torch.Stream) -> None:
        self._result, self._done, self._own = result, done, own
        self._work: Callable[[], T] | None = work

    def wait(self) -> T:
        stream = torch.accelerator.current_stream(self._own.device)
        if stream == self._own:  # later work of the lane: it runs behind this one, and the caller's stream still does not wait
            return self._result
        stream.wait_event(self._done)
        if isinstance(self._result, Tensor):
            self._result.record_stream(stream)  # it was made on the lane's stream, and is freed by the caller's
        self._work = None
        return self._result


def copy_lane(device: torch.device) -> Lane:
    """Where copies to a device run beside its work.

    What such a lane copies to is memory of its stream, and the caller's stream may use it without its being recorded there:
    once it is given away, the next to write it is another copy, and that waits for all that the caller queued before.
    """
    return NoLane() if device.type == "cpu" else StreamLane(device)


def lane_for(device: torch.device, name: str) -> Lane:
    """The kind of lane that a device has."""
    return ThreadLane(name) if device.type == "cpu" else StreamLane(device)
