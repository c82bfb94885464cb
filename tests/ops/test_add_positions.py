"""`jagged_add_positions`: back ends against the float64 formula, forward and both gradients."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch._subclasses import FakeTensorMode
from torch.library import opcheck
from torch.nn import functional as F

from tests.ops.jagged_cases import BACKEND_DTYPES, LENGTHS, offsets_of
from tests.ops.thread_counts import same_for_threads
from turbogr.errors import ConfigurationError
from turbogr.ops.add_positions import (
    KERNEL,
    _add_positions,
    _add_positions_backward,
    jagged_add_positions,
    jagged_add_positions_reference,
)
from turbogr.ops.dropout import dropout

TOLERANCE = {torch.float32: 1e-6, torch.float64: 1e-14, torch.bfloat16: 1e-2}


@pytest.fixture(autouse=True)
def _kernel(request):
    if "cpp" in getattr(getattr(request.node, "callspec", None), "params", {}).values() and KERNEL.library() is None:
        pytest.skip(KERNEL.failure())


def inputs_of(lengths, width=19, dtype=torch.float32, extra=3):
    g = torch.Generator().manual_seed(8)
    rows = max(lengths, default=0) + extra
    x, table = (torch.randn(n, width, generator=g, dtype=torch.float64).to(dtype) for n in (sum(lengths), rows))
    return [x.requires_grad_(), table.requires_grad_()], offsets_of(lengths)


def run(function, inputs):
    """The output and both gradients."""
    out = function(*inputs)
    incoming = torch.randn(out.shape, generator=torch.Generator().manual_seed(9), dtype=torch.float64).to(out.dtype)
    return [out, *torch.autograd.grad(out, inputs, incoming)]


def close(actual, expected, dtype=torch.float32):
    for a, b in zip(actual, expected, strict=True):
        largest = float(b.detach().abs().max()) if b.numel() else 0.0
        torch.testing.assert_close(a.double(), b.double(), rtol=0, atol=10 * TOLERANCE[dtype] * largest)


def seeded(function):
    torch.manual_seed(4)
    return function()


@pytest.mark.parametrize("p", [0.0, 0.3])
@pytest.mark.parametrize("width", [1, 16, 50])
@pytest.mark.parametrize(("backend", "dtype"), BACKEND_DTYPES)
@pytest.mark.parametrize("case", LENGTHS)
def test_equals_the_formula(case, backend, width, p, dtype):
    inputs, offsets = inputs_of(LENGTHS[case], width, dtype)
    seed = seeded(lambda: int(torch.randint(2**63 - 1, ())))
    options = {"scale": 7.0, "p": p}
    expected = run(lambda x, t: jagged_add_positions_reference(x, t, offsets, seed=seed, **options), inputs)
    actual = seeded(lambda: run(lambda x, t: jagged_add_positions(x, t, offsets, backend=backend, **options), inputs))
    assert [a.dtype for a in actual] == [dtype] * 3
    close(actual, expected, dtype)


@pytest.mark.parametrize("backend", ["cpp", "torch"])
def test_is_what_it_stands_for(backend):
    inputs, offsets = inputs_of([130, 0, 1, 64], 50)
    position = torch.cat([torch.arange(n) for n in offsets.diff().tolist()])
    expected = seeded(lambda: run(lambda x, t: dropout(x * 3.0 + F.embedding(position, t), 0.4), inputs))
    actual = seeded(lambda: run(lambda x, t: jagged_add_positions(x, t, offsets, scale=3.0, p=0.4, backend=backend), inputs))
    close(actual, expected)
    assert torch.equal(actual[0] == 0, expected[0] == 0), "the same mask"
    assert (actual[2][130:] == 0).all(), "positions that no sequence reaches"


@pytest.mark.parametrize("backend", ["cpp", "torch"])
def test_strided_inputs_and_narrow_offsets(backend):
    inputs, offsets = inputs_of([5, 9, 0, 2], 12)
    expected = run(lambda x, t: jagged_add_positions(x, t, offsets, scale=2.0, backend="torch"), inputs)

    def strided(x, table):
        wide = torch.cat([x, x], 1)[:, : x.shape[1]]
        return jagged_add_positions(wide, table.T.contiguous().T, offsets.int(), scale=2.0, backend=backend)

    close(run(strided, inputs), expected)


@settings(max_examples=40, deadline=None)
@given(lengths=st.lists(st.integers(0, 40), max_size=12), width=st.integers(1, 70), p=st.floats(0, 0.9))
def test_any_batch(lengths, width, p):
    inputs, offsets = inputs_of(lengths, width)
    close(
        *(
            seeded(lambda b=b: run(lambda x, t: jagged_add_positions(x, t, offsets, scale=1.5, p=p, backend=b), inputs))
            for b in ("auto", "torch")
        )
    )


@pytest.mark.parametrize("backend", ["cpp"])
def test_threads_do_not_change_a_bit(backend):
    inputs, offsets = inputs_of([300, 1, 500, 64, 700, 20, 900], 50)
    function = lambda x, t: jagged_add_positions(x, t, offsets, scale=2.0, p=0.2, backend=backend)  # noqa: E731
    same_for_threads(lambda: seeded(lambda: run(function, inputs)), inputs[0])


def test_only_offsets_and_a_seed_are_kept():
    inputs, offsets = inputs_of([5, 9])
    saved = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t):
        jagged_add_positions(*inputs, offsets, p=0.2)
    assert sorted(t.numel() for t in saved) == [1, 3]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_operator_is_sound(dtype):
    inputs, offsets = inputs_of([3, 0, 2], 4, dtype)
    for seed, p in ((None, 0.0), (torch.tensor(5), 0.3)):
        opcheck(_add_positions, (*inputs, offsets, seed, 2.0, p, "auto"))
        opcheck(_add_positions_backward, (inputs[0].detach(), offsets, seed, 6, 2.0, p, "auto"))
    if dtype == torch.float64:
        seed = torch.tensor(5)
        assert torch.autograd.gradcheck(lambda x, t: _add_positions(x, t, offsets, seed, 2.0, 0.3, "torch"), inputs)


def test_fake_tensors_and_a_whole_graph():
    """No value is read before the operator runs; there, wrong ones are refused as ever."""
    inputs, offsets = inputs_of([3, 0, 2], 4)
    with FakeTensorMode() as fake:
        assert jagged_add_positions(*map(fake.from_tensor, (*inputs, offsets)), p=0.3).shape == (5, 4)
    compiled = torch.compile(jagged_add_positions, backend="aot_eager", fullgraph=True)
    close(
        *(
            seeded(lambda f=f: run(lambda x, t: f(x, t, offsets, scale=2.0, p=0.3), inputs))
            for f in (compiled, jagged_add_positions)
        )
    )
    with pytest.raises(ValueError, match="offsets rise from 0 to 5"):
        compiled(*inputs, offsets + 1)


def test_impossible_inputs_are_refused():
    x, table, offsets = torch.ones(3, 4), torch.ones(2, 4), torch.tensor([0, 2, 3])
    assert jagged_add_positions(x, table, offsets).shape == (3, 4)
    for wrong, message in (
        ((x, torch.ones(2, 5), offsets), r"x is \[T, D\] and table \[P, D\]"),
        ((x.long(), table, offsets), "floating dtypes"),
        ((x, table, torch.tensor([0, 2])), "offsets rise from 0 to 3"),
        ((x, table, torch.tensor([0, 3, 2, 3])), "offsets rise from 0 to 3"),
        ((x, table, torch.tensor([0.0, 3.0])), "offsets is int64 or int32"),
        ((x, table, torch.tensor([0, 3])), "table has 2 rows, the longest sequence 3 tokens"),
    ):
        with pytest.raises(ValueError, match=message):
            jagged_add_positions(*wrong)
    with pytest.raises(ValueError, match="table has 2 rows, the longest sequence 3 tokens"):
        jagged_add_positions(x, table, torch.tensor([0, 3]), backend="reference")
    with pytest.raises(ValueError, match=r"p must lie in \[0, 1\)"):
        jagged_add_positions(x, table, offsets, p=1.0)
    with pytest.raises(ConfigurationError, match="backend must be one of"):
        jagged_add_positions(x, table, offsets, backend="fast")
    with pytest.raises(ConfigurationError, match="backend cpp"):
        jagged_add_positions(x.double(), table, offsets, backend="cpp")
