"""`l2_normalise`: back ends against the float64 formula and PyTorch's own `normalize`."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.library import opcheck
from torch.nn import functional as F

from tests.ops.jagged_cases import BACKEND_DTYPES
from tests.ops.thread_counts import same_for_threads
from turbogr.errors import ConfigurationError
from turbogr.ops.normalise import EPS, KERNEL, _normalise, _normalise_backward, normalised, normalised_reference

SHAPES = [(0, 4), (1, 2), (3, 15), (2, 16), (5, 17), (300, 50), (2, 3, 33), (64,), (2, 1024)]
TOLERANCE = {torch.float32: 2e-6, torch.float64: 1e-13, torch.bfloat16: 1e-2}


@pytest.fixture(autouse=True)
def _kernel(request):
    if "cpp" in getattr(getattr(request.node, "callspec", None), "params", {}).values() and KERNEL.library() is None:
        pytest.skip(KERNEL.failure())


def incoming(shape):
    return torch.randn(shape, generator=torch.Generator().manual_seed(9), dtype=torch.float64)


def run(function, x):
    """The output and the gradient."""
    out = function(x)
    return [out, *torch.autograd.grad(out, x, incoming(out.shape).to(out.dtype))]


def close(actual, expected, dtype=torch.float32):
    for a, b in zip(actual, expected, strict=True):
        largest = float(b.detach().abs().max()) if b.numel() else 0.0
        torch.testing.assert_close(a.double(), b.double(), rtol=0, atol=TOLERANCE[dtype] * largest)


@pytest.mark.parametrize(("backend", "dtype"), BACKEND_DTYPES)
@pytest.mark.parametrize("shape", SHAPES)
def test_equals_the_formula(shape, backend, dtype):
    x = torch.randn(shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64).to(dtype).requires_grad_()
    actual = run(lambda x: normalised(x, backend=backend), x)
    assert [t.dtype for t in actual] == [dtype] * 2
    close(actual, run(normalised_reference, x), dtype)


@pytest.mark.parametrize("backend", ["cpp", "torch", "reference"])
def test_short_rows_are_divided_by_a_constant(backend):
    """As PyTorch's `normalize` does: the gradient of such a row is the incoming one over eps."""
    x = torch.randn(6, 20)
    x[1] = 0
    x[2] *= 1e-9
    x[3] *= 1e-4
    x.requires_grad_()
    expected = run(lambda x: F.normalize(x.double(), dim=-1, eps=EPS), x)
    actual = run(lambda x: normalised(x, backend=backend), x)
    for a, b in zip(actual, expected, strict=True):
        torch.testing.assert_close(a.double(), b.double(), rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(actual[0].detach().norm(dim=1)[[0, 3, 4]], torch.ones(3))


@pytest.mark.parametrize("backend", ["cpp", "torch"])
def test_strided_rows(backend):
    packed = torch.randn(40, 60, requires_grad=True)
    expected = run(lambda x: normalised_reference(x[:, 3:40]), packed)
    close(run(lambda x: normalised(x[:, 3:40], backend=backend), packed), expected)
    assert torch.allclose(normalised(packed.T, backend=backend), normalised_reference(packed.T).float(), atol=1e-6)


@settings(max_examples=40, deadline=None)
@given(rows=st.integers(0, 70), width=st.integers(2, 140))
def test_any_shape(rows, width):
    x = torch.randn(rows, width, requires_grad=True)
    (out, gradient), (expected_out, expected) = (run(lambda x, b=b: normalised(x, backend=b), x) for b in ("auto", "torch"))
    close([out], [expected_out])
    # What is taken away from a gradient may be nearly all of it: rounding goes by what came in.
    largest = incoming(x.shape).norm(dim=1, keepdim=True) / x.detach().double().norm(dim=1, keepdim=True)
    assert ((gradient - expected).abs() <= TOLERANCE[torch.float32] * largest).all()


@pytest.mark.parametrize("backend", ["cpp"])
def test_threads_do_not_change_a_bit(backend):
    x = torch.randn(3001, 50, requires_grad=True)
    same_for_threads(lambda: run(lambda x: normalised(x, backend=backend), x), x)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_operator_is_sound(dtype):
    x = torch.randn(5, 7, dtype=dtype, requires_grad=True)
    opcheck(_normalise, (x, "auto"))
    opcheck(_normalise_backward, (x.detach(), x.detach() + 1, "auto"))
    if dtype == torch.float64:
        assert torch.autograd.gradcheck(lambda x: _normalise(x, "torch"), (x,))


@pytest.mark.parametrize("backend", ["cpp", "torch"])
def test_damaged_numbers_stay_visible(backend):
    x = torch.randn(3, 20)
    x[1, 4] = torch.nan
    out = normalised(x, backend=backend)
    assert out[1].isnan().all()
    assert out[[0, 2]].isfinite().all()


def test_impossible_inputs_are_refused():
    for wrong in (torch.ones(2, 2, dtype=torch.int64), torch.tensor(1.0)):
        with pytest.raises(ValueError, match=r"x is float \[\.\.\., D\]"):
            normalised(wrong)
    with pytest.raises(ConfigurationError, match="backend must be one of"):
        normalised(torch.ones(2), backend="fast")
    with pytest.raises(ConfigurationError, match="backend cpp computes float32"):
        normalised(torch.ones(2).double(), backend="cpp")


@pytest.mark.parametrize("other_first", [False, True])
def test_another_gradient_of_a_leaf_is_added_in_place(other_first):
    """So that a batch's leaf has two gradients for a moment, and no third tensor for their sum."""
    x = torch.randn(50, 8, requires_grad=True)
    branches = [lambda: normalised(x).exp().sum(), lambda: x[:5].exp().sum()]
    first, second = (branch() for branch in (branches[::-1] if other_first else branches))
    loss = first + second
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profiler:
        loss.backward()
    counts = {event.key: event.count for event in profiler.key_averages()}
    assert counts.get("aten::add_") == 1
    assert "aten::add" not in counts
