"""`sampled_softmax` with a bias per row (log-Q) and with negatives that are lent."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.ops.jagged_cases import max_errors
from tests.ops.test_negative_logits import BACKENDS, SHAPES, results_with_threads
from tests.ops.test_sampled_softmax import inputs_of
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


def biases(rows, seed=1):
    """-log of probabilities of a long tail."""
    share = torch.rand(rows, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).pow(4) + 1e-6
    return -(share / share.sum()).log().float()


def errors_of(inputs, temperature, bias, lent, backend):
    output, table, *samples = inputs
    return max(
        max_errors(
            lambda o, t: sampled_softmax(o, t, *samples, temperature=temperature, bias=bias, lent=lent, backend=backend),
            lambda o, t: sampled_softmax_reference(o, t, *samples, temperature, bias, lent),
            [output, table],
            relative=True,
        )
    )


@pytest.mark.parametrize("temperature", [0.01, 0.05, 1.0, 30.0])
@pytest.mark.parametrize("shape", [shape for shape in SHAPES if shape[3]])
@pytest.mark.parametrize("backend", BACKENDS)
def test_equals_the_reference(backend, shape, temperature):
    for lent in {0, shape[1] // 3, shape[1]}:
        for bias in (None, biases(shape[3])):
            assert errors_of(inputs_of(*shape), temperature, bias, lent, backend) < 1e-5
        if backend == "torch":
            assert errors_of(inputs_of(*shape, dtype=torch.float64), temperature, biases(shape[3]), lent, backend) < 1e-12


@pytest.mark.parametrize("backend", [*BACKENDS, "reference"])
def test_the_formula_written_out(backend):
    """Against a gathered form whose gradients are autograd's own, of which the lent part is detached."""
    output, table, targets, negatives = inputs_of(40, 12, 9, 30)
    bias, lent = biases(30), 5
    loss = sampled_softmax(output, table, targets, negatives, temperature=0.3, bias=bias, lent=lent, backend=backend)

    def written(lent_rows):
        rows = torch.cat([table[targets][:, None], table[negatives[:, :-lent]], lent_rows[negatives[:, -lent:]]], dim=1)
        logits = (rows @ output[:, :, None])[:, :, 0] / 0.3 + bias[torch.cat([targets[:, None], negatives], dim=1)]
        masked = torch.cat([torch.zeros(40, 1, dtype=torch.bool), negatives == targets[:, None]], dim=1)
        return logits.masked_fill(masked, -torch.inf).logsumexp(1) - logits[:, 0]

    expected = written(table.detach())
    torch.testing.assert_close(loss, expected)
    weights = torch.linspace(-1, 1, 40)
    actual, wanted, borrowed_too = (torch.autograd.grad(x, (output, table), weights) for x in (loss, expected, written(table)))
    torch.testing.assert_close(actual, wanted, rtol=1e-4, atol=1e-5)
    assert (actual[1] - borrowed_too[1]).abs().max() > 0.1, "negative control: lent rows would get a gradient"
    plain = sampled_softmax(output, table, targets, negatives, temperature=0.3, backend=backend)
    assert (plain - loss).abs().max() > 0.1, "negative control: the bias counts"


@pytest.mark.parametrize("backend", BACKENDS)
@settings(max_examples=30, deadline=None)
@given(
    tokens=st.integers(1, 40),
    samples=st.integers(0, 40),
    dim=st.integers(1, 70),
    rows=st.integers(1, 60),
    share=st.floats(0, 1),
    temperature=st.floats(0.02, 5),
)
def test_any_shape_equals_the_reference(backend, tokens, samples, dim, rows, share, temperature):
    output, table, *indices = inputs_of(tokens, samples, dim, rows)
    options = {"temperature": temperature, "bias": biases(rows), "lent": int(share * samples)}
    actual = sampled_softmax(output, table, *indices, **options, backend=backend)
    expected = sampled_softmax_reference(output, table, *indices, **options)
    torch.testing.assert_close(actual.double(), expected, rtol=1e-5, atol=1e-5 / temperature)
    gradients = [torch.autograd.grad(x.sum(), (output, table)) for x in (actual, expected)]
    for a, b in zip(*gradients, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5 * tokens / temperature)


@pytest.mark.parametrize("backend", BACKENDS)
def test_without_effect_nothing_changes(backend):
    """A bias that is the same for all rows, and no lent column: the plain loss, bit for bit where the bias is zero."""
    output, table, *samples = inputs_of(50, 20, 33, 70)

    def step(**options):
        loss = sampled_softmax(output, table, *samples, temperature=0.05, backend=backend, **options)
        return loss.detach(), *torch.autograd.grad(loss.square().sum(), (output, table))

    plain = step()
    assert all(torch.equal(a, b) for a, b in zip(step(bias=torch.zeros(70), lent=0), plain, strict=True))
    torch.testing.assert_close(step(bias=torch.full((70,), 3.5)), plain, rtol=1e-4, atol=1e-4)
    # What is lent changes the rows' gradient and nothing else.
    lent = step(lent=6)
    assert all(torch.equal(a, b) for a, b in zip(lent[:2], plain[:2], strict=True))
    assert not torch.equal(lent[2], plain[2])


@pytest.mark.parametrize("backend", BACKENDS)
def test_rows_that_are_only_lent_get_no_gradient(backend):
    output, table, targets, negatives = inputs_of(60, 10, 8, 30, mask=0)
    targets, negatives = targets % 15, negatives % 15
    negatives[:, 6:] += 15
    loss = sampled_softmax(output, table, targets, negatives, temperature=0.1, lent=4, backend=backend)
    gradient = torch.autograd.grad(loss.sum(), table)[0]
    assert not gradient[15:].any()
    assert gradient[:15].any(1).all()
    loss = sampled_softmax(output, table, targets, negatives, temperature=0.1, lent=3, backend=backend)
    assert torch.autograd.grad(loss.sum(), table)[0][15:].any(), "negative control: one column fewer is lent"


@pytest.mark.parametrize("backend", BACKENDS)
def test_opcheck(backend):
    output, table, *samples = inputs_of(5, 6, 2, 30)
    torch.library.opcheck(_sampled_softmax, (output, table, *samples, 0.1, biases(30), 2, backend))
    kept = [x.detach() for x in _sampled_softmax(output, table, *samples, 0.1, biases(30), 2, backend)[1:]]
    assert kept[0].shape == (5, 5)
    torch.library.opcheck(_sampled_softmax_backward, (torch.randn(5), output.detach(), 30, *samples, *kept, 2, backend))


def test_gradcheck():
    """Of the output; numerical differences by the rows would count lent ones."""
    output, table, *samples = inputs_of(5, 3, 2, 30, dtype=torch.float64)

    def loss(output, table, lent=0):
        return sampled_softmax(output, table, *samples, temperature=0.5, bias=biases(30).double(), lent=lent)

    assert torch.autograd.gradcheck(loss, [output, table])
    assert torch.autograd.gradcheck(lambda output: loss(output, table.detach(), 2), [output])


@pytest.mark.parametrize("shape", [(300, 40, 50, 90), (300, 40, 128, 3000)])
def test_threads_do_not_change_a_bit(shape):
    output, table, *samples = inputs_of(*shape)

    def step(lent=13):
        loss = sampled_softmax(output, table, *samples, temperature=0.1, bias=biases(shape[3]), lent=lent, backend="cpp")
        return loss.detach(), *torch.autograd.grad(loss.square().sum(), (output, table))

    first, *others = results_with_threads(step)
    for other in others:
        assert all(torch.equal(a, b) for a, b in zip(first, other, strict=True))
    assert not torch.equal(step(12)[2], first[2]), "negative control"


@pytest.mark.parametrize("backend", [*BACKENDS, "reference"])
def test_indices_and_damaged_numbers_of_lent_columns(backend):
    output, table, targets, negatives = inputs_of(40, 6, 4, 9)
    wrong = negatives.clone()
    wrong[33, 5] = 9
    with pytest.raises(IndexError, match=r"negatives\[33, 5\] is 9, outside the rows 0..8"):
        sampled_softmax(output, table, targets, wrong, temperature=0.1, lent=2, backend=backend)
    bias = torch.zeros(9)
    bias[3] = torch.nan
    loss = sampled_softmax(output, table, targets, negatives, temperature=0.1, bias=bias, backend=backend)
    unmasked = (negatives == 3).any(1) | (targets == 3)
    assert torch.equal(loss.isnan(), unmasked)


def test_wrong_options_are_named():
    output, table, *samples = inputs_of(4, 3, 2, 5)
    for lent in (-1, 4):
        with pytest.raises(ValueError, match=rf"turbogr::sampled_softmax: lent is within 0..R with R = 3; got {lent}"):
            sampled_softmax(output, table, *samples, temperature=1.0, lent=lent)
    for bias in (torch.zeros(4), torch.zeros(5, 1), torch.zeros(5, dtype=torch.int64)):
        with pytest.raises(ValueError, match=r"turbogr::sampled_softmax: bias is float \[U\] with U = 5; got torch"):
            sampled_softmax(output, table, *samples, temperature=1.0, bias=bias)
    with pytest.raises(ValueError, match="turbogr::sampled_softmax: bias gets no gradient"):
        sampled_softmax(output, table, *samples, temperature=1.0, bias=torch.zeros(5, requires_grad=True))
    with pytest.raises(ValueError, match="turbogr::sampled_softmax: bias is on meta, but output on cpu"):
        sampled_softmax(output, table, *samples, temperature=1.0, bias=torch.zeros(5, device="meta"))
    half = sampled_softmax(output, table, *samples, temperature=1.0, bias=torch.ones(5).half())
    torch.testing.assert_close(half, sampled_softmax(output, table, *samples, temperature=1.0))


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
            assert errors_of(inputs_of(*shape), 0.05, biases(shape[3]), shape[1] // 2, "cpp") < 1e-5
