"""Lanes: work in its order, beside the caller; errors where they are waited for."""

from __future__ import annotations

import gc
import threading
import time
import weakref

import pytest
import torch

from turbogr.sparse.lane import NoLane, ThreadLane, lane_for


def test_work_runs_in_its_order_beside_the_caller():
    lane, gate, done = ThreadLane("test"), threading.Event(), []

    def work(number: int) -> int:
        gate.wait(10)
        done.append(number)
        return number * 2

    tickets = [lane.submit(lambda n=n: work(n)) for n in range(5)]
    assert done == []
    gate.set()
    assert [ticket.wait() for ticket in reversed(tickets)] == [8, 6, 4, 2, 0]
    assert done == [0, 1, 2, 3, 4]
    assert tickets[3].wait() == 6  # again
    lane.close()


def test_an_error_is_raised_where_it_is_waited_for_and_later_work_runs():
    lane = ThreadLane("test")
    failing, fine = lane.submit(lambda: 1 // 0), lane.submit(lambda: 7)
    assert fine.wait() == 7
    with pytest.raises(ZeroDivisionError):
        failing.wait()
    lane.close()


def test_gradients_are_off_and_the_thread_is_a_daemon():
    lane = ThreadLane("test")
    leaf = torch.ones(2, requires_grad=True)
    assert not lane.submit(lambda: leaf * 2).wait().requires_grad
    assert lane.submit(lambda: threading.current_thread().daemon).wait()
    lane.close()


def test_what_work_holds_is_let_go():
    lane = ThreadLane("test")
    tensor = torch.ones(3)
    gone = weakref.ref(tensor)
    lane.submit(lambda tensor=tensor: None).wait()
    lane.submit(lambda: None).wait()
    del tensor
    gc.collect()
    assert gone() is None
    lane.close()


def test_close_drops_what_has_not_begun():
    lane, begun, gate = ThreadLane("test"), threading.Event(), threading.Event()
    done = []
    running = lane.submit(lambda: (begun.set(), gate.wait(10), done.append("first")))
    lane.submit(lambda: done.append("second"))
    begun.wait(10)
    lane.close()
    gate.set()
    running.wait()
    assert lane.submit(lambda: "anew").wait() == "anew"
    assert done == ["first"]
    lane.close()


def test_what_comes_after_close_does_not_wait_for_what_was_running():
    lane, begun, gate = ThreadLane("test"), threading.Event(), threading.Event()
    running = lane.submit(lambda: (begun.set(), gate.wait(10)))
    begun.wait(10)
    lane.close()
    anew = lane.submit(gate.is_set)
    timer = threading.Timer(5, gate.set)
    timer.start()
    assert not anew.wait()
    gate.set()
    running.wait()
    timer.cancel()
    lane.close()


def test_settling_waits_for_what_was_given_and_begins_no_thread():
    lane, done = ThreadLane("settling"), []
    lane.settle()
    assert "settling" not in {thread.name for thread in threading.enumerate()}
    for number in range(3):
        lane.submit(lambda n=number: (time.sleep(0.01), done.append(n)))
    lane.submit(lambda: 1 // 0)
    lane.settle()
    assert done == [0, 1, 2]
    lane.close()


def test_each_device_has_its_kind():
    assert isinstance(lane_for(torch.device("cpu"), "test"), ThreadLane)
    assert NoLane().submit(lambda: 3).wait() == 3
