"""`gated_norm` and `silu_split`: back ends against the float64 formulas, forward and every gradient."""

from __future__ import annotations

import itertools
from functools import partial

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.library import opcheck
from torch.nn import functional as F

from tests.ops.jagged_cases import BACKEND_DTYPES
from tests.ops.sanitizer import assert_clean
from tests.ops.thread_counts import same_for_threads
from turbogr.errors import ConfigurationError
from turbogr.ops import gated_norm as gated_norm_module
from turbogr.ops.dropout import dropout
from turbogr.ops.gated_norm import _gated_norm, _gated_norm_backward, gated_norm, gated_norm_reference, unit_norm
from turbogr.ops.silu_split import KERNEL as SILU_KERNEL
from turbogr.ops.silu_split import _silu_split, _silu_split_backward, silu_split, silu_split_reference

EPS = 1e-6
SHAPES = [
    (0, 5),
    (1, 1),
    (1, 2),
    (3, 15),
    (4, 16),
    (2, 17),
    (5, 64),
    (64, 63),
    (65, 65),
    (300, 50),
    (2, 3, 33),
    (7,),
    (2, 1024),
]
SIZES = [(1,), (5, 5, 5, 5), (16, 32, 1), (50, 50, 50, 50), (33, 7, 64, 15), (384, 128, 128, 128)]
TOLERANCE = {torch.float32: 2e-5, torch.float64: 1e-11, torch.bfloat16: 2e-2}


@pytest.fixture(autouse=True)
def _kernels(request):
    wants = "cpp" in getattr(getattr(request.node, "callspec", None), "params", {}).values()
    missing = [k.failure() for k in (gated_norm_module.KERNEL, SILU_KERNEL) if k.library() is None]
    if wants and missing:
        pytest.skip(missing[0])


def close(actual, expected, dtype=torch.float32):
    for a, b in zip(actual, expected, strict=True):
        assert a.shape == b.shape
        largest = float(b.detach().abs().max()) if b.numel() else 0.0
        torch.testing.assert_close(a.double(), b.double(), rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype] * largest)


def run(function, inputs):
    """Outputs and gradients for random incoming gradients."""
    leaves = [x.detach().requires_grad_() for x in inputs]
    outs = function(*leaves)
    outs = outs if isinstance(outs, list) else [outs]
    g = torch.Generator().manual_seed(9)
    incoming = [torch.randn(o.shape, generator=g, dtype=torch.float64).to(o.dtype) for o in outs]
    return [*outs, *torch.autograd.grad(outs, leaves, incoming)]


def norm_inputs(shape, dtype=torch.float32):
    g = torch.Generator().manual_seed(2)
    return [(torch.randn(shape, generator=g, dtype=torch.float64) * s + c).to(dtype) for s, c in ((1, 0), (2, 0.5))]


def seeded(function):
    torch.manual_seed(4)
    return function()


@pytest.mark.parametrize("p", [0.0, 0.3])
@pytest.mark.parametrize("norm", ["layer", "rms"])
@pytest.mark.parametrize(("backend", "dtype"), BACKEND_DTYPES)
@pytest.mark.parametrize("shape", SHAPES)
def test_gated_norm_equals_the_formula(shape, backend, norm, p, dtype):
    if shape[-1] == 1 or (shape[-1] == 2 and dtype == torch.bfloat16):
        pytest.skip("nothing but rounding is left of so short a row")
    inputs = norm_inputs(shape, dtype)
    torch.manual_seed(4)
    seed = int(torch.randint(2**63 - 1, ()))
    eps = 0.1 if shape[-1] <= 2 else EPS  # so short a row is nearly its own norm: the gradient is a difference of equals
    expected = run(lambda u, a: gated_norm_reference(u, a, eps=eps, p=p, norm=norm, seed=seed), inputs)
    close(seeded(lambda: run(lambda u, a: gated_norm(u, a, eps=eps, p=p, norm=norm, backend=backend), inputs)), expected, dtype)


@pytest.mark.parametrize("backend", ["cpp", "torch"])
def test_gated_norm_is_the_three_operators_it_stands_for(backend):
    inputs = norm_inputs((300, 50))
    expected = seeded(lambda: run(lambda u, a: dropout(u * F.layer_norm(a, (50,), eps=EPS), 0.4), inputs))
    actual = seeded(lambda: run(lambda u, a: gated_norm(u, a, eps=EPS, p=0.4, backend=backend), inputs))
    close(actual, expected)
    assert torch.equal(actual[0] == 0, expected[0] == 0), "the same mask"
    other = run(lambda u, a: gated_norm(u, a, eps=EPS, p=0.4, backend=backend), inputs)
    assert not torch.equal(other[0] == 0, expected[0] == 0), "negative control: another seed, another mask"


@pytest.mark.parametrize("norm", ["layer", "rms"])
@pytest.mark.parametrize(("backend", "dtype"), BACKEND_DTYPES)
@pytest.mark.parametrize("shape", [s for s in SHAPES if s[-1] > 2])
def test_without_a_gate_it_is_a_norm(shape, backend, norm, dtype):
    (x,) = norm_inputs(shape, dtype)[1:]
    ones = torch.ones_like(x)
    for p in (0.0, 0.3):
        expected = seeded(lambda p=p: run(lambda x: gated_norm(ones.double(), x.double(), eps=EPS, p=p, norm=norm), [x]))
        actual = seeded(lambda p=p: run(lambda x: unit_norm(x, eps=EPS, p=p, norm=norm, backend=backend), [x]))
        assert [t.dtype for t in actual] == [dtype] * 2
        close(actual, expected, dtype)
    if norm == "layer":
        close(
            run(lambda x: unit_norm(x, eps=EPS, backend=backend), [x]),
            run(lambda x: F.layer_norm(x.double(), x.shape[-1:], eps=EPS), [x]),
            dtype,
        )


@pytest.mark.parametrize("backend", ["cpp", "torch"])
def test_constant_and_large_rows(backend):
    """A variance of zero, and means that are large beside the deviation."""
    u = torch.ones(4, 40)
    a = torch.stack([torch.zeros(40), torch.full((40,), 3.0), 1000 + torch.arange(40.0), torch.full((40,), -1e-20)])
    out = gated_norm(u, a, eps=EPS, backend=backend)
    assert out[:2].abs().max() < 1e-3
    torch.testing.assert_close(out[2], F.layer_norm(a[2].double(), (40,), eps=EPS).float(), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("backend", ["cpp", "torch"])
def test_strided_inputs(backend):
    packed = torch.randn(70, 120)
    u, a = packed[:, 3:53], packed[:, 60:110]
    expected = run(lambda u, a: gated_norm(u, a, eps=EPS, backend="torch"), [u.contiguous(), a.contiguous()])
    close(run(lambda u, a: gated_norm(u, a, eps=EPS, backend=backend), [u, a]), expected)
    turned = run(lambda u, a: gated_norm(u.T, a.T, eps=EPS, backend=backend).T, [u.T.contiguous(), a.T.contiguous()])
    assert torch.allclose(turned[0].T, expected[0], atol=1e-5)
    x = packed[:, 5:105]
    close(
        run(lambda x: silu_split(x, [40, 60], backend=backend), [x]),
        run(lambda x: silu_split_reference(x, [40, 60]), [x.contiguous()]),
    )


@pytest.mark.parametrize(("backend", "dtype"), BACKEND_DTYPES)
@pytest.mark.parametrize("sizes", SIZES)
@pytest.mark.parametrize("rows", [0, 1, 63, 130])
def test_silu_split_equals_the_formula(rows, sizes, backend, dtype):
    x = (4 * torch.randn(rows, sum(sizes), generator=torch.Generator().manual_seed(1), dtype=torch.float64)).to(dtype)
    actual = run(lambda x: silu_split(x, sizes, backend=backend), [x])
    close(actual, run(lambda x: silu_split_reference(x, sizes), [x]), dtype)
    assert all(part.is_contiguous() and part.dtype == dtype for part in actual)


@pytest.mark.parametrize("backend", ["cpp", "torch"])
def test_parts_that_nothing_asks_for_have_no_gradient(backend):
    x = torch.randn(20, 30, requires_grad=True)
    parts = silu_split(x, [10, 20], backend=backend)
    (gradient,) = torch.autograd.grad(parts[1].sum(), x)
    assert (gradient[:, :10] == 0).all()
    torch.testing.assert_close(gradient[:, 10:], torch.autograd.grad(F.silu(x)[:, 10:].sum(), x)[0][:, 10:])


@settings(max_examples=40, deadline=None)
@given(rows=st.integers(0, 70), columns=st.integers(2, 140), p=st.floats(0, 0.9), norm=st.sampled_from(["layer", "rms"]))
def test_any_shape(rows, columns, p, norm):
    inputs = norm_inputs((rows, columns))
    results = [
        seeded(lambda b=b: run(lambda u, a: gated_norm(u, a, eps=1e-3, p=p, norm=norm, backend=b), inputs))
        for b in ("auto", "torch")
    ]
    close(*results)
    close(*(run(lambda x, b=b: silu_split(x, [1, columns - 1], backend=b), inputs[:1]) for b in ("auto", "torch")))


@pytest.mark.parametrize("backend", ["cpp"])
def test_threads_do_not_change_a_bit(backend):
    inputs, x = norm_inputs((3001, 50)), torch.randn(3001, 50)

    def results_of():
        normed = seeded(lambda: run(lambda u, a: gated_norm(u, a, eps=EPS, p=0.2, backend=backend), inputs))
        return [*normed, *run(lambda x: silu_split(x, [20, 30], backend=backend), [x])]

    same_for_threads(results_of, inputs[0])


@pytest.mark.parametrize("backend", ["cpp", "torch"])
def test_only_inputs_and_a_seed_are_kept(backend):
    u, a, x = (torch.randn(40, 32, requires_grad=True) for _ in range(3))
    saved = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t):
        gated_norm(u, a, eps=EPS, p=0.3, backend=backend)
        silu_split(x, [16, 16], backend=backend)
    assert sorted(t.numel() for t in saved) == [1, 40 * 32, 40 * 32, 40 * 32]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_operators_are_sound(dtype):
    u, a, g = (torch.randn(5, 7, dtype=dtype, requires_grad=True) for _ in range(3))
    for (seed, p), centre in itertools.product(((None, 0.0), (torch.tensor(5), 0.3)), (True, False)):
        rest = (seed, p, 1e-3, centre)
        opcheck(_gated_norm, (u, a, *rest, "auto"))
        opcheck(_gated_norm_backward, (g.detach(), u.detach(), a.detach(), *rest, "auto"))
        opcheck(_gated_norm, (None, a, *rest, "auto"))
        opcheck(_gated_norm_backward, (g.detach(), None, a.detach(), *rest, "auto"))
        if dtype == torch.float64:
            assert torch.autograd.gradcheck(partial(_gated_norm, seed=seed, p=p, eps=1e-3, centre=centre), (u, a))
    opcheck(_silu_split, (u, [3, 4], "auto"))
    opcheck(_silu_split_backward, ([g.detach()[:, :3], g.detach()[:, 3:]], u.detach(), [3, 4], "auto"))
    if dtype == torch.float64:
        assert torch.autograd.gradcheck(lambda x: _silu_split(x, [3, 4], "torch"), (u,))


def test_under_autocast_arithmetic_stays_wide():
    u, a = norm_inputs((30, 40))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        out = gated_norm(u, a, eps=EPS)
        (half,) = silu_split(u.bfloat16(), [40])
    assert out.dtype == torch.float32
    assert half.dtype == torch.bfloat16
    assert torch.equal(out, gated_norm(u, a, eps=EPS))
    assert gated_norm(u.bfloat16(), a, eps=EPS).dtype == torch.float32


@pytest.mark.parametrize("backend", ["cpp", "torch"])
def test_damaged_numbers_stay_visible(backend):
    u, a = norm_inputs((3, 20))
    a[1, 3] = torch.nan
    u[2, 5] = torch.nan
    out = gated_norm(u, a, eps=EPS, p=0.5, backend=backend)
    assert out[0].isfinite().all()
    assert out[1].isnan().all()
    assert out[2, 5].isnan()
    assert silu_split(u, [20], backend=backend)[0].isnan().sum() == 1


def test_impossible_inputs_are_refused():
    x = torch.ones(3, 4)
    with pytest.raises(ValueError, match="gate and x are floats of one shape"):
        gated_norm(x, torch.ones(3, 5), eps=EPS)
    with pytest.raises(ValueError, match="gate and x are floats of one shape"):
        gated_norm(x, x.long(), eps=EPS)
    with pytest.raises(ValueError, match=r"p must lie in \[0, 1\), got 1.0"):
        gated_norm(x, x, eps=EPS, p=1.0)
    with pytest.raises(ValueError, match="norm is layer or rms"):
        gated_norm(x, x, eps=EPS, norm="batch")
    with pytest.raises(ValueError, match="eps not negative"):
        gated_norm(x, x, eps=-1.0)
    for sizes in ([1, 2], [], [5, -1], [4, 0]):
        with pytest.raises(ValueError, match="sizes are positive with sum W"):
            silu_split(x, sizes)
    with pytest.raises(ValueError, match="x is float"):
        silu_split(x.long(), [4])
    for call in (lambda b: gated_norm(x, x, eps=EPS, backend=b), lambda b: silu_split(x, [4], backend=b)):
        with pytest.raises(ConfigurationError, match="backend must be one of"):
            call("fast")
    for call in (lambda x: gated_norm(x, x, eps=EPS, backend="cpp"), lambda x: silu_split(x, [4], backend="cpp")):
        with pytest.raises(ConfigurationError, match="backend cpp computes float32"):
            call(x.double())


@pytest.mark.slow
def test_no_access_outside_and_no_undefined_behaviour(tmp_path):
    """Dropout's kernel among them."""
    assert_clean("dropout", "elementwise_sanitizer.cpp", tmp_path)
