"""The order in which batches advance, seen by an engine that writes down what it is asked to do."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from turbogr.strategies.agreement import StopRequest
from turbogr.strategies.pipeline import Pipeline, Stage


class Recorder:
    """Stands for a SparseEngine on one rank; a batch is its number."""

    def __init__(self, log: list[str]) -> None:
        self.log = log
        self.topology = SimpleNamespace(world_size=1, group_size=1, rank=0, host_pg=None)

    def prepare(self, features):
        return SimpleNamespace(number=features, send_counts=[1])

    def current(self, sparse):
        pass

    def start_exchange(self, scale):
        self.log.append("exchange")

    def update(self, lr_scale, clip_norm):
        self.log.append("update")

    def __getattr__(self, name):
        return lambda sparse, *rest: self.log.append(f"{name} {sparse.number}")


class Numbers:
    def __init__(self, count: int, log: list[str]) -> None:
        self.left, self.log = iter(range(count)), log

    def pull(self):
        number = next(self.left, None)
        if number is not None:
            self.log.append(f"load {number}")
        return number


def pipeline(count: int, end: float = float("inf")) -> tuple[Pipeline, list[str]]:
    log: list[str] = []
    module = SimpleNamespace(sparse_features=lambda batch: batch, sample_count=lambda batch: 1)
    made = Pipeline(Recorder(log), module, lambda host: host, StopRequest())
    made.begin(Numbers(count, log), lambda: (0, end))
    return made, log


def step(pipe: Pipeline, log: list[str], updates: bool = True) -> int:
    number = pipe.take(pipe.hand_out())
    pipe.prepare()
    log.append("forward")
    pipe.run_ahead()
    log.append("backward")
    pipe.send_back()
    if updates:
        pipe.exchange()
        log.append("dense step")
        pipe.update(1.0, None)
    return number


def test_the_steady_state():
    pipe, log = pipeline(20)
    assert log == []  # nothing is loaded before the first batch is asked for
    assert [step(pipe, log) for _ in range(6)] == list(range(6))
    log.clear()
    step(pipe, log)
    assert log == [
        "forward 6",  # its rows, after the update of batch 5
        "forward",
        "start_ids 9",
        "join_unique 8",
        "backward",
        "backward 6",
        "finish_ids 9",
        "exchange",
        "load 10",
        "dense step",
        "update",
    ]


def test_an_epoch_begins_and_ends():
    pipe, log = pipeline(5)
    pipe.hand_out()
    assert [entry for entry in log if entry.startswith("load")] == ["load 0", "load 1", "load 2", "load 3"]
    assert not any(entry.startswith("forward") for entry in log)
    pipe.begin(Numbers(5, log), lambda: (0, 5))  # what was begun for the earlier epoch is completed
    assert [step(pipe, log) for _ in range(5)] == list(range(5))
    with pytest.raises(StopIteration):
        pipe.hand_out()


def test_no_more_is_loaded_than_will_be_trained():
    pipe, log = pipeline(20, end=6)
    for _ in range(6):
        step(pipe, log)
    assert "load 5" in log
    assert "load 6" not in log
    with pytest.raises(StopIteration):
        pipe.hand_out()


def test_gradients_are_accumulated():
    pipe, log = pipeline(20)
    for number in range(6):
        step(pipe, log, updates=number % 3 == 2)
    assert log.count("exchange") == log.count("update") == 2
    assert [entry for entry in log if entry.startswith("backward ")] == [f"backward {n}" for n in range(6)]


def test_a_step_without_gradients_updates_nothing():
    pipe, log = pipeline(20)
    pipe.take(pipe.hand_out())
    pipe.prepare()
    pipe.run_ahead()
    pipe.exchange()
    pipe.update(1.0, None)
    assert "exchange" not in log
    assert "update" not in log
    assert step(pipe, log) == 1


def test_a_batch_may_be_handed_out_ahead():
    """As Lightning does where it does not know how many there are."""
    pipe, _ = pipeline(4)
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
