"""Of the time of a step, how much was computing, how much communication that nothing hid, how much neither.

TurboGR's tables 5 and 6 divide a step so, as the profiler of its devices does; here the same is read off the spans of a
`turbogr.tracing.Trace`. Intervals are pairs (start, end) in seconds; sets of them are disjoint and in order.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import defaultdict
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from turbogr.tracing import Span

Intervals = list[tuple[float, float]]


class Shares(NamedTuple):
    """A stretch of time, divided; `computing`, `exposed` and `idle` are all of it.

    Attributes:
        seconds: how long it was.
        computing: fraction with computation.
        exposed: fraction with communication, but no computation ("not overlapped", table 6).
        idle: fraction with neither ("free").
        communication: fraction with communication, exposed or hidden by computation.
    """

    seconds: float
    computing: float
    exposed: float
    idle: float
    communication: float

    @property
    def hidden(self) -> float:
        """The part of the communication that went on behind computation; 1 where there was no communication."""
        return 1.0 - self.exposed / self.communication if self.communication else 1.0


def step_shares(spans: Iterable[Span], start: float, end: float) -> Shares:
    """Divides the time between two moments (TurboGR, tables 5 and 6).

    Args:
        spans: at least all that touch this time, in any order.
        start: seconds of `time.perf_counter`.
        end: the same, later.

    Raises:
        ValueError: `end` is not later than `start`.
    """
    spans = list(spans)
    seconds = end - start
    parts = divide(spans, start, end)
    sent = intersection(communicating(spans), [(start, end)])
    return Shares(seconds, *(length(part) / seconds for part in (*parts, sent)))


class Parts(NamedTuple):
    """When it was which of the three; together they are all of the time.

    Attributes:
        computing: with computation.
        exposed: with communication, but no computation.
        idle: with neither.
    """

    computing: Intervals
    exposed: Intervals
    idle: Intervals


def divide(spans: Iterable[Span], start: float, end: float) -> Parts:
    """Says for every moment between two what it counts as.

    Communication counts from where it is begun to where it is known to have ended, with all waiting for other ranks. What is
    neither computing (see `computing`) nor communication is idle, whatever the threads did: loading, looking for distinct rows,
    the trainer's own work.

    Args:
        spans: as for `step_shares`, and so the moments.
        start: seconds.
        end: seconds.

    Raises:
        ValueError: `end` is not later than `start`.
    """
    if not end > start:
        raise ValueError(f"shares of a step: the end, {end}, must be later than the start, {start}")
    spans, window = list(spans), [(start, end)]
    busy = intersection(computing(spans), window)
    exposed = difference(intersection(communicating(spans), window), busy)
    return Parts(busy, exposed, difference(difference(window, busy), exposed))


def communicating(spans: Iterable[Span]) -> Intervals:
    """When there was communication of any kind."""
    return union((span.start, span.end) for span in spans if span.resource == "communication")


def computing(spans: Iterable[Span]) -> Intervals:
    """When there was computation of any kind, in any thread.

    That is the spans of resource "compute": the dense passes and the dense step, the owner's look-up, sum of gradients and
    update, also where they run in a thread beside the trainer's. Finding distinct rows is not among them: it is the host's work
    (the paper's "CPU unique"). What such a span contains of another kind in the same thread is no computation, such as a
    backward pass's waiting for the reduction of the last dense gradients; communication, which goes on beside its thread, does
    not count as contained.
    """
    threads: dict[int, list[Span]] = defaultdict(list)
    for span in spans:
        if span.resource != "communication":
            threads[span.thread].append(span)
    found: Intervals = []
    for mine in threads.values():
        mine.sort(key=lambda span: (span.start, -span.end, span.resource != "compute"))
        for index, span in enumerate(mine):
            if span.resource == "compute":
                found += difference([(span.start, span.end)], union(_within(mine, index)))
    return union(found)


def _within(spans: Sequence[Span], index: int) -> Intervals:
    """What spans[index], of one thread's in order, contains that is no computation."""
    outer, found = spans[index], []
    for position in range(index + 1, len(spans)):
        inner = spans[position]
        if inner.start >= outer.end:
            break
        if inner.resource != "compute" and inner.end <= outer.end:
            found.append((inner.start, inner.end))
    return found


def union(intervals: Iterable[tuple[float, float]]) -> Intervals:
    """Makes a set of intervals that may overlap and be out of order; empty ones are left out."""
    found: Intervals = []
    for start, end in sorted(intervals):
        if end <= start:
            continue
        if found and start <= found[-1][1]:
            found[-1] = (found[-1][0], max(found[-1][1], end))
        else:
            found.append((start, end))
    return found


def intersection(a: Intervals, b: Intervals) -> Intervals:
    """What two sets have in common."""
    found: Intervals = []
    i = j = 0
    while i < len(a) and j < len(b):
        start, end = max(a[i][0], b[j][0]), min(a[i][1], b[j][1])
        if start < end:
            found.append((start, end))
        if a[i][1] < b[j][1]:
            i += 1
        else:
            j += 1
    return found


def difference(a: Intervals, b: Intervals) -> Intervals:
    """What of `a` is not in `b`."""
    found: Intervals = []
    ends = [end for _, end in b]
    for start, end in a:
        position = start
        for index in range(bisect_left(ends, start), len(b)):
            if b[index][0] >= end:
                break
            if b[index][0] > position:
                found.append((position, b[index][0]))
            position = max(position, b[index][1])
        if position < end:
            found.append((position, end))
    return found


def length(intervals: Intervals) -> float:
    """Seconds of a set."""
    return sum(end - start for start, end in intervals)
