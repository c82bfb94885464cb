from __future__ import annotations

import dataclasses

import pytest
import torch
from _memory import allocations
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.ops.jagged_cases import far_apart
from turbogr.errors import ConfigurationError, MissingDependencyError
from turbogr.ops import row_update as module
from turbogr.ops.native import Kernel
from turbogr.ops.registry import describe
from turbogr.ops.row_update import _KINDS, KERNEL, RowRule, _row_update, jagged_row_update, row_update, row_update_reference

TOLERANCES = {"torch": (torch.float64, 1e-12), "cpp": (torch.float32, 2e-5)}
"""By back end: the dtype it is checked in, and the largest error relative to the largest value."""

RULES = [RowRule(kind, lr=0.3, eps=1e-6, betas=(0.8, 0.95), weight_decay=0.1) for kind in _KINDS]


@pytest.fixture(params=TOLERANCES)
def backend(request):
    if request.param == "cpp" and KERNEL.library() is None:
        pytest.skip(KERNEL.failure())
    return request.param


@pytest.fixture(params=RULES, ids=_KINDS)
def rule(request):
    return request.param


def table_of(rule, rows, width, dtype=torch.float64, seed=0):
    """A table and its state after some steps."""
    g = torch.Generator().manual_seed(seed)
    weight = torch.randn(rows, width, generator=g, dtype=torch.float64).to(dtype)
    state = [torch.rand(shape, generator=g, dtype=torch.float64).to(dtype) for shape in rule.state_shapes(rows, width)]
    return weight, [*state, torch.tensor(3)] if rule.kind == "lazy_adam" else state


def batch_of(rows, count, width, dtype=torch.float64, seed=1):
    g = torch.Generator().manual_seed(seed)
    return torch.randint(0, rows, (count,), generator=g), torch.randn(count, width, generator=g, dtype=torch.float64).to(dtype)


def floats(weight, state):
    return [weight, *(x for x in state if x.dim())]


def errors_of(actual, expected):
    assert all(a.isfinite().all() for a in actual)
    return [float((a.double() - b).abs().max() / b.abs().max()) for a, b in zip(actual, expected, strict=True) if b.numel()]


@pytest.mark.parametrize("width", [1, 7, 16, 50, 128])
@pytest.mark.parametrize("count", [0, 1, 2, 63, 64, 65])
def test_distinct_rows_equal_the_reference(rule, count, width, backend):
    dtype, tolerance = TOLERANCES[backend]
    weight, state = table_of(rule, 70, width, dtype)
    rows = torch.randperm(70, generator=torch.Generator().manual_seed(2))[:count]
    _, gradient = batch_of(70, count, width, dtype)
    expected = row_update_reference(rule, weight, state, rows, gradient)
    untouched = torch.ones(70, dtype=torch.bool).index_fill(0, rows, False)
    before = [x[untouched].clone() for x in floats(weight, state)]
    row_update(rule, weight, state, rows, gradient, backend=backend)
    assert max(errors_of(floats(weight, state), expected)) < tolerance
    assert all(torch.equal(x[untouched], y) for x, y in zip(floats(weight, state), before, strict=True))


@pytest.mark.parametrize("width", [1, 7, 16, 50])
@pytest.mark.parametrize("counts", [[0], [1], [300], [9001, 0, 63], [5, 64, 3000]])
def test_occurrences_of_several_tables_equal_the_reference(rule, counts, width, backend):
    dtype, tolerance = TOLERANCES[backend]
    sizes = [40, 1, 3000][: len(counts)]
    pairs = [table_of(rule, rows, width, dtype, seed) for seed, rows in enumerate(sizes)]
    batches = [batch_of(rows, count, width, dtype) for rows, count in zip(sizes, counts, strict=True)]
    expected = [row_update_reference(rule, *pair, *batch) for pair, batch in zip(pairs, batches, strict=True)]
    ids, gradient = (torch.cat(x) for x in zip(*batches, strict=True))
    splits = torch.tensor([0, *counts]).cumsum(0)
    jagged_row_update(rule, *zip(*pairs, strict=True), ids, gradient, splits, backend=backend)
    for pair, wanted in zip(pairs, expected, strict=True):
        assert max(errors_of(floats(*pair), wanted)) < 5 * tolerance


@pytest.mark.parametrize("change", [{"lr": 0.301}, {"eps": 2e-3}, {"betas": (0.8, 0.951)}, {"weight_decay": 0.101}])
def test_a_wrong_option_is_noticed(change, backend):
    """Negative control: each option moves what it should."""
    dtype, tolerance = TOLERANCES[backend]
    for rule in RULES:
        weight, state = table_of(rule, 20, 8, dtype)
        ids, gradient = batch_of(20, 30, 8, dtype)
        expected = row_update_reference(dataclasses.replace(rule, **change), weight, state, ids, gradient)
        jagged_row_update(rule, [weight], [state], ids, gradient, backend=backend)
        uses = "lr" in change or rule.kind == "lazy_adam" or ("eps" in change and rule.kind != "sgd")
        assert (errors_of(floats(weight, state), expected)[0] > tolerance) == uses


@settings(max_examples=40, deadline=None)
@given(
    kind=st.sampled_from(_KINDS),
    rows=st.integers(1, 40),
    count=st.integers(0, 90),
    width=st.integers(1, 40),
    seed=st.integers(0, 99),
)
def test_any_shape_equals_the_reference(kind, rows, count, width, seed):
    rule = RowRule(kind, lr=0.1)
    for backend, (dtype, tolerance) in TOLERANCES.items():
        if backend == "cpp" and KERNEL.library() is None:
            continue
        weight, state = table_of(rule, rows, width, dtype, seed)
        ids, gradient = batch_of(rows, count, width, dtype, seed)
        expected = row_update_reference(rule, weight, state, ids, gradient)
        jagged_row_update(rule, [weight], [state], ids, gradient, backend=backend)
        assert max(errors_of(floats(weight, state), expected)) < 20 * tolerance


def test_the_reference_is_a_back_end(rule, backend):
    dtype, tolerance = TOLERANCES[backend]
    results = []
    for chosen in (backend, "reference"):
        weight, state = table_of(rule, 20, 8, dtype)
        ids, gradient = batch_of(20, 30, 8, dtype)
        jagged_row_update(rule, [weight], [state], ids, gradient, backend=chosen)
        row_update(rule, weight, state, torch.tensor([3, 0], dtype=torch.int32), gradient[:2], backend=chosen)
        results.append(floats(weight, state))
    assert max(errors_of(*results)) < tolerance


def test_strided_tables_states_and_gradients(rule, backend):
    dtype, tolerance = TOLERANCES[backend]
    ids, gradient = batch_of(20, 30, 8, dtype)
    dense, dense_state = table_of(rule, 20, 8, dtype)
    expected = row_update_reference(rule, dense, dense_state, ids, gradient)
    padded = torch.nn.functional.pad
    for view in (lambda x: padded(x, (3, 2))[:, 3:-2], lambda x: x.T.contiguous().T, lambda x: x.repeat_interleave(2, 0)[::2]):
        weight, state = view(dense.clone()), [view(x.clone()) if x.dim() else x for x in dense_state]
        jagged_row_update(rule, [weight], [state], ids, view(gradient), backend=backend)
        assert max(errors_of(floats(weight, state), expected)) < tolerance
    weight, state = table_of(rule, 20, 8, dtype)
    constant = torch.ones((), dtype=dtype).expand(30, 8)
    expected = row_update_reference(rule, weight, state, ids, constant)
    jagged_row_update(rule, [weight], [state], ids, constant, backend=backend)
    assert max(errors_of(floats(weight, state), expected)) < tolerance


def test_threads_do_not_change_a_bit(rule, backend):
    threads, results = torch.get_num_threads(), []
    ids, gradient = batch_of(4000, 60_000, 24, torch.float32)
    ids[::3] = 7
    try:
        for count in (1, 2, 3, 2):
            torch.set_num_threads(count)
            weight, state = table_of(rule, 4000, 24, torch.float32)
            jagged_row_update(rule, [weight], [state], ids, gradient, backend=backend)
            row_update(rule, weight, state, torch.arange(0, 4000, 2).flip(0), gradient[:2000], backend=backend)
            results.append(floats(weight, state))
    finally:
        torch.set_num_threads(threads)
    for other in results[1:]:
        assert all(torch.equal(a, b) for a, b in zip(results[0], other, strict=True))


def test_a_repeated_row_is_updated_once_with_the_sum(rule, backend):
    dtype, tolerance = TOLERANCES[backend]
    (once, once_state), (twice, twice_state) = (table_of(rule, 20, 8, dtype) for _ in range(2))
    _, gradient = batch_of(20, 2, 8, dtype)
    jagged_row_update(rule, [twice], [twice_state], torch.tensor([4, 4]), gradient, backend=backend)
    row_update(rule, once, once_state, torch.tensor([4]), gradient.sum(0, keepdim=True), backend=backend)
    assert max(errors_of(floats(twice, twice_state), [x.double() for x in floats(once, once_state)])) < tolerance


def test_touches_nothing_of_the_size_of_the_table(rule, backend):
    dtype, _ = TOLERANCES[backend]
    weight, state = table_of(rule, 100_000, 16, dtype)
    ids, gradient = batch_of(100_000, 64, 16, dtype)
    largest, peak = allocations(lambda: jagged_row_update(rule, [weight], [state], ids, gradient, backend=backend))
    assert largest <= peak < 100_000


def test_no_gradient_is_recorded(rule, backend):
    weight, state = table_of(rule, 20, 8, TOLERANCES[backend][0])
    ids, gradient = batch_of(20, 5, 8, weight.dtype)
    weight.requires_grad_()
    jagged_row_update(rule, [weight], [state], ids, gradient.requires_grad_(), backend=backend)
    assert weight.grad_fn is None
    assert all(not x.requires_grad for x in state)


@pytest.mark.parametrize("wrong", [-1, -(2**63), 20, 2**62])
def test_ids_outside_their_table_are_named_and_nothing_is_changed(rule, wrong, backend):
    dtype, _ = TOLERANCES[backend]
    pairs = [table_of(rule, 20, 8, dtype) for _ in range(2)]
    ids, gradient = batch_of(20, 30, 8, dtype)
    ids[27], splits = wrong, torch.tensor([0, 15, 30])
    for chosen in (backend, "reference"):
        with pytest.raises(IndexError, match=rf"jagged_row_update: table 1: id {wrong} is outside the table's rows 0\.\.19"):
            jagged_row_update(rule, *zip(*pairs, strict=True), ids, gradient, splits, backend=chosen)
        with pytest.raises(IndexError, match=f"row_update: table 0: id {wrong} is outside"):
            row_update(rule, *pairs[0], torch.tensor([3, wrong]), gradient[:2], backend=chosen)
    for pair in pairs:
        assert all(torch.equal(a, b) for a, b in zip(floats(*pair), floats(*table_of(rule, 20, 8, dtype)), strict=True))


@pytest.mark.parametrize("rule", RULES[:3], ids=_KINDS[:3])
def test_addresses_beyond_32_bits(rule, backend):
    dtype, tolerance = torch.float32, TOLERANCES["cpp"][1]
    weight, state = table_of(rule, 3, 16, dtype)
    rows, (_, gradient) = torch.tensor([2, 0, 1]), batch_of(3, 3, 16, dtype)
    expected = row_update_reference(rule, weight, state, rows, gradient)
    *apart, gradient = (far_apart(x[:, None])[:, 0] for x in (weight, *state, gradient))
    row_update(rule, apart[0], apart[1:], rows, gradient, backend=backend)
    assert max(errors_of(apart, expected)) < tolerance


def test_other_devices_are_refused():
    rule = RowRule("adagrad", lr=0.1)
    given = {"weight": torch.zeros(5, 4), "rows": torch.tensor([1, 2]), "gradient": torch.zeros(2, 4)}
    state = torch.zeros(5, 4)
    for meta, name in (("rows", "ids"), ("gradient", "gradient")):
        with pytest.raises(ValueError, match=f"turbogr::row_update: {name} is on meta, but tables on cpu"):
            row_update(rule, state=[state], **{**given, meta: given[meta].to("meta")})
    with pytest.raises(ValueError, match="turbogr::row_update: state is on meta, but tables on cpu"):
        row_update(rule, state=[state.to("meta")], **given)


def test_wrong_arguments_are_refused():
    rule = RowRule("row_wise_adagrad", lr=0.1)
    weight, (state,) = torch.zeros(5, 4), [torch.zeros(5, 1)]
    rows, gradient = torch.tensor([1, 2]), torch.zeros(2, 4)
    with pytest.raises(ValueError, match=r"gradient is torch\.float32 \[2, 4\]; got torch\.float32 \[3, 4\]"):
        row_update(rule, weight, [state], rows, torch.zeros(3, 4))
    with pytest.raises(ValueError, match=r"gradient is torch\.float32"):
        row_update(rule, weight, [state], rows, gradient.double())
    with pytest.raises(ValueError, match="the state of row_wise_adagrad is"):
        row_update(rule, weight, [weight], rows, gradient)
    with pytest.raises(ValueError, match="the state of lazy_adam is"):
        row_update(RowRule("lazy_adam", 0.1), weight, [weight, weight], rows, gradient)
    with pytest.raises(ValueError, match="there are 1 tables and 0 states"):
        jagged_row_update(rule, [weight], [], rows, gradient)
    with pytest.raises(ValueError, match="kind is one of sgd, adagrad, row_wise_adagrad, lazy_adam; got 'adam'"):
        row_update(RowRule("adam", 0.1), weight, [], rows, gradient)
    with pytest.raises(ValueError, match="ids is int64 or int32"):
        row_update(rule, weight, [state], rows.double(), gradient)
    with pytest.raises(ValueError, match="splits rise from 0 to 2"):
        jagged_row_update(rule, [weight], [[state]], rows, gradient, torch.tensor([0, 1]))


def test_back_ends_that_cannot_be_had_are_refused(monkeypatch):
    rule = RowRule("sgd", lr=0.1)
    weight, rows, gradient = torch.zeros(5, 4), torch.tensor([1, 2]), torch.ones(2, 4)
    with pytest.raises(ConfigurationError, match="backend must be one of"):
        row_update(rule, weight, [], rows, gradient, backend="c")
    with pytest.raises(ConfigurationError, match=r"backend cpp computes float32 on the CPU, got torch\.float64"):
        jagged_row_update(rule, [weight.double()], [[]], rows, gradient.double(), backend="cpp")
    monkeypatch.setattr(module, "KERNEL", Kernel("absent"))
    with pytest.raises(MissingDependencyError, match="backend cpp cannot be used"):
        row_update(rule, weight, [], rows, gradient, backend="cpp")
    assert not weight.any()
    row_update(rule, weight, [], rows, gradient)
    assert weight[1:3].allclose(torch.tensor(-0.1))
    assert "turbogr::row_update" in [operator.name for operator in describe()]


def test_opcheck(rule, backend):
    weight, state = table_of(rule, 20, 8, TOLERANCES[backend][0])
    first, second = [*(x for x in state if x.dim()), None, None][:2]
    steps = state[-1] if rule.kind == "lazy_adam" else None
    options = (_KINDS.index(rule.kind), 0.1, 1e-8, 0.9, 0.98, 0.1, backend)
    rows, gradient = torch.tensor([3, 9]), torch.randn(5, 8, dtype=weight.dtype)
    torch.library.opcheck(_row_update, (weight, first, second, steps, rows, gradient[:2], None, None, *options))
    segments = torch.tensor([4, 2, 0, 1, 3]), torch.tensor([0, 3, 5])
    torch.library.opcheck(_row_update, (weight, first, second, steps, rows, gradient, *segments, *options))


@pytest.mark.slow
@pytest.mark.parametrize("flags", ["-mno-avx512f", "-mno-avx"])
def test_narrower_vectors(flags, monkeypatch, tmp_path):
    """The same source for processors with AVX2 and with four lanes only."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setenv("CXX", f"g++ {flags}")
    kernel = Kernel("embedding")
    if kernel.library() is None:
        pytest.skip(f"g++ {flags} does not build here: {kernel.failure()}")
    monkeypatch.setattr(module, "KERNEL", kernel)
    for rule in RULES:
        for width in (1, 7, 16, 50):
            test_distinct_rows_equal_the_reference(rule, 65, width, "cpp")
            test_occurrences_of_several_tables_equal_the_reference(rule, [5, 64, 3000], width, "cpp")
