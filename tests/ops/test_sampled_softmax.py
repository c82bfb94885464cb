from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn import functional as F

from tests.ops.jagged_cases import far_apart, max_errors
from tests.ops.test_negative_logits import BACKENDS, SHAPES, results_with_threads
from turbogr.errors import ConfigurationError
from turbogr.ops import negative_logits
from turbogr.ops import sampled_softmax as module
from turbogr.ops.native import Kernel
from turbogr.ops.sampled_softmax import (
    KERNEL,
    _sampled_softmax,
    _sampled_softmax_backward,
    sampled_softmax,
    sampled_softmax_reference,
)


@pytest.fixture(autouse=True)
def _kernel():
    if KERNEL.library() is None:
        pytest.skip(KERNEL.failure())


def inputs_of(tokens, samples, dim, rows, seed=0, dtype=torch.float32, mask=0.2):
    """Normalised output and rows, targets and negatives, of which a share repeats the target."""
    g = torch.Generator().manual_seed(seed)
    output, table = (F.normalize(torch.randn(n, dim, generator=g, dtype=torch.float64)) for n in (tokens, rows))
    targets, negatives = (torch.randint(0, max(rows, 1), n, generator=g) for n in ((tokens,), (tokens, samples)))
    negatives = torch.where(torch.rand(negatives.shape, generator=g) < mask, targets[:, None], negatives)
    return output.to(dtype).requires_grad_(), table.to(dtype).requires_grad_(), targets, negatives


def errors_of(inputs, temperature, backend):
    output, table, *samples = inputs
    return max(
        max_errors(
            lambda o, t: sampled_softmax(o, t, *samples, temperature=temperature, backend=backend),
            lambda o, t: sampled_softmax_reference(o, t, *samples, temperature),
            [output, table],
            relative=True,
        )
    )


@pytest.mark.parametrize("temperature", [0.01, 0.05, 1.0, 30.0])
@pytest.mark.parametrize("shape", [shape for shape in SHAPES if shape[3]])
@pytest.mark.parametrize("backend", BACKENDS)
def test_equals_the_reference(backend, shape, temperature):
    assert errors_of(inputs_of(*shape), temperature, backend) < 1e-5
    if backend == "torch":
        assert errors_of(inputs_of(*shape, dtype=torch.float64), temperature, backend) < 1e-12


@pytest.mark.parametrize("backend", BACKENDS)
def test_pytorch_with_all_rows_and_with_gathered_ones(backend, monkeypatch):
    for rows_per_sample in (0, 10**9):
        monkeypatch.setattr(negative_logits, "DENSE_ROWS_PER_SAMPLE", rows_per_sample)
        assert errors_of(inputs_of(30, 20, 7, 50), 0.1, backend) < 1e-5


@pytest.mark.parametrize("backend", BACKENDS)
@settings(max_examples=30, deadline=None)
@given(
    tokens=st.integers(1, 40),
    samples=st.integers(0, 40),
    dim=st.integers(1, 70),
    rows=st.integers(1, 60),
    mask=st.sampled_from([0.0, 0.3, 1.0]),
    temperature=st.floats(0.02, 5),
)
def test_any_shape_equals_the_reference(backend, tokens, samples, dim, rows, mask, temperature):
    output, table, *samples = inputs_of(tokens, samples, dim, rows, mask=mask)
    actual = sampled_softmax(output, table, *samples, temperature=temperature, backend=backend)
    expected = sampled_softmax_reference(output, table, *samples, temperature)
    torch.testing.assert_close(actual.double(), expected, rtol=1e-5, atol=1e-5 / temperature)
    gradients = [torch.autograd.grad(x.sum(), (output, table)) for x in (actual, expected)]
    for a, b in zip(*gradients, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5 * tokens / temperature)


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_negative_drawn_twice_counts_twice_and_the_target_never(backend):
    output, table, targets, negatives = inputs_of(9, 4, 6, 30, mask=0)
    negatives[:, 1] = negatives[:, 0]
    negatives[:, 3] = targets
    loss = sampled_softmax(output, table, targets, negatives, temperature=0.5, backend=backend)
    logits = (output @ table.T / 0.5).double()
    of = [logits.gather(1, index[:, None])[:, 0] for index in (targets, negatives[:, 0], negatives[:, 2])]
    others = torch.where(negatives[:, 0] == targets, 0, 2 * of[1].exp()) + torch.where(
        negatives[:, 2] == targets, 0, of[2].exp()
    )
    torch.testing.assert_close(loss.double(), (1 + others / of[0].exp()).log())


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("samples", [0, 3, 40])
def test_without_a_negative_the_loss_is_zero(backend, samples):
    output, table, targets, negatives = inputs_of(9, samples, 6, 30, mask=1.0)
    loss = sampled_softmax(output, table, targets, negatives, temperature=0.01, backend=backend)
    assert torch.equal(loss, torch.zeros(9))
    gradients = torch.autograd.grad(loss.sum(), (output, table))
    assert all(not x.any() for x in gradients)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("sign", [1, -1])
def test_huge_logits_do_not_overflow(backend, sign):
    """Products of 10^4 at temperature 0.01: the loss is the difference of two logits of 10^6, or 0."""
    table = torch.tensor([[100.0], [-100.0]], requires_grad=True)
    output = torch.tensor([[sign * 100.0]], requires_grad=True)
    targets, negatives = torch.tensor([0]), torch.tensor([[1, 1]])
    loss = sampled_softmax(output, table, targets, negatives, temperature=0.01, backend=backend)
    assert loss.item() == pytest.approx(0 if sign > 0 else 2e6, rel=1e-6)
    gradients = torch.autograd.grad(loss.sum(), (output, table))
    assert all(x.isfinite().all() for x in gradients)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("temperature", [1e-9, 1e-30])
def test_tiny_temperatures_do_not_overflow(backend, temperature):
    """Logits whose rounding errors alone exceed what exp can take."""
    g = torch.Generator().manual_seed(0)
    output, table = (torch.randn(n, 16, generator=g).requires_grad_() for n in (50, 90))
    samples = torch.randint(0, 90, (50,), generator=g), torch.randint(0, 90, (50, 20), generator=g)
    loss = sampled_softmax(output, table, *samples, temperature=temperature, backend=backend)
    assert (loss >= 0).all()
    expected = sampled_softmax_reference(output, table, *samples, temperature)
    torch.testing.assert_close(loss.double(), expected, rtol=1e-5, atol=1e-5 / temperature)
    gradients = torch.autograd.grad(loss.sum(), (output, table))
    assert all(x.isfinite().all() for x in gradients)
    for a, b in zip(gradients, torch.autograd.grad(expected.sum(), (output, table)), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5 / temperature)


def test_the_kernel_resolves_small_losses():
    """log(1 + x) for x far below float32's spacing at 1."""
    table = torch.tensor([[0.5], [-0.5]])
    output = torch.tensor([[1.0]], requires_grad=True)
    loss = sampled_softmax(output, table, torch.tensor([0]), torch.tensor([[1] * 3]), temperature=0.04, backend="cpp")
    expected = sampled_softmax_reference(output, table, torch.tensor([0]), torch.tensor([[1] * 3]), 0.04)
    assert expected < 1e-9
    assert loss.item() == pytest.approx(expected.item(), rel=1e-5)
    (gradient,) = torch.autograd.grad(loss.sum(), output)
    assert gradient.item() == pytest.approx(torch.autograd.grad(expected.sum(), output)[0].item(), rel=1e-5)


def test_both_back_ends_take_strided_inputs_and_narrow_indices():
    output, table, targets, negatives = inputs_of(30, 20, 50, 70)
    with torch.no_grad():
        wide = torch.cat([output, output], dim=1)[:, :50].requires_grad_()
        columns = table.T.contiguous().T.requires_grad_()
    expected = sampled_softmax(output, table, targets, negatives, temperature=0.1, backend="torch")
    weights = torch.randn(60)[::2]
    wanted = torch.autograd.grad(expected, (output, table), weights)
    for backend in BACKENDS:
        samples = targets.repeat_interleave(2).int()[::2], negatives.T.contiguous().T.int()
        actual = sampled_softmax(wide, columns, *samples, temperature=0.1, backend=backend)
        torch.testing.assert_close(actual, expected)
        torch.testing.assert_close(torch.autograd.grad(actual, (wide, columns), weights), wanted)


def test_reference_as_a_back_end():
    output, table, *samples = inputs_of(5, 3, 4, 9)
    loss = sampled_softmax(output, table, *samples, temperature=0.3, backend="reference")
    assert loss.dtype == torch.float32
    assert torch.equal(loss, sampled_softmax_reference(output, table, *samples, 0.3).float())


@pytest.mark.parametrize("backend", BACKENDS)
def test_opcheck(backend):
    output, table, *samples = inputs_of(5, 3, 2, 30)
    torch.library.opcheck(_sampled_softmax, (output, table, *samples, 0.1, None, 0, backend))
    kept = [x.detach() for x in _sampled_softmax(output, table, *samples, 0.1, None, 0, backend)[1:]]
    torch.library.opcheck(_sampled_softmax_backward, (torch.randn(5), output.detach(), 30, *samples, *kept, 0, backend))


def test_gradcheck():
    output, table, *samples = inputs_of(5, 3, 2, 30, dtype=torch.float64)
    assert torch.autograd.gradcheck(lambda o, t: sampled_softmax(o, t, *samples, temperature=0.5), [output, table])


def test_only_the_loss_is_differentiable():
    output, table, *samples = inputs_of(5, 3, 2, 30)
    loss, coefficients, direction = _sampled_softmax(output, table, *samples, 0.1)
    assert loss.requires_grad
    assert not coefficients.requires_grad
    assert not direction.requires_grad


@pytest.mark.parametrize("shape", [(300, 40, 50, 90), (300, 40, 128, 3000), (7, 3, 5, 2)])
def test_threads_do_not_change_a_bit(shape):
    output, table, targets, negatives = inputs_of(*shape)

    def step(output=output, targets=targets, negatives=negatives):
        loss = sampled_softmax(output, table, targets, negatives, temperature=0.1, backend="cpp")
        return loss.detach(), *torch.autograd.grad(loss.square().sum(), (output, table))

    first, *others = results_with_threads(step)
    for other in others:
        assert all(torch.equal(a, b) for a, b in zip(first, other, strict=True))
    backwards = step(output.detach().flip(0).requires_grad_(), targets.flip(0), negatives.flip(0))[2]
    torch.testing.assert_close(backwards, first[2], rtol=1e-4, atol=1e-4)
    if shape[0] > 7:
        assert not torch.equal(backwards, first[2]), "negative control: another order of the sums changes bits"


@pytest.mark.parametrize("backend", [*BACKENDS, "reference"])
@pytest.mark.parametrize("value", [-1, 9, 2**40])
def test_an_index_outside_is_named(backend, value):
    output, table, targets, negatives = inputs_of(60, 7, 4, 9)
    wrong_targets, wrong_negatives = targets.clone(), negatives.clone()
    wrong_targets[41] = wrong_negatives[41, 6] = value
    with pytest.raises(IndexError, match=rf"turbogr::sampled_softmax: targets\[41\] is {value}, outside the rows 0..8"):
        sampled_softmax(output, table, wrong_targets, negatives, temperature=0.1, backend=backend)
    with pytest.raises(IndexError, match=rf"turbogr::sampled_softmax: negatives\[41, 6\] is {value}, outside the rows 0..8"):
        sampled_softmax(output, table, targets, wrong_negatives, temperature=0.1, backend=backend)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("value", [torch.nan, torch.inf])
def test_damaged_numbers_stay_visible(backend, value):
    output, table, targets, negatives = inputs_of(40, 33, 6, 30, mask=0)
    with torch.no_grad():
        output[3, 5] = value
    loss = sampled_softmax(output, table, targets, negatives, temperature=0.1, backend=backend)
    assert not loss[3].isfinite()
    assert loss.isfinite().sum() == 39
    with torch.no_grad():
        output[3, 5] = 0
        table[7, 0] = torch.nan
    loss = sampled_softmax(output, table, targets, negatives, temperature=0.1, backend=backend)
    assert torch.equal(loss.isnan(), (targets == 7) | (negatives == 7).any(1))
    assert loss.isnan().any()


def test_wrong_inputs_are_named():
    output, table, targets, negatives = inputs_of(4, 3, 2, 5)
    with pytest.raises(ValueError, match=r"turbogr::sampled_softmax: output \[T, D\] and rows \[U, D\] share D and dtype"):
        sampled_softmax(output, table.double(), targets, negatives, temperature=1.0)
    with pytest.raises(ValueError, match=r"negatives is int64 or int32 \[T, R\] with T = 4"):
        sampled_softmax(output, table, targets, negatives[:2], temperature=1.0)
    with pytest.raises(ValueError, match=r"targets is int64 or int32 \[T\] with T = 4; got torch.int64 \[3\]"):
        sampled_softmax(output, table, targets[:3], negatives, temperature=1.0)
    with pytest.raises(ValueError, match="turbogr::sampled_softmax: negatives is on meta, but output on cpu"):
        sampled_softmax(output, table, targets, negatives.to("meta"), temperature=1.0)
    with pytest.raises(ValueError, match="turbogr::sampled_softmax: targets is on meta, but output on cpu"):
        sampled_softmax(output, table, targets.to("meta"), negatives, temperature=1.0)
    for temperature in (0.0, -1.0, float("nan"), float("inf")):
        with pytest.raises(ValueError, match=r"temperature must be positive and finite"):
            sampled_softmax(output, table, targets, negatives, temperature=temperature)
    with pytest.raises(ConfigurationError, match=r"turbogr::sampled_softmax: backend cpp computes float32 on the CPU"):
        sampled_softmax(output.double(), table.double(), targets, negatives, temperature=1.0, backend="cpp")


@pytest.mark.parametrize("backend", BACKENDS)
def test_addresses_beyond_32_bits(backend):
    output, table, *samples = inputs_of(3, 5, 16, 3)
    apart = [far_apart(x.detach()[:, None])[:, 0].requires_grad_() for x in (output, table)]
    expected, actual = (sampled_softmax(*x, *samples, temperature=0.1, backend=backend) for x in ((output, table), apart))
    torch.testing.assert_close(actual, expected)
    torch.testing.assert_close(torch.autograd.grad(actual.sum(), apart), torch.autograd.grad(expected.sum(), (output, table)))


@pytest.mark.slow
@pytest.mark.parametrize("flags", ["-mno-avx512f", "-mno-avx"])
def test_narrower_vectors(flags, monkeypatch, tmp_path):
    """The same source for processors with AVX2 and with four lanes only."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setenv("CXX", f"g++ {flags}")
    kernel = Kernel("negative_logits")
    if kernel.library() is None:
        pytest.skip(f"g++ {flags} does not build here: {kernel.failure()}")
    monkeypatch.setattr(module, "KERNEL", kernel)
    for shape in SHAPES:
        if shape[3]:
            assert errors_of(inputs_of(*shape), 0.05, "cpp") < 1e-5
    test_damaged_numbers_stay_visible("cpp", torch.nan)
    test_the_kernel_resolves_small_losses()
