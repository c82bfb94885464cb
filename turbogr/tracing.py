"""What was done for which batch, when, and by what: written down while somebody wants to see it."""

from __future__ import annotations

import threading
import time
from collections.abc import Generator
from contextlib import contextmanager
from typing import Literal, NamedTuple

Resource = Literal["data", "unique", "communication", "compute", "wait"]
"""What a span occupies: the loader, the search for distinct rows, a link, the device; "wait" is the main thread held up."""


class Span(NamedTuple):
    """A piece of work.

    Attributes:
        name: what was done.
        batch: index of the batch in its epoch; -1 where it is for none in particular.
        resource: what it occupied.
        start: seconds of `time.perf_counter`.
        end: the same.
        thread: which of this process's threads wrote it down.
    """

    name: str
    batch: int
    resource: Resource
    start: float
    end: float
    thread: int = 0


class Trace:
    """Takes spans from any thread, and costs next to nothing while nobody wants them.

    Times are those of the host: of a device that is given its work ahead they say when it was given.

    Attributes:
        wanted: somebody will look at this run; to be set before a strategy's `setup`, which then makes visible what it
            otherwise leaves to others (the reduction of dense gradients).
        active: spans are written down.
    """

    def __init__(self) -> None:
        self.wanted = self.active = False
        self._spans: list[Span] = []

    @contextmanager
    def span(self, name: str, batch: int, resource: Resource) -> Generator[None, None, None]:
        """Times what is done within; also where it raises."""
        start = time.perf_counter()
        try:
            yield
        finally:
            self.add(name, batch, resource, start)

    def add(self, name: str, batch: int, resource: Resource, start: float) -> None:
        """Writes down what began at `start` and ends now."""
        if self.active:
            self._spans.append(Span(name, batch, resource, start, time.perf_counter(), threading.get_ident()))

    def take(self) -> list[Span]:
        """The spans so far, by their start; they are forgotten here."""
        spans, self._spans = self._spans, []
        return sorted(spans, key=lambda span: span.start)
