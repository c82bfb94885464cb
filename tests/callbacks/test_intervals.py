"""Shares of a step against a count of the cells of a grid."""

import itertools
import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from turbogr.callbacks.intervals import difference, intersection, length, step_shares, union
from turbogr.tracing import Span

CELLS = 30
pairs = st.tuples(st.integers(0, CELLS), st.integers(0, CELLS)).map(sorted).map(tuple)
sets = st.lists(pairs, max_size=8)
NAMES = {
    "compute": ["forward", "backward", "sum"],
    "communication": ["ids", "dense gradients"],
    "wait": ["wait for rows"],
    "unique": ["owner's rows"],
    "data": ["load"],
}


@st.composite
def spans(draw):
    resource = draw(st.sampled_from(list(NAMES)))
    start, end = draw(pairs)
    return Span(draw(st.sampled_from(NAMES[resource])), draw(st.integers(0, 1)), resource, start, end, draw(st.integers(0, 1)))


def cells(intervals) -> set[int]:
    """Cell c is the time from c to c + 1."""
    return {cell for start, end in intervals for cell in range(start, end)}


def inside(inner, outer) -> bool:
    return outer.start <= inner.start and inner.end <= outer.end


def cells_of_computing(all_spans) -> set[int]:
    """The definition, word by word."""
    found = set()
    for span in all_spans:
        if span.resource != "compute":
            continue
        mine = set(range(span.start, span.end))
        for other in all_spans:
            if other.thread == span.thread and other.resource not in ("compute", "communication") and inside(other, span):
                mine -= set(range(other.start, other.end))
        found |= mine
    return found


@given(sets, sets)
def test_sets_against_a_grid(a, b):
    one, other = union(a), union(b)
    for result, expected in (
        (one, cells(a)),
        (intersection(one, other), cells(a) & cells(b)),
        (difference(one, other), cells(a) - cells(b)),
    ):
        assert cells(result) == expected
        assert length(result) == len(expected)
        assert all(start < end for start, end in result)
        assert all(end <= start for (_, end), (start, _) in itertools.pairwise(result))


@settings(max_examples=400)
@given(st.lists(spans(), max_size=10), pairs.filter(lambda pair: pair[0] < pair[1]))
def test_shares_against_a_grid(all_spans, window):
    shares = step_shares(all_spans, *window)
    within = cells([window])
    busy = cells_of_computing(all_spans) & within
    sent = cells([(span.start, span.end) for span in all_spans if span.resource == "communication"]) & within
    counts = [len(part) / len(within) for part in (busy, sent - busy, within - sent - busy, sent)]
    assert shares == pytest.approx((len(within), *counts))
    assert math.isclose(shares.computing + shares.exposed + shares.idle, 1.0)


def test_a_step_by_hand():
    """10 s: forward 0-4 with rows behind it, backward 4-9, which waits for its reductions from 7 on, and a sum beside that."""
    made = [
        Span("forward", 3, "compute", 0, 4, 1),
        Span("wait for unique", 5, "wait", 1, 2, 1),
        Span("rows", 4, "communication", 1.5, 3, 2),
        Span("backward", 3, "compute", 4, 9, 1),
        Span("dense gradients", 3, "communication", 5, 6, 1),
        Span("dense gradients", 3, "communication", 6.5, 9, 1),  # computed on meanwhile
        Span("wait for dense gradients", 3, "wait", 7, 9, 1),
        Span("sum", 2, "compute", 8, 8.5, 2),
        Span("wait for gradients", 2, "wait", 7.9, 8.4, 1),  # of another thread than the sum's
    ]
    shares = step_shares(made, 0, 10)
    assert shares == pytest.approx((10, 0.65, 0.20, 0.15, 0.50))
    assert shares.hidden == pytest.approx(1 - 0.20 / 0.50)


def test_waiting_in_another_thread_hides_no_computation():
    made = [Span("sum", 0, "compute", 0, 10, 1), Span("wait for rows", 1, "wait", 2, 5, 2)]
    assert step_shares(made, 0, 10).computing == 1.0
    assert step_shares([made[0], made[1]._replace(thread=1)], 0, 10).computing == 0.7


def test_nothing_is_idle_and_an_empty_window_an_error():
    assert step_shares([], 0, 1) == (1, 0, 0, 1, 0)
    assert step_shares([], 0, 1).hidden == 1.0
    with pytest.raises(ValueError, match="later than the start"):
        step_shares([], 1, 1)
