"""The order in which batches advance, seen by an engine that writes down what it is asked to do."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from turbogr.strategies.agreement import StopRequest
from turbogr.strategies.pipeline import Mode, Pipeline, Schedule, Stage
from turbogr.strategies.transfer import Transfer


class Recorder:
    """Stands for a SparseEngine on one rank; a batch is its number."""

    def __init__(self, log: list[str]) -> None:
        self.log = log
        self.topology = SimpleNamespace(world_size=1, group_size=1, rank=0, host_pg=None)

    def prepare(self, features, number):
        assert features == number
        return SimpleNamespace(number=features, send_counts=[1])

    def current(self, sparse):
        pass

    def settle(self):
        pass

    def start_rows(self, sparse, earlier):
        self.log.append(f"start_rows {sparse.number}" + (f" ({earlier})" if earlier else ""))

    def start_exchange(self, scale):
        self.log.append("exchange")

    def update(self, lr_scale, clip_norm, read_by):
        reader = getattr(read_by, "number", read_by)
        self.log.append("update" if reader is None else f"update, {reader} reads")
        return f"before {lr_scale}"

    def __getattr__(self, name):
        return lambda sparse, *rest: self.log.append(f"{name} {sparse.number}")


class Numbers:
    def __init__(self, count: int, log: list[str], first: int = 0) -> None:
        self.left, self.log = iter(range(first, count)), log

    def pull(self):
        number = next(self.left, None)
        if number is not None:
            self.log.append(f"load {number}")
        return number


def pipeline(
    count: int, end: float = float("inf"), mode: Mode = "semi_async", in_flight: int = 6, first: int = 0
) -> tuple[Pipeline, list[str]]:
    log: list[str] = []
    at_once = Transfer(torch.device("cpu"), lambda host: host)
    module = SimpleNamespace(sparse_features=lambda batch: batch, sample_count=lambda batch: 1)
    made = Pipeline(Recorder(log), module, at_once, StopRequest(), mode, in_flight)
    made.begin(Numbers(count, log, first), lambda: (first, end))
    return made, log


def step(pipe: Pipeline, log: list[str], updates: bool = True, trains: bool = True) -> int:
    number = pipe.take(pipe.hand_out())
    pipe.prepare()
    log.append(f"forward {number}")
    pipe.run_ahead()
    if trains:
        log.append(f"dense backward {number}")
        pipe.send_back()
    if updates:
        pipe.exchange()
        log.append("dense step")
        pipe.update(float(number), None)
    return number


def taken(log: list[str]) -> list[str]:
    """What has been written down, which is forgotten."""
    found = list(log)
    log.clear()
    return found


BOTH = pytest.mark.parametrize("mode", ["sync", "semi_async"])
ALL = pytest.mark.parametrize("in_flight", range(2, 9))


def test_algorithm_1():
    """TurboGR, Algorithm 1, of which this is the step i = 5."""
    pipe, log = pipeline(20)
    assert log == []  # nothing is loaded before the first batch is asked for
    assert [step(pipe, log) for _ in range(6)] == list(range(6))
    taken(log)
    step(pipe, log)
    assert taken(log) == [
        "backward 5",  # 1 embedding backward, start of the value exchange
        "exchange",
        "finish_rows 6",
        "forward 6",  # 2 dense forward
        "start_ids 9",  # 3 start of the ids' all-to-all
        "join_unique 8",  # 4 join unique
        "update",  # join of the exchange, update of rows
        "start_rows 7",  # 5 embedding forward
        "dense backward 6",  # 6 dense backward and step
        "finish_ids 9",  # 7 end of the ids' all-to-all, start of unique
        "load 10",  # 8 load
        "dense step",
    ]


def test_sync_moves_the_embedding_behind_the_dense_backward():
    pipe, log = pipeline(20, mode="sync")
    assert [step(pipe, log) for _ in range(6)] == list(range(6))
    taken(log)
    step(pipe, log)
    assert taken(log) == [
        "start_rows 6",  # after the update of batch 5
        "finish_rows 6",
        "forward 6",
        "start_ids 9",
        "join_unique 8",
        "dense backward 6",
        "backward 6",
        "finish_ids 9",
        "exchange",
        "load 10",
        "dense step",
        "update",
    ]


def test_prologue():
    pipe, log = pipeline(20)
    step(pipe, log)
    assert taken(log) == [
        *(f"load {n}" for n in range(4)),
        *(f"{stage} {n}" for n in (0, 1) for stage in ("start_ids", "finish_ids", "join_unique")),
        *("start_ids 2", "finish_ids 2"),
        *("start_rows 0", "finish_rows 0", "forward 0", "start_ids 3", "join_unique 2", "start_rows 1"),
        *("dense backward 0", "finish_ids 3", "load 4", "dense step"),
    ]
    step(pipe, log)
    assert taken(log)[:4] == ["backward 0", "exchange", "finish_rows 1", "forward 1"]


def test_epilogue():
    """The last batches go the same way; the last update comes with the end of the epoch."""
    pipe, log = pipeline(8)
    for _ in range(5):
        step(pipe, log)
    taken(log)
    step(pipe, log)
    assert taken(log) == [
        *("backward 4", "exchange", "finish_rows 5", "forward 5", "join_unique 7", "update", "start_rows 6"),
        *("dense backward 5", "dense step"),
    ]
    assert [step(pipe, log) for _ in range(2)] == [6, 7]
    taken(log)
    with pytest.raises(StopIteration):
        pipe.hand_out()
    assert taken(log) == []
    pipe.begin(Numbers(8, log), lambda: (0, 8))
    assert taken(log) == ["backward 7", "exchange", "update"]
    assert pipe.delayed is None


@BOTH
@ALL
def test_rows_hold_the_updates_that_they_should(mode, in_flight):
    """Whatever is in flight: of batch k all up to k - 1 in sync, all up to k - 2 in semi_async."""
    pipe, log = pipeline(12, mode=mode, in_flight=in_flight)
    assert [step(pipe, log) for _ in range(12)] == list(range(12))
    pipe.flush()
    updates, forward, late = 0, -1, 1 if mode == "semi_async" else 0
    for entry in log:
        what, _, number = entry.partition(" ")
        if what == "update":
            updates += 1
        elif what == "start_rows":
            assert updates == max(int(number) - late, 0)
        elif what == "forward":
            forward = int(number)
        elif what == "load":
            assert int(number) <= max(forward, 0) + max(in_flight - 2, 1)
    assert updates == 12


@ALL
def test_the_schedule_is_derived(in_flight):
    schedule = Schedule.of("semi_async", in_flight)
    assert schedule.loaded == in_flight - 2
    assert list(schedule) == sorted(schedule, reverse=True)
    assert Schedule.of("semi_async", 6) == (4, 3, 2, 1)
    assert Schedule.of("sync", in_flight) == (*schedule[:3], 0)


@BOTH
def test_an_epoch_begins_and_ends(mode):
    pipe, log = pipeline(5, mode=mode)
    pipe.hand_out()
    assert [entry for entry in log if entry.startswith("load")] == ["load 0", "load 1", "load 2", "load 3"]
    assert not any(entry.startswith("start_rows") for entry in log)
    pipe.begin(Numbers(5, log), lambda: (0, 5))  # what was begun for the earlier epoch is completed
    assert [step(pipe, log) for _ in range(5)] == list(range(5))
    with pytest.raises(StopIteration):
        pipe.hand_out()


@BOTH
@ALL
def test_no_more_is_loaded_than_will_be_trained(mode, in_flight):
    pipe, log = pipeline(20, end=6, mode=mode, in_flight=in_flight)
    for _ in range(6):
        step(pipe, log)
    pipe.flush()
    assert "load 5" in log
    assert "load 6" not in log
    with pytest.raises(StopIteration):
        pipe.hand_out()


@BOTH
def test_gradients_are_accumulated(mode):
    pipe, log = pipeline(20, mode=mode)
    for number in range(6):
        step(pipe, log, updates=number % 3 == 2)
    pipe.flush()
    assert [entry for entry in log if entry.startswith("backward ")] == [f"backward {n}" for n in range(6)]
    assert log.count("exchange") == 2
    order = [entry for entry in log if entry.startswith(("backward ", "exchange", "update", "start_rows"))]
    first = order.index("exchange")
    assert order[first - 1] == "backward 2"
    reads = set(order[: next(n for n, entry in enumerate(order) if entry.startswith("update"))])
    assert "start_rows 3" in reads or mode == "sync"
    assert "start_rows 4" not in reads


@BOTH
@pytest.mark.parametrize("updates", [True, False])
def test_a_step_without_gradients_updates_nothing(mode, updates):
    """`training_step` returned None, with or without gradients of earlier batches in the same window."""
    pipe, log = pipeline(20, mode=mode)
    step(pipe, log, trains=False)
    assert "exchange" not in log
    assert "update" not in log
    assert step(pipe, log, updates=updates) == 1
    assert step(pipe, log, trains=False) == 2  # the window of batch 1 may end here
    assert step(pipe, log) == 3
    pipe.flush()
    assert [entry for entry in log if entry.startswith("backward")] == ["backward 1", "backward 3"]
    assert log.count("exchange") == sum(entry.startswith("update") for entry in log) == 2
    assert "load 7" in log  # the pipeline does not run dry


@ALL
def test_validation_in_between(in_flight):
    """The tables get the pending update, the next batch's rows are read before it, and nothing else changes."""
    pipe, log = pipeline(20, in_flight=in_flight)
    for _ in range(4):
        step(pipe, log)
    taken(log)
    pipe.flush()
    flushed = taken(log)
    assert flushed[:2] == ["backward 3", "exchange"]
    assert flushed[-1] == "update, 4 reads"
    assert "start_rows 4" in flushed or in_flight > 4
    assert pipe.delayed == "before 3.0"
    pipe.flush()
    assert taken(log) == []
    assert pipe.delayed == "before 3.0"
    assert step(pipe, log) == 4
    assert pipe.delayed is None
    assert not any(entry.startswith(("backward", "exchange", "update", "start_rows 4")) for entry in log)
    taken(log)
    step(pipe, log)
    assert taken(log)[:2] == ["backward 4", "exchange"] or in_flight <= 4


def test_a_flush_within_accumulation_updates_nothing():
    pipe, log = pipeline(20)
    step(pipe, log, updates=False)
    taken(log)
    pipe.flush()
    assert taken(log) == ["backward 0"]
    assert pipe.delayed is None


@ALL
def test_an_epoch_that_was_broken_off_takes_no_batch_of_the_next(in_flight):
    pipe, log = pipeline(20, in_flight=in_flight)
    step(pipe, log)
    taken(log)
    pipe.begin(Numbers(20, log), lambda: (0, 20))
    assert taken(log) == ["backward 0", "exchange", "update"]
    assert [step(pipe, log) for _ in range(20)] == list(range(20))


@ALL
def test_after_an_exception_nothing_is_loaded(in_flight):
    """Whichever batch is the next to be trained, rows are kept as they were."""
    pipe, log = pipeline(20, in_flight=in_flight)
    step(pipe, log)
    taken(log)
    pipe.break_off(1)
    assert taken(log) == ["backward 0", "exchange", "update, any batch reads"]
    assert pipe.delayed == "before 0.0"


def test_sync_has_nothing_to_flush():
    pipe, log = pipeline(20, mode="sync")
    step(pipe, log)
    taken(log)
    pipe.flush()
    assert taken(log) == []


@ALL
def test_a_resumed_run_reads_rows_as_they_were(in_flight):
    """Its first batch only, and only within an epoch."""
    pipe, log = pipeline(20, in_flight=in_flight, first=3)
    pipe.delayed = "as before"
    assert step(pipe, log) == 3
    assert "start_rows 3 (as before)" in log
    assert pipe.delayed is None
    step(pipe, log)
    step(pipe, log)
    assert [entry for entry in log if entry.startswith("start_rows")][1] == "start_rows 4"
    pipe, log = pipeline(20, in_flight=in_flight)
    pipe.delayed = "as before"
    step(pipe, log)
    assert "start_rows 0" in log


def test_a_batch_may_be_handed_out_ahead():
    """As Lightning does where it does not know how many there are."""
    pipe, _ = pipeline(4, mode="sync")
    first, second = pipe.hand_out(), pipe.hand_out()
    assert pipe.take(first) == 0
    pipe.prepare()
    third, fourth = pipe.hand_out(), pipe.hand_out()
    assert second.stage is Stage.READY
    with pytest.raises(StopIteration):
        pipe.hand_out()
    for batch, number in ((second, 1), (third, 2), (fourth, 3)):
        assert pipe.take(batch) == number
        pipe.prepare()
        pipe.run_ahead()
        pipe.send_back()
