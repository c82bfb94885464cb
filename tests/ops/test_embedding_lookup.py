from __future__ import annotations

from functools import partial

import pytest
import torch
from _memory import allocations
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.ops.jagged_cases import max_errors
from tests.ops.sanitizer import assert_clean
from turbogr.errors import ConfigurationError, MissingDependencyError
from turbogr.ops import embedding_lookup
from turbogr.ops.embedding_lookup import (
    KERNEL,
    _lookup,
    _lookup_backward,
    _lookup_out,
    jagged_embedding_lookup,
    jagged_embedding_lookup_reference,
    sum_by_row,
)
from turbogr.ops.native import Kernel
from turbogr.ops.registry import describe

TOLERANCES = {"torch": (torch.float64, 1e-12), "cpp": (torch.float32, 1e-5)}
"""By back end: the dtype it is checked in, and the largest error relative to the largest value."""

CASES = {
    "no ids": ([5, 3], [0, 0]),
    "a table without ids, one without rows": ([5, 0, 3], [4, 0, 0]),
    "one id": ([1], [1]),
    "blocks": ([63, 64, 65], [65, 1, 64]),
    "one hot row": ([1, 4], [9001, 3]),
    "one long, many short": ([2000, *[3] * 9], [5000, *range(9)]),
}
"""Rows of each table, and how many ids ask for them."""


@pytest.fixture(params=TOLERANCES)
def backend(request):
    if request.param == "cpp" and KERNEL.library() is None:
        pytest.skip(KERNEL.failure())
    return request.param


def inputs_of(rows, counts, width=8, dtype=torch.float64, seed=0):
    g = torch.Generator().manual_seed(seed)
    tables = [torch.randn(v, width, generator=g, dtype=torch.float64).to(dtype).requires_grad_() for v in rows]
    ids = torch.cat([torch.randint(0, max(v, 1), (n,), generator=g) for v, n in zip(rows, counts, strict=True)])
    return tables, ids, torch.tensor([0, *counts]).cumsum(0)


def pair(ids, splits, backend="auto"):
    operator = partial(jagged_embedding_lookup, ids=ids, splits=splits, backend=backend)
    return (lambda *t: operator(t)), (lambda *t: jagged_embedding_lookup_reference(t, ids, splits))


@pytest.mark.parametrize("width", [1, 7, 16, 50, 128])
@pytest.mark.parametrize(("rows", "counts"), CASES.values(), ids=CASES.keys())
def test_equals_the_reference_with_all_gradients(rows, counts, width, backend):
    dtype, tolerance = TOLERANCES[backend]
    tables, ids, splits = inputs_of(rows, counts, width, dtype)
    assert max(max_errors(*pair(ids, splits, backend), tables, relative=True)) < tolerance


def test_a_wrong_row_is_noticed(backend):
    """Negative control of the test above."""
    dtype, tolerance = TOLERANCES[backend]
    tables, ids, splits = inputs_of([50, 5], [20, 9], dtype=dtype)
    moved = ids.clone()
    moved[3] = (moved[3] + 1) % 50
    operator, _ = pair(ids, splits, backend)
    errors = max_errors(operator, pair(moved, splits)[1], tables, relative=True)
    assert min(errors[:2]) > tolerance
    assert errors[2] < tolerance


@settings(max_examples=40, deadline=None)
@given(
    sizes=st.lists(st.tuples(st.integers(1, 40), st.integers(0, 90)), min_size=1, max_size=5),
    width=st.integers(1, 40),
    seed=st.integers(0, 99),
)
def test_any_shape_equals_the_reference(sizes, width, seed):
    rows, counts = zip(*sizes, strict=True)
    for backend, (dtype, tolerance) in TOLERANCES.items():
        if backend == "cpp" and KERNEL.library() is None:
            continue
        tables, ids, splits = inputs_of(rows, counts, width, dtype, seed)
        assert max(max_errors(*pair(ids, splits, backend), tables, relative=True)) < 10 * tolerance


def test_strided_tables_ids_gradients_and_outputs(backend):
    dtype, _ = TOLERANCES[backend]
    g = torch.Generator().manual_seed(0)
    wide = torch.randn(9, 40, generator=g, dtype=dtype)
    ids = torch.randint(0, 9, (60,), generator=g)[::2]
    for view in (wide[:, 3:20], wide[::2, :17], wide[:, ::2], torch.randn(17, 9, generator=g, dtype=dtype).T):
        table = view.detach().requires_grad_()
        picked = ids % len(table)
        operator, reference = (lambda t, f=f, i=picked: f(t) for f in pair(picked, None, backend))
        assert max(max_errors(operator, reference, [table], relative=True)) < TOLERANCES[backend][1]
        # The gradient of a sum is one number, expanded; that of a transposed product has columns side by side.
        for weigh in (torch.sum, lambda x: (x.T.contiguous() * 2).sum()):
            actual, expected = (torch.autograd.grad(weigh(f(table)), table)[0] for f in (operator, reference))
            torch.testing.assert_close(actual, expected)
        for out in (
            torch.empty(30, 90, dtype=dtype)[:, 3 : 3 + table.shape[1]],
            torch.empty(table.shape[1], 30, dtype=dtype).T,
        ):
            result = jagged_embedding_lookup([table.detach()], picked, out=out, backend=backend)
            assert result is out
            assert torch.equal(out, table[picked])


def test_an_output_is_written_again(backend):
    dtype, _ = TOLERANCES[backend]
    tables, ids, splits = inputs_of([50, 5], [20, 9], 16, dtype)
    # Large enough to be written past the caches, where the kernel does that.
    many = ids.repeat(6000)[splits.new_tensor(range(29)).repeat_interleave(6000) + torch.arange(6000).repeat(29) * 29]
    for chosen, edges in ((ids, splits), (many, splits * 6000)):
        out = torch.full((len(chosen), 16), torch.nan, dtype=dtype)
        with torch.no_grad():
            expected = jagged_embedding_lookup(tables, chosen, edges, backend=backend)
            assert jagged_embedding_lookup(tables, chosen, edges, out=out, backend=backend) is out
            assert torch.equal(out, expected)
            first = tables[0][chosen[: edges[1]]]
            assert torch.equal(out, torch.cat([first, tables[1][chosen[edges[1] :]]]))
            jagged_embedding_lookup(tables, chosen, edges, out=out.zero_(), backend="reference")
            assert torch.equal(out, expected)
    with pytest.raises(ValueError, match="out cannot be given where a gradient is wanted"):
        jagged_embedding_lookup(tables, ids, splits, out=torch.empty(29, 16, dtype=dtype), backend=backend)
    with pytest.raises(ValueError, match=r"out is torch\.float\d\d \[29, 16\]"):
        jagged_embedding_lookup(tables, ids, splits, out=torch.empty(28, 16, dtype=dtype), backend=backend)
    assert (
        allocations(partial(jagged_embedding_lookup, [t.detach() for t in tables], many, splits * 6000, backend=backend))[0]
        > 1e6
    )
    if backend == "cpp":
        with torch.no_grad(), pytest.raises(RuntimeError, match="the profiler saw no allocation"):
            allocations(partial(jagged_embedding_lookup, tables, many, splits * 6000, out=out, backend=backend))


def test_an_output_inside_a_table_is_refused(backend):
    memory = torch.randn(12, 4, dtype=TOLERANCES[backend][0])
    for chosen in (backend, "reference"):
        with pytest.raises(ValueError, match="lookup: out shares its storage with a table"):
            jagged_embedding_lookup(
                [memory[6:], memory[:6]], torch.tensor([5, 4]), torch.tensor([0, 1, 2]), out=memory[:2], backend=chosen
            )


def test_other_devices_are_refused():
    table, ids = torch.zeros(5, 4), torch.tensor([1, 2])
    with pytest.raises(ValueError, match="lookup: ids is on meta, but tables on cpu"):
        jagged_embedding_lookup([table], ids.to("meta"))
    with pytest.raises(ValueError, match="index is on meta, but gradient on cpu"):
        sum_by_row(table[:2], ids.to("meta"), 5)


def test_narrow_integers(backend):
    dtype, _ = TOLERANCES[backend]
    tables, ids, splits = inputs_of([50, 5], [20, 9], dtype=dtype)
    expected = jagged_embedding_lookup(tables, ids, splits, backend=backend)
    assert torch.equal(jagged_embedding_lookup(tables, ids.int(), splits.int(), backend=backend), expected)


def test_only_tables_that_ask_for_a_gradient_get_one(backend):
    dtype, _ = TOLERANCES[backend]
    tables, ids, splits = inputs_of([50, 5], [20, 9], dtype=dtype)
    tables[0].requires_grad_(False)
    jagged_embedding_lookup(tables, ids, splits, backend=backend).sum().backward()
    assert tables[0].grad is None
    assert tables[1].grad.sum() == 9 * 8


@pytest.mark.parametrize("wrong", [-1, -(2**63), 5, 2**62])
def test_ids_outside_their_table_are_named(wrong, backend):
    tables, ids, splits = inputs_of([50, 5], [20, 9], dtype=TOLERANCES[backend][0])
    ids[23], ids[26] = wrong, 50
    with torch.no_grad(), pytest.raises(IndexError, match=rf"lookup: table 1: id {wrong} is outside the table's rows 0\.\.4"):
        jagged_embedding_lookup(tables, ids, splits, backend=backend)
    with pytest.raises(IndexError, match=f"table 1: id {wrong} "):
        jagged_embedding_lookup(tables, ids, splits, backend="reference")
    with pytest.raises(IndexError, match=f"table 1: id {wrong} "):
        _lookup_backward(torch.zeros(29, 8, dtype=tables[0].dtype), ids, splits, [50, 5], [True, True], backend)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"tables": []}, "there is no table"),
        ({"tables": [torch.zeros(3, 2), torch.zeros(3, 4)]}, r"tables are \[V, D\] of one dtype, device and D"),
        ({"tables": [torch.zeros(3, 2), torch.zeros(3, 2).double()]}, "of one dtype"),
        ({"tables": [torch.zeros(3)] * 2}, r"tables are \[V, D\]"),
        ({"tables": [torch.zeros(3, 2).long()] * 2}, "of a floating dtype"),
        ({"ids": torch.zeros(2, 2).long()}, r"ids is int64 or int32 \[N\]"),
        ({"ids": torch.zeros(4)}, "ids is int64 or int32"),
        ({"splits": None}, "splits can be left out for a single table only; there are 2"),
        ({"splits": torch.tensor([0, 4])}, r"splits is int64 or int32 \[3\]"),
        ({"splits": torch.tensor([0.0, 2, 4])}, r"splits is int64 or int32 \[3\], one more than tables; got torch.float32"),
        ({"splits": torch.tensor([0, 2, 3])}, r"splits rise from 0 to 4 for 2 tables; got \[0, 2, 3\]"),
        ({"splits": torch.tensor([0, 5, 4])}, "splits rise from 0 to 4"),
        ({"splits": torch.tensor([1, 2, 4])}, "splits rise from 0 to 4"),
        ({"splits": torch.tensor([0, -1, 4])}, "splits rise from 0 to 4"),
    ],
)
def test_wrong_arguments_are_refused(change, message, backend):
    arguments = {"tables": [torch.zeros(3, 2)] * 2, "ids": torch.tensor([0, 1, 2, 0]), "splits": torch.tensor([0, 2, 4])}
    with pytest.raises(ValueError, match=message):
        jagged_embedding_lookup(**{**arguments, **change}, backend=backend)


def test_back_ends_that_cannot_be_had_are_refused(monkeypatch):
    tables, ids, splits = inputs_of([5], [3])
    with pytest.raises(ConfigurationError, match="backend must be one of"):
        jagged_embedding_lookup(tables, ids, splits, backend="c")
    with pytest.raises(ConfigurationError, match=r"backend cpp computes float32 on the CPU, got torch\.float64"):
        jagged_embedding_lookup(tables, ids, splits, backend="cpp")
    monkeypatch.setattr(embedding_lookup, "KERNEL", Kernel("absent"))
    floats = [table.float() for table in tables]
    with pytest.raises(MissingDependencyError, match="backend cpp cannot be used"):
        jagged_embedding_lookup(floats, ids, splits, backend="cpp")
    assert torch.equal(jagged_embedding_lookup(floats, ids, splits), floats[0][ids])
    assert "turbogr::jagged_embedding_lookup" in [operator.name for operator in describe()]


def test_opcheck(backend):
    dtype, _ = TOLERANCES[backend]
    tables, ids, splits = inputs_of([5, 3, 2], [4, 0, 6], dtype=dtype)
    tables[1].requires_grad_(False)
    torch.library.opcheck(_lookup, (tables, ids, splits, backend))
    torch.library.opcheck(_lookup, (tables[:1], ids[:4], None, backend))
    torch.library.opcheck(_lookup_out, ([t.detach() for t in tables], ids, splits, torch.zeros(10, 8, dtype=dtype), backend))
    gradient = torch.randn(10, 8, dtype=dtype)
    torch.library.opcheck(_lookup_backward, (gradient, ids, splits, [5, 3, 2], [True, False, True], backend))


def test_gradcheck():
    tables, ids, splits = inputs_of([5, 3], [6, 4], 3)
    assert torch.autograd.gradcheck(pair(ids, splits)[0], tables)


def test_threads_do_not_change_a_bit(backend):
    """Nor does anything else: `sum_by_row` is what `index_add_` is not with several threads."""
    tables, ids, splits = inputs_of([300, 4000], [50_000, 9_000], 24, torch.float32)
    ids[:50_000:3] = 7
    operator, _ = pair(ids, splits, backend)
    gradient = torch.randn(59_000, 24, generator=torch.Generator().manual_seed(1))
    threads, results = torch.get_num_threads(), []
    try:
        for count in (1, 2, 3, 2):
            torch.set_num_threads(count)
            out = operator(*tables)
            by_row = sum_by_row(gradient[:50_000], ids[:50_000], 300, backend=backend)
            results.append([out, *torch.autograd.grad(out, tables, gradient), by_row])
    finally:
        torch.set_num_threads(threads)
    for other in results[1:]:
        assert all(torch.equal(a, b) for a, b in zip(results[0], other, strict=True))
    assert torch.equal(results[0][1], results[0][3])


def test_more_floats_than_32_bits_count(backend):
    """A table of more than 2^31 elements, mostly never touched: its addresses are computed in 64 bits."""
    rows = (1 << 31) // 16 + 10
    try:
        table = torch.empty(rows, 16)  # 8 GiB of address space, of which two pages become memory
    except RuntimeError as error:
        pytest.skip(f"this machine grants no 8 GiB of address space: {error}")
    table[-1], table[0] = 3.0, 5.0
    ids = torch.tensor([rows - 1, 0, rows - 1])
    assert jagged_embedding_lookup([table], ids, backend="auto" if backend == "cpp" else "torch")[:, 0].tolist() == [
        3.0,
        5.0,
        3.0,
    ]


@pytest.mark.slow
@pytest.mark.parametrize("flags", ["-mno-avx512f", "-mno-avx"])
def test_narrower_vectors(flags, monkeypatch, tmp_path):
    """The same source for processors with AVX2 and with four lanes only."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setenv("CXX", f"g++ {flags}")
    kernel = Kernel("embedding")
    if kernel.library() is None:
        pytest.skip(f"g++ {flags} does not build here: {kernel.failure()}")
    monkeypatch.setattr(embedding_lookup, "KERNEL", kernel)
    for width in (1, 7, 16, 50):
        for rows, counts in CASES.values():
            test_equals_the_reference_with_all_gradients(rows, counts, width, "cpp")
    test_an_output_is_written_again("cpp")


@pytest.mark.slow
def test_no_access_outside_and_no_undefined_behaviour(tmp_path):
    assert_clean("embedding", "embedding_sanitizer.cpp", tmp_path)
