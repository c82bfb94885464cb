"""Timeline and LoadBalance on two ranks: files, rows, order of spans, shares; nothing depends on how long anything takes."""

from __future__ import annotations

import json

import numpy as np
import pytest
from matplotlib.image import imread

from tests.data.make import write_prepared
from tests.distributed.callbacks_worker import MODES
from tests.distributed.launch import launch_checks
from turbogr.callbacks.timeline import RESOURCES
from turbogr.tracing import Span


@pytest.fixture(scope="session")
def out(tmp_path_factory):
    return tmp_path_factory.mktemp("callbacks")


@pytest.fixture(scope="session")
def ranks(out, tmp_path_factory):
    folder = write_prepared(out / "prepared", num_users=110, num_items=60, max_len=20, seed=1)
    logs = tmp_path_factory.mktemp("callbacks-logs")
    return launch_checks("tests.distributed.callbacks_worker", 2, logs, str(folder), str(out), timeout=240)


@pytest.mark.parametrize("name", MODES)
def test_files_of_timeline(ranks, out, name):
    reports = ranks[name]
    if name == "semi_async":
        expected = [f"timeline-rank-{rank}.{form}" for rank in range(2) for form in ("json", "png")]
    else:
        expected = ["timeline.json", "timeline.png"]
        assert reports[1]["window"] is None
    for rank, report in enumerate(reports):
        assert report["files"] == expected
        if report["window"] is None:
            continue
        assert report["window"] == [0, 6, 3]
        _, computing, exposed, idle, communication = report["shares"]
        assert computing + exposed + idle == pytest.approx(1.0)
        assert computing > 0
        assert communication >= exposed > 0
        stem = expected[2 * rank].removesuffix(".json")
        trace = json.loads((out / name / f"{stem}.json").read_text())
        rows = {event["args"]["name"] for event in trace["traceEvents"] if event["name"] == "thread_name"}
        assert set(RESOURCES) <= rows
        assert trace["otherData"]["rank"] == rank
        assert list(trace["otherData"]["shares"].values()) == pytest.approx(report["shares"])
        assert imread(out / name / f"{stem}.png").size
    assert "batches 6 to 8 of epoch 1, rank 0 of 2" in ranks.finished.outputs[0]
    assert "exposed communication" not in ranks.finished.outputs[1]


@pytest.mark.parametrize("name", MODES)
def test_being_watched_changes_nothing(ranks, name):
    """The reduction of dense gradients that leaves spans is in the bits of DDP's own."""
    for report in ranks[name]:
        watched, alone = report["ends"]
        assert watched == alone


def spans_of(report) -> dict[tuple[str, int], list[Span]]:
    found: dict[tuple[str, int], list[Span]] = {}
    for fields in report["spans"]:
        span = Span(*fields)
        found.setdefault((span.name, span.batch), []).append(span)
    return found


def out_of_order(report, earlier_later) -> list[str]:
    """Pairs of spans of which the second begins before the first has ended, or which are not there.

    Of the window but for its first batch, of which some had been done before.
    """
    found, wrong = spans_of(report), []
    for batch in range(7, 9):
        for (first, one), (second, other) in earlier_later:
            before, after = found.get((first, batch + one), []), found.get((second, batch + other), [])
            if not (before and after) or max(span.end for span in before) > min(span.start for span in after):
                wrong.append(f"{first}({batch + one}) before {second}({batch + other})")
    return wrong


BOTH = [
    (("rows", 0), ("forward", 0)),
    (("forward", 0), ("backward", 0)),
    (("forward", 0), ("ids", 3)),
    (("ids", 3), ("owner's rows", 3)),
    (("backward", 0), ("load", 4)),
    (("load", 4), ("distinct rows", 4)),
    (("distinct rows", 4), ("dense step", 0)),
    (("backward", -1), ("gradients", -1)),
    (("gradients", -1), ("sum", -1)),
    (("sum", -1), ("update", -1)),
]
SEMI_ASYNC = [
    (("forward", 0), ("update", -1)),
    (("update", -1), ("look-up", 1)),
    (("look-up", 1), ("rows", 1)),
    (("look-up", 1), ("backward", 0)),
]
SYNC = [(("update", -1), ("look-up", 0)), (("dense step", -1), ("update", -1)), (("look-up", 0), ("forward", 0))]


def test_the_order_of_a_step(ranks):
    """Algorithm 1, and what synchronous training must do instead; each is wrong of the other."""
    for report in ranks["semi_async"]:
        assert not out_of_order(report, BOTH + SEMI_ASYNC)
        assert out_of_order(report, SYNC) == [f"update({batch - 1}) before look-up({batch})" for batch in (7, 8)]
    report = ranks["sync"][0]
    assert not out_of_order(report, BOTH + SYNC)
    assert len(out_of_order(report, SEMI_ASYNC)) == 4  # two of the four pairs, of two batches


@pytest.mark.parametrize("name", MODES)
def test_dense_gradients_are_reduced_within_the_backward_pass(ranks, name):
    found = spans_of(ranks[name][0])
    for batch in range(6, 9):
        [backward] = found["backward", batch]
        assert found["dense gradients", batch]
        for span in found["dense gradients", batch]:
            assert backward.start <= span.start <= span.end
            assert span.start <= backward.end


@pytest.mark.parametrize("name", MODES)
def test_the_backward_pass_waits_for_dense_gradients_at_its_end(ranks, name):
    """Behind its computation, and until the last is there: what it computes beside a reduction counts as computing."""
    found = spans_of(ranks[name][0])
    for batch in range(6, 9):
        [backward], [wait] = found["backward", batch], found["wait for dense gradients", batch]
        assert wait.thread == backward.thread
        assert max(span.start for span in found["dense gradients", batch]) <= wait.start
        assert max(span.end for span in found["dense gradients", batch]) <= wait.end <= backward.end


def test_groups_exchange_values(ranks):
    found = spans_of(ranks["semi_async, 2 groups"][0])
    assert {("values", batch) for batch in range(6, 9)} <= found.keys()
    assert {("row numbers", batch) for batch in (9, 10)} <= found.keys()


@pytest.mark.parametrize("name", ["balanced", "unbalanced"])
def test_load_balance_says_what_the_ranks_had(ranks, name):
    """Rank 0 knows from lengths what both trained, and no step asks the other."""
    first, second = ranks[name]
    tokens = np.array([first["tokens"], second["tokens"]])
    assert tokens.shape == (2, 20)
    assert first["after"] == np.ptp(tokens, axis=0).tolist()
    assert second["after"] == second["before"] == []
    assert first["gathers"] == second["gathers"] == 0
    assert first["files"] == ["load_balance.png"]
    if name == "balanced":
        assert np.mean(first["after"]) < 0.5 * np.mean(first["before"])
    else:
        assert first["after"] == first["before"]


def test_load_balance_of_a_users_own_loader(ranks):
    """One rank has more batches than the other; counts are gathered once an epoch."""
    first, second = ranks["own loader"]
    assert len(first["tokens"]) == len(second["tokens"]) == 8
    assert first["after"] == np.abs(np.subtract(first["tokens"], second["tokens"])).tolist()
    assert max(first["after"]) > 0
    assert first["gathers"] == second["gathers"] == 2
    assert first["before"] == []
    assert first["files"] == ["load_balance.png"]
