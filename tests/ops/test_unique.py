from __future__ import annotations

import ctypes
import sys
import threading
import time
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.ops.sanitizer import assert_clean
from turbogr.errors import ConfigurationError
from turbogr.ops import unique_native
from turbogr.ops.registry import describe
from turbogr.ops.unique import (
    KERNEL,
    _unique_ids,
    _unique_segments,
    unique_ids,
    unique_ids_reference,
    unique_segments,
)

ROWS = [51, 1000, 10**9, 2**62]
"""Table sizes that take every way: flags or a bitmap, keys of one word, keys of two."""


@pytest.fixture(params=["cpp", "torch"])
def backend(request):
    if request.param == "cpp" and KERNEL.library() is None:
        pytest.skip(KERNEL.failure())
    return request.param


def assert_equals_reference(ids, num_rows, backend):
    expected = unique_ids_reference(ids, num_rows)
    segments = unique_segments(ids, num_rows, backend=backend)
    for actual in (unique_ids(ids, num_rows, backend=backend), segments[:2]):
        assert [x.dtype for x in actual] == [torch.int64] * 2
        assert [x.tolist() for x in actual] == [x.tolist() for x in expected]
    assert segments.order.tolist() == expected[1].argsort(stable=True).tolist()
    assert segments.starts.diff().tolist() == torch.bincount(expected[1], minlength=len(expected[0])).tolist()
    assert segments.starts[0] == 0


@settings(max_examples=50, deadline=None)
@given(ids=st.lists(st.integers(0, 50), max_size=60), num_rows=st.sampled_from(ROWS))
def test_small_ids_equal_the_reference(ids, num_rows):
    for backend in ("auto", "torch", "reference"):
        assert_equals_reference(torch.tensor(ids, dtype=torch.int64), num_rows, backend)


@settings(max_examples=50, deadline=None)
@given(data=st.data(), num_rows=st.sampled_from([1, *ROWS]))
def test_any_ids_equal_the_reference(data, num_rows):
    ids = data.draw(st.lists(st.integers(0, num_rows - 1), max_size=60))
    for backend in ("auto", "torch"):
        assert_equals_reference(torch.tensor(ids * 2, dtype=torch.int64), num_rows, backend)


@pytest.mark.parametrize("num_rows", [1, 63, 64, 65, 129, 10_000, 10**7, 2**40, 2**62])
@pytest.mark.parametrize("count", [0, 1, 2, 63, 64, 65, 3000])
def test_equals_the_reference_at_edges(count, num_rows, backend):
    ids = torch.randint(0, num_rows, (count,), generator=torch.Generator().manual_seed(count))
    ids[:1], ids[1:2] = num_rows - 1, 0
    assert_equals_reference(ids, num_rows, backend)


def test_keeps_the_shape(backend):
    ids = torch.tensor([[3, 1], [3, 9]])
    for given_ids in (ids, ids.int(), ids.T.contiguous().T, torch.stack([ids, ids], dim=2)[..., 0]):
        unique, inverse = unique_ids(given_ids, 10, backend=backend)
        assert unique.tolist() == [1, 3, 9]
        assert inverse.tolist() == [[1, 0], [1, 2]]
        assert unique.dtype == inverse.dtype == torch.int64
    assert unique_ids(ids[0, 0], 10, backend=backend)[1].shape == ()
    strided = torch.tensor([5, 0, 2, 0, 5])[::2]
    assert unique_segments(strided, 6, backend=backend).order.tolist() == [1, 0, 2]


@pytest.mark.parametrize("num_rows", [10, 10**9, 2**62])
@pytest.mark.parametrize("wrong", [-3, -(2**63), 10, 2**62, 2**63 - 1])
def test_the_first_id_outside_the_table_is_named(wrong, num_rows, backend):
    if 0 <= wrong < num_rows:
        return
    for function in (unique_ids, unique_segments):
        with pytest.raises(
            IndexError, match=rf"{function.__name__}: id {wrong} is outside the table's rows 0\.\.{num_rows - 1}"
        ):
            function(torch.tensor([4, wrong, -1]), num_rows, backend=backend)
        with pytest.raises(IndexError, match="id 0 is outside"):
            function(torch.tensor([0]), 0, backend=backend)
    with pytest.raises(IndexError, match=f"id {wrong} is outside"):
        unique_ids(torch.tensor([wrong]), num_rows, backend="reference")


def test_wrong_arguments_are_refused():
    with pytest.raises(ValueError, match=r"ids are int64 or int32; got torch\.float32"):
        unique_ids(torch.zeros(3), 10)
    with pytest.raises(ValueError, match=r"ids is int64 \[N\]; got \[2, 2\]"):
        unique_segments(torch.zeros(2, 2, dtype=torch.int64), 10)
    with pytest.raises(ValueError, match="num_rows must not be negative; got -1"):
        unique_ids(torch.zeros(0, dtype=torch.int64), -1)
    with pytest.raises(ConfigurationError, match="backend must be one of"):
        unique_ids(torch.zeros(0, dtype=torch.int64), 1, backend="c++")


def test_opcheck(backend):
    ids = torch.tensor([4, 1, 4, 0, 3])
    for num_rows in (5, 10**6):
        torch.library.opcheck(_unique_ids, (ids, num_rows, backend))
        torch.library.opcheck(_unique_segments, (ids, num_rows, backend))


def test_threads_do_not_change_a_bit(backend):
    ids = torch.randint(0, 50_000, (200_000,), generator=torch.Generator().manual_seed(0))
    threads, results = torch.get_num_threads(), []
    try:
        for count in (1, 2, 3):
            torch.set_num_threads(count)
            results.append(unique_segments(ids, 50_000, backend=backend))
    finally:
        torch.set_num_threads(threads)
    for other in results[1:]:
        assert all(torch.equal(a, b) for a, b in zip(results[0], other, strict=True))


def runs_beside(library):
    """Whether another Python thread does anything while the kernel runs: its steps are counted, not timed."""
    steps, stop, during = [0], threading.Event(), []
    ids = torch.randint(0, 10**7, (1_000_000,))

    def watched(problem):
        before = steps[0]
        found = library.turbogr_unique(ctypes.byref(problem))
        during.append(steps[0] - before)
        return found

    def count():
        while not stop.is_set():
            steps[0] += 1
            time.sleep(0)  # hands the interpreter back

    library.turbogr_unique.restype = ctypes.c_int64
    interval, other = sys.getswitchinterval(), threading.Thread(target=count)
    # No thread is interrupted: another one runs only where this one gives up the interpreter.
    sys.setswitchinterval(1000)
    try:
        other.start()
        for _ in range(50):
            unique_native.unique(SimpleNamespace(turbogr_unique=watched), ids, 10**7, False)
            if during[-1]:
                return True
        return False
    finally:
        stop.set()
        other.join()
        sys.setswitchinterval(interval)


def test_other_python_threads_run_during_a_call():
    library = KERNEL.library()
    if library is None:
        pytest.skip(KERNEL.failure())
    assert runs_beside(ctypes.CDLL(library._name))
    assert not runs_beside(ctypes.PyDLL(library._name)), "negative control: a call that holds the interpreter is noticed"


@pytest.mark.slow
def test_no_access_outside_and_no_undefined_behaviour(tmp_path):
    assert_clean("unique", "unique_sanitizer.cpp", tmp_path)


def test_every_operator_is_described():
    names = [operator.name for operator in describe()]
    assert names == sorted(names)
    assert {"turbogr::jagged_hstu_attention", "turbogr::jagged_softmax_attention", "turbogr::negative_logits"} <= set(names)
    assert {"turbogr::unique_ids", "turbogr::unique_segments"} <= set(names)
