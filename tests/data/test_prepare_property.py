"""`prepare` against the plain-Python reference on small random logs, cut into small blocks and chunks."""

import tempfile
from pathlib import Path
from unittest import mock

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.data.logs import START_MS, Event, naive_histories, stored_histories, write_kuairand
from turbogr.data.prepare import PrepareOptions, prepare
from turbogr.errors import DataError

FLAG = st.integers(0, 1)
EVENTS = st.lists(
    st.builds(
        Event,
        user=st.integers(0, 4).map(lambda user: user * 10**17 + 3),
        item=st.integers(0, 6).map(lambda item: item * 7),
        time=st.integers(START_MS, START_MS + 4),
        click=st.sampled_from([1, 1, 0]),
        like=FLAG,
        hate=st.sampled_from([0, 0, 0, 1]),
        long_view=FLAG,
    ),
    min_size=1,
    max_size=60,
)
OPTIONS = st.builds(
    PrepareOptions,
    signals=st.sampled_from([None, (), ("is_click",), ("is_like", "long_view")]),
    keep_hated=st.booleans(),
    repeats=st.sampled_from(["keep", "first", "last"]),
    k_core=st.integers(0, 4),
    k_core_passes=st.sampled_from([None, 1, 2]),
    max_length=st.sampled_from([None, 3, 5]),
)


def _positive(event: Event, signals: tuple[str, ...] | None) -> bool:
    values = {"is_click": event.click, "is_like": event.like, "long_view": event.long_view}
    asked = values if signals is None else signals
    return not asked or any(values[name] for name in asked)


@settings(max_examples=150, deadline=None)
@given(
    events=EVENTS,
    options=OPTIONS,
    cut=st.integers(0, 60),
    block=st.sampled_from([50, 300, 1 << 20]),
    chunk=st.sampled_from([1, 7, 1 << 20]),
)
def test_prepare_is_the_naive_reference(events, options, cut, block, chunk):
    wanted = [e for e in events if (options.keep_hated or not e.hate) and _positive(e, options.signals)]
    triples = [(event.user, event.item, event.time) for event in wanted]
    expected = naive_histories(triples, options.repeats, options.k_core, options.k_core_passes, options.max_length)
    with (
        tempfile.TemporaryDirectory() as name,
        mock.patch("turbogr.data.sources.common.BLOCK_BYTES", block),
        mock.patch("turbogr.data.filtering.CHUNK_EVENTS", chunk),
    ):
        folder = Path(name)
        parts = [part for part in (events[:cut], events[cut:]) if part]
        files = [write_kuairand(folder / f"log_{number}.csv", part) for number, part in enumerate(parts)]
        if not expected:
            with pytest.raises(DataError, match="no user is left"):
                prepare("kuairand", files, folder / "out", options)
            assert not (folder / "out").exists()
            return
        manifest = prepare("kuairand", files, folder / "out", options)
        assert stored_histories(folder / "out") == expected
    assert manifest["num_events"] == sum(len(history) for history in expected.values())
    assert manifest["counts"][-1]["items"] == len({item for history in expected.values() for item, _ in history})


def test_the_reference_would_notice_a_wrong_order():
    """Negative control: the reference tells ties by reading order, so a reversed log is another log."""
    triples = [(1, item, START_MS) for item in range(4)]
    assert naive_histories(triples) != naive_histories(triples[::-1])
