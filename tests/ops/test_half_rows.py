"""`negative_logits` on rows in half precision and with factors, and its gradients for callers' own autograd functions."""

from __future__ import annotations

import pytest
import torch
from _memory import allocations
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn import functional as F

from tests.ops.jagged_cases import far_apart
from tests.ops.test_negative_logits import BACKENDS, SHAPES, results_with_threads
from turbogr.ops import negative_logits as module
from turbogr.ops.native import Kernel
from turbogr.ops.negative_logits import (
    KERNEL,
    _negative_logits,
    _negative_logits_backward,
    negative_logits,
    negative_logits_gradients,
    negative_logits_reference,
)
from turbogr.ops.normalise import EPS, _normalise_backward, normalised

TYPES = [torch.float16, torch.bfloat16, torch.float32]


@pytest.fixture(autouse=True)
def _kernel():
    if KERNEL.library() is None:
        pytest.skip(KERNEL.failure())


def inputs_of(tokens, samples, dim, rows, dtype, seed=0):
    """Output, rows in `dtype`, index, and factors."""
    g = torch.Generator().manual_seed(seed)
    output, table = torch.randn(tokens, dim, generator=g), torch.randn(rows, dim, generator=g).to(dtype)
    return output, table, torch.randint(0, max(rows, 1), (tokens, samples), generator=g), torch.rand(rows, generator=g) + 0.5


def close(actual, expected, tolerance=1e-5):
    for a, b in zip(actual, expected, strict=True):
        assert a.dtype == torch.float32
        assert a.shape == b.shape
        largest = float(b.abs().max()) if b.numel() else 0.0
        torch.testing.assert_close(a.double(), b.double(), rtol=0, atol=tolerance * largest)


def results_of(output, table, index, factors, backend):
    gradient = torch.linspace(-1, 1, index.numel()).view(index.shape)
    gradients = negative_logits_gradients(gradient, output, table, index, factors=factors, backend=backend)
    return [negative_logits(output, table, index, factors=factors, backend=backend), *gradients]


def expected_of(output, table, index, factors):
    """By autograd through the formula, in float64, from the rows as they count."""
    wide = table.double() if factors is None else table.double() * factors.double()[:, None]
    leaves = [output.double().requires_grad_(), wide.requires_grad_()]
    logits = negative_logits_reference(*leaves, index)
    gradient = torch.linspace(-1, 1, index.numel(), dtype=torch.float64).view(index.shape)
    return [logits.detach(), *torch.autograd.grad(logits, leaves, gradient)]


@pytest.mark.parametrize("with_factors", [False, True], ids=["plain", "factors"])
@pytest.mark.parametrize("dtype", TYPES, ids=str)
@pytest.mark.parametrize("backend", [*BACKENDS, "reference"])
def test_equals_the_reference(backend, dtype, with_factors, monkeypatch):
    for shape in SHAPES:
        if backend == "reference" and shape[0] * shape[1] * shape[2] > 10**6:
            continue
        output, table, index, factors = inputs_of(*shape, dtype)
        scale = factors if with_factors else None
        expected = expected_of(output, table, index, scale)
        for rows_per_sample in (0, 8, 10**9) if backend == "torch" else (8,):  # gathered, as it comes, dense
            monkeypatch.setattr(module, "DENSE_ROWS_PER_SAMPLE", rows_per_sample)
            close(results_of(output, table, index, scale, backend), expected)


@pytest.mark.parametrize("dtype", TYPES, ids=str)
@pytest.mark.parametrize("backend", BACKENDS)
@settings(max_examples=20, deadline=None)
@given(
    tokens=st.integers(0, 40),
    samples=st.integers(0, 40),
    dim=st.integers(1, 70),
    rows=st.integers(1, 400),
    seed=st.integers(0, 9),
)
def test_any_shape_equals_the_reference(backend, dtype, tokens, samples, dim, rows, seed):
    """Within the rounding of the sums: errors are compared with the same sums of absolute values."""
    output, table, index, factors = inputs_of(tokens, samples, dim, rows, dtype, seed)
    gradient = torch.randn(index.shape, generator=torch.Generator().manual_seed(seed))

    def of(output, table, gradient, backend):
        gradients = negative_logits_gradients(gradient, output, table, index, factors=factors, backend=backend)
        return [negative_logits(output, table, index, factors=factors, backend=backend), *gradients]

    bounds = of(output.abs(), table.abs(), gradient.abs(), "reference")
    actual, expected = (of(output, table, gradient, x) for x in (backend, "reference"))
    for a, b, bound in zip(actual, expected, bounds, strict=True):
        assert ((a - b).abs() <= 4e-6 * bound).all()


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("width", [1, 64])
@pytest.mark.parametrize("backend", BACKENDS)
def test_every_half_number_is_read_as_what_it_is(backend, width, dtype):
    """All 65,536 of them: zeros of both signs, the smallest, infinities; what is no number stays none."""
    numbers = torch.arange(2**16).to(torch.int16).view(dtype)
    table = torch.zeros(2**16, width, dtype=dtype)
    table[:, width // 2] = numbers
    output = torch.zeros(1, width)
    output[0, width // 2] = 1
    index = torch.arange(2**16)[None]
    logits = negative_logits(output, table, index, backend=backend)[0]
    finite = numbers.isfinite()
    assert torch.equal(logits[finite], numbers.float()[finite])
    # 0 in the other columns of the output leaves infinities alone, as the rows' other columns are finite.
    assert torch.equal(logits.isnan(), numbers.isnan())
    assert torch.equal(logits[numbers.isinf()], numbers.float()[numbers.isinf()])


def test_small_half_numbers_where_tiny_floats_count_as_zero():
    """float16's smallest are normal numbers in float32, whatever the processor does with those that are not."""
    table = torch.tensor([[1, 1023, 1024]], dtype=torch.int16).T.contiguous().view(torch.float16)
    if not torch.set_flush_denormal(True):
        pytest.skip("a processor that cannot")
    try:
        logits = negative_logits(torch.ones(1, 1), table, torch.arange(3)[None], backend="cpp")
    finally:
        torch.set_flush_denormal(False)
    assert torch.equal(logits, torch.tensor([[2.0**-24, 1023 * 2.0**-24, 2.0**-14]]))


@pytest.mark.parametrize("dtype", TYPES, ids=str)
@pytest.mark.parametrize("backend", BACKENDS)
def test_factors_normalise_without_a_copy(backend, dtype):
    """Rows of any length with factors of 1 / length: logits and gradients of the normalised rows, through autograd."""
    output, table, index, _ = inputs_of(60, 20, 33, 90, dtype)
    wide = (5 * table.float()).to(dtype)
    leaf, tokens = wide.to(torch.float32, copy=True).requires_grad_(), output.clone().requires_grad_()
    expected = negative_logits(tokens, normalised(leaf), index, backend=backend)
    gradient = torch.randn(index.shape, generator=torch.Generator().manual_seed(3))
    wanted = [expected.detach(), *torch.autograd.grad(expected, (tokens, leaf), gradient)]
    factors = 1 / torch.linalg.vector_norm(wide.float(), dim=1).clamp(min=EPS)
    logits = negative_logits(output, wide, index, factors=factors, backend=backend)
    by_output, by_normalised = negative_logits_gradients(gradient, output, wide, index, factors=factors, backend=backend)
    close([logits, by_output, _normalise_backward(by_normalised, wide.float())], wanted)
    plain = negative_logits(output, wide, index, backend=backend)
    assert (plain - logits).abs().max() > 1, "negative control: factors count"


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_half_rows_are_rounded_once(dtype):
    """Negative control of the tolerances: rows in half precision give other logits than the rows they were rounded from."""
    output, table, index, _ = inputs_of(60, 20, 33, 90, torch.float32)
    half = table.to(dtype)
    logits = negative_logits(output, half, index)
    torch.testing.assert_close(logits, negative_logits(output, half.float(), index))
    error = (logits - negative_logits(output, table, index)).abs().max()
    assert 1e-4 < error < (0.01 if dtype == torch.float16 else 0.1)


@pytest.mark.parametrize("dtype", TYPES, ids=str)
@pytest.mark.parametrize("backend", [*BACKENDS, "reference"])
def test_autograd_gives_the_output_its_gradient_and_refuses_the_rows(backend, dtype):
    output, table, index, factors = inputs_of(30, 7, 20, 50, dtype)
    output.requires_grad_()
    logits = negative_logits(output, table, index, factors=factors, backend=backend)
    gradient = torch.randn(30, 7)
    (actual,) = torch.autograd.grad(logits, output, gradient)
    expected = negative_logits_gradients(gradient, output, table, index, factors=factors, backend=backend)
    torch.testing.assert_close(actual, expected[0])
    assert not any(x.requires_grad for x in expected)
    table.requires_grad_()
    for refused in ({"rows": table}, {"rows": table.detach(), "factors": factors.clone().requires_grad_()}):
        with pytest.raises(ValueError, match="take the rows' gradient from negative_logits_gradients"):
            negative_logits(output, index=index, backend=backend, **{"factors": factors, **refused})
    with torch.no_grad():  # as in the forward of a caller's own autograd function
        torch.testing.assert_close(negative_logits(output, table, index, factors=factors, backend=backend), logits)


def test_gradients_of_a_callers_own_function():
    """Half rows behind a caller's function: the gradient arrives in float32, as that of the wide rows."""

    class Own(torch.autograd.Function):
        @staticmethod
        def forward(ctx, output, wide, index):
            half = wide.half()
            ctx.save_for_backward(output, half, index)
            return negative_logits(output, half, index)

        @staticmethod
        def backward(ctx, gradient):
            return *negative_logits_gradients(gradient, *ctx.saved_tensors), None

    output, table, index, _ = inputs_of(30, 7, 20, 50, torch.float32)
    leaves = output.requires_grad_(), table.half().float().requires_grad_()
    actual, expected = (f(*leaves, index).square().sum() for f in (Own.apply, negative_logits))
    torch.testing.assert_close(torch.autograd.grad(actual, leaves), torch.autograd.grad(expected, leaves))


@pytest.mark.parametrize("dtype", TYPES, ids=str)
@pytest.mark.parametrize("rows", [30, 3000])
@pytest.mark.parametrize("backend", BACKENDS)
def test_opcheck(backend, rows, dtype):
    output, table, index, factors = inputs_of(5, 3, 2, rows, dtype)
    torch.library.opcheck(_negative_logits, (output.clone().requires_grad_(), table, index, factors, backend))
    for both in (True, False):
        arguments = torch.randn(5, 3), output, table, index, factors, both, backend
        torch.library.opcheck(_negative_logits_backward, arguments)
        assert _negative_logits_backward(*arguments)[1].shape[0] == (rows if both else 0)


def test_gradcheck_with_factors():
    output, table, index, factors = (x.double() if x.is_floating_point() else x for x in inputs_of(5, 3, 2, 30, torch.float32))
    assert torch.autograd.gradcheck(lambda o: negative_logits(o, table, index, factors=factors), [output.requires_grad_()])


@pytest.mark.parametrize("dtype", TYPES, ids=str)
@pytest.mark.parametrize("shape", [(300, 40, 50, 90), (300, 40, 128, 3000)])
def test_threads_do_not_change_a_bit(shape, dtype):
    output, table, index, factors = inputs_of(*shape, dtype)
    first, *others = results_with_threads(lambda: results_of(output, table, index, factors, "cpp"))
    for other in others:
        assert all(torch.equal(a, b) for a, b in zip(first, other, strict=True))
    table[-1] += 1
    assert not torch.equal(results_of(output, table, index, factors, "cpp")[0], first[0]), "negative control"


@pytest.mark.parametrize("dtype", TYPES, ids=str)
@pytest.mark.parametrize("backend", BACKENDS)
def test_strides_and_narrow_indices(backend, dtype):
    output, table, index, factors = inputs_of(30, 40, 50, 70, dtype)
    expected = results_of(output, table, index, factors, backend)
    wide, columns = torch.cat([table, table], dim=1)[:, :50], table.T.contiguous().T
    for rows in (wide, columns):
        close(results_of(output, rows, index.T.contiguous().T.int(), factors.repeat_interleave(2)[::2], backend), expected)
    if backend == "cpp":
        apart = far_apart(table[:3, None])[:, 0]  # addresses beyond 32 bits
        close(results_of(output, apart, index % 3, None, backend), results_of(output, table[:3], index % 3, None, backend))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("rows", [400, 40_000])
def test_never_widens_all_rows_nor_gathers_all_samples(rows, backend, dtype):
    tokens, samples, dim = 6000, 64, 64
    output, table, index, factors = inputs_of(tokens, samples, dim, rows, dtype)
    _, peak = allocations(lambda: negative_logits(output, table, index, factors=factors, backend=backend))
    logits = 4 * tokens * samples
    assert peak < 2.5 * logits + (5 << 21)  # segments of 4 MiB, narrow and wide; the logits' factors
    _, naive = allocations(lambda: torch.einsum("td,trd->tr", output, F.embedding(index, table).float()))
    assert naive > 10 * peak


@pytest.mark.parametrize("backend", [*BACKENDS, "reference"])
def test_an_index_outside_is_named(backend):
    output, table, index, factors = inputs_of(60, 7, 4, 9, torch.float16)
    index[41, 5] = 9
    message = r"turbogr::negative_logits: index\[41, 5\] is 9, outside the rows 0..8"
    with pytest.raises(IndexError, match=message):
        negative_logits(output, table, index, factors=factors, backend=backend)
    with pytest.raises(IndexError, match=message):
        negative_logits_gradients(torch.ones(60, 7), output, table, index, factors=factors, backend=backend)


def test_wrong_inputs_are_named():
    output, table, index, factors = inputs_of(4, 3, 2, 5, torch.float16)
    for wrong in (output.double(), output.half().bfloat16()):
        with pytest.raises(ValueError, match=r"share D and dtype"):
            negative_logits(wrong, table, index)
    for wrong in (factors[:4], factors.half(), factors[:, None]):
        with pytest.raises(
            ValueError, match=r"turbogr::negative_logits: factors are torch.float32 \[U\] with U = 5; got torch"
        ):
            negative_logits(output, table, index, factors=wrong)
    with pytest.raises(ValueError, match="turbogr::negative_logits: factors is on meta, but output on cpu"):
        negative_logits(output, table, index, factors=factors.to("meta"))
    for wrong in (torch.ones(4, 2), torch.ones(4, 3).double()):
        with pytest.raises(ValueError, match=r"gradient is torch.float32 \[4, 3\], as the logits; got torch"):
            negative_logits_gradients(wrong, output, table, index)
    with pytest.raises(ValueError, match="turbogr::negative_logits: gradient is on meta, but output on cpu"):
        negative_logits_gradients(torch.ones(4, 3, device="meta"), output, table, index)
    gradients = negative_logits_gradients(torch.ones(4, 3).double(), output.double(), table.double(), index)
    assert all(x.dtype == torch.float64 for x in gradients)


@pytest.mark.slow
@pytest.mark.parametrize("flags", ["-mno-avx512f", "-mno-f16c", "-mno-avx"])
def test_narrower_vectors(flags, monkeypatch, tmp_path):
    """The same source for processors with AVX2, with AVX but without its conversions of float16, and with four lanes only."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setenv("CXX", f"g++ {'-mno-avx512f ' if flags == '-mno-f16c' else ''}{flags}")
    kernel = Kernel("negative_logits")
    if kernel.library() is None:
        pytest.skip(f"g++ {flags} does not build here: {kernel.failure()}")
    monkeypatch.setattr(module, "KERNEL", kernel)
    for dtype in TYPES:
        test_equals_the_reference("cpp", dtype, True, monkeypatch)
        if dtype != torch.float32:
            test_every_half_number_is_read_as_what_it_is("cpp", 64, dtype)
    test_small_half_numbers_where_tiny_floats_count_as_zero()
