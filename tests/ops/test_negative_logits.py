from __future__ import annotations

import pytest
import torch
from _memory import allocations
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.ops.jagged_cases import far_apart, max_errors
from tests.ops.sanitizer import assert_clean
from turbogr.errors import ConfigurationError
from turbogr.ops import negative_logits as module
from turbogr.ops.native import Kernel
from turbogr.ops.negative_logits import (
    KERNEL,
    _negative_logits,
    _negative_logits_backward,
    negative_logits,
    negative_logits_reference,
)

BACKENDS = ["cpp", "torch"]
SHAPES = [
    (40, 7, 6, 30),
    (1, 1, 1, 1),
    (0, 3, 4, 5),
    (4, 0, 3, 5),
    (4, 3, 0, 5),
    (0, 0, 0, 0),
    (50, 3, 5, 2000),
    (33, 128, 50, 400),
    (17, 16, 16, 3),
    (65, 17, 33, 64),
    (20, 31, 129, 90),
    (100, 64, 128, 5000),  # several blocks of rows
    (9, 15, 400, 7),
    (3000, 100, 7, 40),  # more samples than are distributed at once
    (3000, 100, 16, 50),
]


@pytest.fixture(autouse=True)
def _kernel():
    if KERNEL.library() is None:
        pytest.skip(KERNEL.failure())


def inputs_of(tokens, samples, dim, rows, seed=0, dtype=torch.float64):
    g = torch.Generator().manual_seed(seed)
    output = torch.randn(tokens, dim, generator=g, dtype=torch.float64).to(dtype).requires_grad_()
    table = torch.randn(rows, dim, generator=g, dtype=torch.float64).to(dtype).requires_grad_()
    return output, table, torch.randint(0, max(rows, 1), (tokens, samples), generator=g)


def errors_of(inputs, index, backend):
    return max(
        max_errors(
            lambda o, r: negative_logits(o, r, index, backend=backend),
            lambda o, r: negative_logits_reference(o, r, index),
            inputs,
            relative=True,
        )
    )


@pytest.mark.parametrize("segment_bytes", [1, 3000, 1 << 22])
@pytest.mark.parametrize("rows_per_sample", [0, 10**9], ids=["gathered", "dense"])
@pytest.mark.parametrize("shape", SHAPES)
def test_both_ways_of_pytorch_equal_the_reference(shape, rows_per_sample, segment_bytes, monkeypatch):
    monkeypatch.setattr(module, "DENSE_ROWS_PER_SAMPLE", rows_per_sample)
    monkeypatch.setattr(module, "SEGMENT_BYTES", segment_bytes)
    *inputs, index = inputs_of(*shape)
    assert errors_of(inputs, index, "torch") < 1e-12


@pytest.mark.parametrize("shape", SHAPES)
def test_the_kernel_equals_the_reference(shape):
    *inputs, index = inputs_of(*shape, dtype=torch.float32)
    assert errors_of(inputs, index, "cpp") < 1e-5


@pytest.mark.parametrize("backend", BACKENDS)
@settings(max_examples=30, deadline=None)
@given(
    tokens=st.integers(0, 40),
    samples=st.integers(0, 40),
    dim=st.integers(1, 70),
    rows=st.integers(1, 400),
    seed=st.integers(0, 9),
)
def test_any_shape_equals_the_reference(backend, tokens, samples, dim, rows, seed):
    """Within the rounding of the sums: errors are compared with the same sums of absolute values."""
    *inputs, index = inputs_of(tokens, samples, dim, rows, seed, torch.float32)
    weights = torch.randn(tokens, samples)

    def results(logits, inputs, weights):
        return logits, *torch.autograd.grad(logits, inputs, weights.to(logits.dtype))

    actual = results(negative_logits(*inputs, index, backend=backend), inputs, weights)
    expected = results(negative_logits_reference(*inputs, index), inputs, weights)
    positive = [x.detach().abs().requires_grad_() for x in inputs]
    largest = results(negative_logits_reference(*positive, index), positive, weights.abs())
    for a, b, bound in zip(actual, expected, largest, strict=True):
        assert ((a.double() - b.double()).abs() <= 3e-6 * bound.double()).all()


@pytest.mark.parametrize("backend", BACKENDS)
def test_strided_inputs_and_gradients(backend):
    output, table, index = inputs_of(30, 40, 50, 70, dtype=torch.float32)
    expected = negative_logits(output, table, index, backend=backend)
    weights = torch.randn(40, 30).T
    wanted = torch.autograd.grad(expected, (output, table), weights)
    with torch.no_grad():
        wide = torch.cat([output, output], dim=1)[:, :50].requires_grad_()
        columns = table.T.contiguous().T.requires_grad_()
    every_second = index.repeat_interleave(2, dim=1)[:, ::2]
    for o, t, i in ((wide, table, every_second), (output, columns, index.int())):
        actual = negative_logits(o, t, i, backend=backend)
        torch.testing.assert_close(actual, expected)
        torch.testing.assert_close(torch.autograd.grad(actual, (o, t), weights), wanted)
    one = output[:1].expand(30, 50)
    torch.testing.assert_close(
        negative_logits(one, table, index, backend=backend), negative_logits(one.contiguous(), table, index, backend="torch")
    )


def test_reference_as_a_back_end():
    output, table, index = inputs_of(5, 3, 4, 9, dtype=torch.float32)
    logits = negative_logits(output, table, index.int(), backend="reference")
    assert logits.dtype == torch.float32
    assert torch.equal(logits, negative_logits_reference(output, table, index).float())


@pytest.mark.parametrize("rows", [30, 3000])
@pytest.mark.parametrize("backend", BACKENDS)
def test_opcheck(backend, rows):
    inputs = inputs_of(5, 3, 2, rows, dtype=torch.float32)
    torch.library.opcheck(_negative_logits, (*inputs, None, backend))
    torch.library.opcheck(_negative_logits_backward, (torch.randn(5, 3), *(x.detach() for x in inputs), None, True, backend))


@pytest.mark.parametrize("rows", [20, 300])
def test_gradcheck(rows):
    output, table, index = inputs_of(5, 3, 2, rows)
    assert torch.autograd.gradcheck(lambda o, t: negative_logits(o, t, index), [output, table])


def results_with_threads(step):
    threads, results = torch.get_num_threads(), []
    try:
        for count in (1, 2, 3, 2):
            torch.set_num_threads(count)
            results.append(step())
    finally:
        torch.set_num_threads(threads)
    return results


@pytest.mark.parametrize("shape", [(300, 40, 50, 90), (300, 40, 128, 3000), (7, 3, 5, 2)])
def test_threads_do_not_change_a_bit(shape):
    output, table, index = inputs_of(*shape, dtype=torch.float32)

    def step(index=index, output=output):
        logits = negative_logits(output, table, index, backend="cpp")
        return logits.detach(), *torch.autograd.grad(logits.square().sum(), (output, table))

    first, *others = results_with_threads(step)
    for other in others:
        assert all(torch.equal(a, b) for a, b in zip(first, other, strict=True))
    turned = output.detach().flip(0).requires_grad_()
    backwards = step(index.flip(0), turned)[2]
    torch.testing.assert_close(backwards, first[2], rtol=1e-3, atol=1e-3)
    if shape[0] > 7:
        assert not torch.equal(backwards, first[2]), "negative control: another order of the sums changes bits"


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("rows", [400, 40_000])
def test_never_materialises_every_embedding(rows, backend):
    """The peak stays far below the [T, R, D] tensor, which the formula written naively reaches."""
    tokens, samples, dim = 6000, 64, 64
    output, table, index = inputs_of(tokens, samples, dim, rows, dtype=torch.float32)
    everything = tokens * samples * dim * 4
    _, peak = allocations(lambda: negative_logits(output, table, index, backend=backend).sum().backward())
    assert peak < 0.5 * everything
    _, naive = allocations(lambda: torch.einsum("td,trd->tr", output, table[index]).sum().backward())
    assert naive >= everything


@pytest.mark.parametrize("backend", [*BACKENDS, "reference"])
@pytest.mark.parametrize("value", [-1, 9, 2**40, -(2**63)])
def test_an_index_outside_is_named(backend, value):
    output, table, index = inputs_of(60, 7, 4, 9, dtype=torch.float32)
    index[59, 3] = 9
    index[41, 5] = value
    message = rf"turbogr::negative_logits: index\[41, 5\] is {value}, outside the rows 0..8"
    with pytest.raises(IndexError, match=message):
        negative_logits(output, table, index, backend=backend)
    if backend == "reference":
        return
    with pytest.raises(IndexError, match=message):
        _negative_logits_backward(torch.ones(60, 7), output.detach(), table.detach(), index, None, True, backend)


@pytest.mark.parametrize("backend", BACKENDS)
def test_no_row_at_all(backend):
    output, table, index = inputs_of(2, 1, 4, 0, dtype=torch.float32)
    with pytest.raises(IndexError, match=r"index\[0, 0\] is 0, outside the rows 0\.\.-1"):
        negative_logits(output, table, index, backend=backend)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("value", [torch.nan, torch.inf])
def test_damaged_numbers_stay_where_they_are(backend, value):
    output, table, _ = inputs_of(9, 5, 20, 9, dtype=torch.float32)
    index = torch.arange(9)[:, None] * torch.ones(5, dtype=torch.int64)
    with torch.no_grad():
        output[2, 19] = value
        table[4, 0] = value
    logits = negative_logits(output, table, index, backend=backend)
    damaged = torch.tensor([2, 4])
    assert not logits[damaged].isfinite().any()
    assert logits.isfinite().all(1).sum() == 7


def test_autocast_does_not_reach_inside():
    output, table, index = inputs_of(9, 5, 20, 90, dtype=torch.float32)
    with torch.autocast("cpu", torch.bfloat16):
        logits = negative_logits(output, table, index, backend="torch")
    assert torch.equal(logits, negative_logits(output, table, index, backend="torch"))


@pytest.mark.parametrize("backend", BACKENDS)
def test_addresses_beyond_32_bits(backend):
    output, table, index = inputs_of(3, 5, 16, 3, dtype=torch.float32)
    apart = [far_apart(x.detach()[:, None])[:, 0].requires_grad_() for x in (output, table)]
    expected, actual = (negative_logits(*x, index, backend=backend) for x in ((output, table), apart))
    torch.testing.assert_close(actual, expected)
    torch.testing.assert_close(torch.autograd.grad(actual.sum(), apart), torch.autograd.grad(expected.sum(), (output, table)))


def test_more_tokens_than_the_kernel_counts_are_refused():
    many = torch.empty(2**32, 0)
    with pytest.raises(ValueError, match=r"turbogr::negative_logits: 4,294,967,296 tokens are beyond 2\^32 - 1"):
        negative_logits(many, torch.empty(5, 0), many.long(), backend="cpp")


def test_wrong_inputs_are_named():
    output, table, index = inputs_of(4, 3, 2, 5)
    for meta in ("rows", "index"):
        named = {"output": output, "rows": table, "index": index}
        with pytest.raises(ValueError, match=f"turbogr::negative_logits: {meta} is on meta, but output on cpu"):
            negative_logits(**{**named, meta: named[meta].to("meta")})
    with pytest.raises(ValueError, match=r"share D and dtype"):
        negative_logits(output, table.float(), index)
    with pytest.raises(ValueError, match=r"share D and dtype"):
        negative_logits(output, table[:, :1], index)
    with pytest.raises(ValueError, match=r"floating dtype; got torch.int64"):
        negative_logits(output.long(), table.long(), index)
    with pytest.raises(ValueError, match=r"index is int64 or int32 \[T, R\] with T = 4"):
        negative_logits(output, table, index[:2])
    with pytest.raises(ValueError, match=r"index is int64 or int32 .* got torch.float32"):
        negative_logits(output, table, index.float())
    with pytest.raises(ConfigurationError, match=r"turbogr::negative_logits: backend cpp computes float32 on the CPU"):
        negative_logits(output, table, index, backend="cpp")
    with pytest.raises(ConfigurationError, match=r"turbogr::negative_logits: backend must be one of auto, cpp"):
        negative_logits(output, table, index, backend="numpy")


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
        test_the_kernel_equals_the_reference(shape)


@pytest.mark.slow
def test_no_access_outside_and_no_undefined_behaviour(tmp_path):
    assert_clean("negative_logits", "negative_sanitizer.cpp", tmp_path)
