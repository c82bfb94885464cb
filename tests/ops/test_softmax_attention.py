from __future__ import annotations

import pytest
import torch
from _memory import allocations
from hypothesis import given, settings
from hypothesis import strategies as st
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn import functional as F

from tests.ops.jagged_cases import LENGTHS, WIDTHS, far_apart, max_errors, offsets_of
from tests.ops.sanitizer import assert_clean
from tests.ops.thread_counts import same_for_threads
from turbogr.errors import ConfigurationError
from turbogr.ops.softmax_attention import (
    KERNEL,
    _softmax_attention,
    _softmax_attention_backward,
    jagged_softmax_attention,
    jagged_softmax_attention_reference,
)

TOLERANCES = {"torch": (torch.float64, 1e-11), "cpp": (torch.float32, 1e-5)}
"""By back end: the dtype it is checked in, and the largest error relative to the largest value."""


@pytest.fixture(params=TOLERANCES)
def backend(request):
    if request.param == "cpp" and KERNEL.library() is None:
        pytest.skip(KERNEL.failure())
    return request.param


def inputs_of(lengths, heads=2, qk_dim=8, v_dim=5, dtype=torch.float64, seed=0):
    g = torch.Generator().manual_seed(seed)
    tokens = sum(lengths)
    drawn = (torch.randn(tokens, heads, d, generator=g, dtype=torch.float64) for d in (qk_dim, qk_dim, v_dim))
    return [x.to(dtype).requires_grad_() for x in drawn]


def pair(lengths, backend="auto", scale=0.4, offsets_dtype=torch.int64):
    offsets = offsets_of(lengths).to(offsets_dtype)
    return (
        lambda q, k, v: jagged_softmax_attention(q, k, v, offsets, scale=scale, backend=backend),
        lambda q, k, v: jagged_softmax_attention_reference(q, k, v, offsets, scale=scale),
    )


@pytest.mark.parametrize("offsets_dtype", [torch.int64, torch.int32])
@pytest.mark.parametrize("lengths", LENGTHS.values(), ids=LENGTHS.keys())
def test_equals_the_reference_with_all_gradients(lengths, offsets_dtype, backend):
    dtype, tolerance = TOLERANCES[backend]
    operator, reference = pair(lengths, backend, offsets_dtype=offsets_dtype)
    # The gradient of a lone query is zero; a float32 kernel leaves the rounding of what cancels there.
    relative = max([0, *lengths]) > 1
    assert max(max_errors(operator, reference, inputs_of(lengths, dtype=dtype), relative=relative)) < tolerance


@pytest.mark.parametrize(("heads", "qk_dim", "v_dim"), WIDTHS)
def test_all_widths_and_heads(heads, qk_dim, v_dim, backend):
    dtype, tolerance = TOLERANCES[backend]
    lengths = [0, 1, 2, 63, 64, 65, 0, 127, 129]
    operator, reference = pair(lengths, backend, scale=qk_dim**-0.5)
    assert max(max_errors(operator, reference, inputs_of(lengths, heads, qk_dim, v_dim, dtype), relative=True)) < tolerance


@settings(max_examples=25, deadline=None)
@given(
    lengths=st.lists(st.integers(0, 70), max_size=6),
    heads=st.integers(1, 4),
    qk_dim=st.integers(1, 20),
    v_dim=st.integers(1, 20),
    scale=st.sampled_from([0.0, 0.3, 3.0]),
    seed=st.integers(0, 99),
)
def test_any_shape_equals_the_reference(lengths, heads, qk_dim, v_dim, scale, seed):
    for backend, (dtype, tolerance) in TOLERANCES.items():
        if backend == "cpp" and KERNEL.library() is None:
            continue
        tensors = inputs_of(lengths, heads, qk_dim, v_dim, dtype, seed)
        # Absolute where gradients cancel to little, relative where large scores make them large.
        errors = [max_errors(*pair(lengths, backend, scale), tensors, relative=relative) for relative in (False, True)]
        assert max(map(min, zip(*errors, strict=True))) < 10 * tolerance


def test_a_wrong_scale_is_noticed(backend):
    """Negative control of the tests above: the scale off by a thousandth."""
    dtype, tolerance = TOLERANCES[backend]
    operator, reference = pair([64, 3], backend, 0.4004)[0], pair([64, 3])[1]
    assert min(max_errors(operator, reference, inputs_of([64, 3], dtype=dtype), relative=True)) > tolerance


def test_one_sequence_of_5000_tokens(backend):
    """Against the formula for some rows: only they have a gradient, so that nothing of size [5000, 5000] is needed."""
    dtype, tolerance = TOLERANCES[backend]
    tensors = inputs_of([5000, 3], heads=1, dtype=dtype)
    rows = torch.cat([torch.tensor([0, 63, 64, 4999]), torch.randint(0, 5000, (100,))]).unique()
    operator, _ = pair([5000, 3], backend)

    def formula(q, k, v):
        scores = 0.4 * torch.einsum("ihd,jhd->hij", q[rows].double(), k[:5000].double())
        weights = scores.masked_fill(torch.arange(5000) > rows[:, None], -torch.inf).softmax(-1)
        return torch.einsum("hij,jhd->ihd", weights, v[:5000].double())

    assert max(max_errors(lambda *x: operator(*x)[rows], formula, tensors, relative=True)) < tolerance


@pytest.mark.parametrize("shift", [0.0, 1e3, -1e3, 3e4])
def test_large_scores_do_not_overflow(shift, backend):
    """A softmax does not change when a constant is added to a row's scores, which here come later and larger, or smaller."""
    dtype, _ = TOLERANCES[backend]
    q, k, v = (x.detach() for x in inputs_of([200], qk_dim=2, dtype=dtype))
    q[..., 1], k[..., 1] = 1.0, torch.linspace(0, shift, 200, dtype=dtype)[:, None]
    out = pair([200], backend, scale=1.0)[0](q.requires_grad_(), k.requires_grad_(), v.requires_grad_())
    expected = pair([200], scale=1.0)[1](q, k, v)
    # The scores' own rounding is what float32 loses here.
    torch.testing.assert_close(out.double(), expected, rtol=0, atol=1e-6 * max(abs(shift), 10))
    grads = torch.autograd.grad(out.square().sum(), (q, k, v))
    assert all(x.isfinite().all() for x in grads)


def test_the_log_sums_that_backward_reads(backend):
    dtype, tolerance = TOLERANCES[backend]
    q, k, v = inputs_of([70, 0, 3], dtype=dtype)
    _, log_sums = _softmax_attention(q, k, v, offsets_of([70, 0, 3]), 0.4, "causal", backend)
    scores = 0.4 * torch.einsum("ihd,jhd->hij", q[:70].double(), k[:70].double())
    expected = scores.masked_fill(torch.ones(70, 70, dtype=torch.bool).triu(1), -torch.inf).logsumexp(-1)
    torch.testing.assert_close(log_sums[:70].double(), expected.T, rtol=tolerance, atol=tolerance)
    assert not log_sums.requires_grad


def test_equals_torch_on_a_single_sequence(backend):
    q, k, v = inputs_of([33], v_dim=8, dtype=TOLERANCES[backend][0])
    expected = F.scaled_dot_product_attention(*(x.transpose(0, 1) for x in (q, k, v)), is_causal=True, scale=0.4)
    torch.testing.assert_close(pair([33], backend)[0](q, k, v), expected.transpose(0, 1))


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-5), (torch.bfloat16, 0.05), (torch.float16, 0.005)])
def test_lower_precision_stays_near_the_reference(dtype, tolerance):
    tensors = inputs_of([150, 3, 70], dtype=dtype)
    operator, reference = pair([150, 3, 70], "torch")
    assert operator(*tensors).dtype == dtype
    assert max(max_errors(operator, reference, tensors)) < tolerance


def test_causal_and_within_a_sequence(backend):
    tensors = inputs_of([5, 4], dtype=TOLERANCES[backend][0])
    operator, _ = pair([5, 4], backend)
    before = operator(*tensors)
    with torch.no_grad():
        for tensor in tensors:
            tensor[3] += 1.0  # token 3 of sequence 0
    changed = (operator(*tensors) - before).abs().sum((1, 2)) > 0
    assert changed.tolist() == [False, False, False, True, True, False, False, False, False]


@pytest.mark.parametrize("value", [torch.nan, torch.inf])
@pytest.mark.parametrize("which", [0, 1])
def test_damaged_numbers_stay_visible_and_out_of_the_past(which, value, backend):
    tensors = inputs_of([70, 3], dtype=TOLERANCES[backend][0])
    with torch.no_grad():
        tensors[which][5, 1] = value
    sound = pair([70, 3], backend)[0](*tensors).isfinite()
    assert not sound[5, 1].all()
    assert sound[:5].all()
    assert sound[70:].all()
    assert sound[:, 0].all()


def test_opcheck_and_gradcheck(backend):
    dtype, _ = TOLERANCES[backend]
    tensors, offsets = inputs_of([3, 0, 5], heads=2, qk_dim=2, v_dim=3, dtype=dtype), offsets_of([3, 0, 5])
    torch.library.opcheck(_softmax_attention, (*tensors, offsets, 0.5, "causal", backend))
    permuted = [x.detach().transpose(0, 2).contiguous().transpose(0, 2).requires_grad_() for x in tensors]
    torch.library.opcheck(_softmax_attention, (*permuted, offsets, 0.5, "causal", backend))
    if dtype == torch.float64:
        assert torch.autograd.gradcheck(pair([3, 0, 5], backend)[0], tensors)


def test_fake_tensors_and_a_whole_graph(backend):
    tensors, offsets = inputs_of([3, 0, 5], dtype=TOLERANCES[backend][0]), offsets_of([3, 0, 5])

    def run(q, k, v, offsets):
        return jagged_softmax_attention(q, k, v, offsets, scale=0.4, backend=backend)

    with FakeTensorMode(allow_non_fake_inputs=True):
        assert run(*tensors, offsets).shape == (8, 2, 5)
    compiled = torch.compile(run, backend="aot_eager", fullgraph=True)
    for actual, expected in zip(*(gradients(f, tensors, offsets) for f in (compiled, run)), strict=True):
        torch.testing.assert_close(actual, expected)
    with pytest.raises(ValueError, match="offsets rise from 0 to 8"):
        compiled(*tensors, offsets + 1)


def gradients(function, tensors, offsets):
    return torch.autograd.grad(function(*tensors, offsets).square().sum(), tensors)


def test_strided_inputs(backend):
    dtype, tolerance = TOLERANCES[backend]
    lengths = [9, 4, 70]
    tensors = inputs_of(lengths, v_dim=8, dtype=dtype)
    packed = torch.cat([x.detach().flatten(1) for x in tensors], dim=1).requires_grad_()
    operator, reference = pair(lengths, backend)

    def on_views(function):
        def run(packed):
            views = [x.unflatten(1, (2, 8)) for x in packed.split(16, dim=1)]
            assert not views[0].is_contiguous()
            return function(*views)

        return run

    assert max(max_errors(on_views(operator), on_views(reference), [packed], relative=True)) < tolerance
    transposed = [x.detach().transpose(1, 2).contiguous().transpose(1, 2).requires_grad_() for x in tensors]
    assert transposed[0].stride(2) != 1
    assert max(max_errors(operator, reference, transposed, relative=True)) < tolerance
    # The gradient of a sum is one number, expanded: all its strides are zero.
    summed = [torch.autograd.grad(function(*tensors).sum(), tensors) for function in (operator, reference)]
    for actual, expected in zip(*summed, strict=True):
        torch.testing.assert_close(actual, expected, rtol=1e-4, atol=1e-4)


def test_elements_beyond_32_bits(backend):
    dtype, offsets = torch.float32, offsets_of([1, 3])
    tensors = [x.detach() for x in inputs_of([1, 3], qk_dim=4, v_dim=4, dtype=dtype)]
    results = []
    for q in (tensors[0], far_apart(tensors[0])):
        out, log_sums = _softmax_attention(q, *tensors[1:], offsets, 0.4, "causal", backend)
        grads = _softmax_attention_backward(tensors[2], q, *tensors[1:], offsets, out, log_sums, 0.4, "causal", backend)
        results.append([out, *grads])
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


def test_threads_do_not_change_a_bit(backend):
    lengths = [300, 5, 64, 1, 200]
    tensors = inputs_of(lengths, heads=4, qk_dim=16, v_dim=16, dtype=torch.float32)
    operator, _ = pair(lengths, "cpp" if backend == "cpp" else "torch")

    def results_of():
        out = operator(*tensors)
        return [out, *torch.autograd.grad(out.square().sum(), tensors)]

    # PyTorch's own products may depend on the number of threads.
    same_for_threads(results_of, tensors[0], (1, 2, 3, 2) if backend == "cpp" else (2, 2))


def test_keeps_no_square_matrix(backend):
    """What autograd keeps is linear in tokens, and the peak stays below one score matrix, which the reference exceeds."""
    length = 1500
    tensors = inputs_of([length], heads=1, dtype=torch.float32)
    operator, reference = pair([length], backend)
    kept = []
    with torch.autograd.graph.saved_tensors_hooks(lambda x: (kept.append(x.numel()), x)[1], lambda x: x):
        operator(*tensors)
    assert 0 < sum(kept) < 40 * length
    assert allocations(lambda: operator(*tensors).sum().backward())[1] < 4 * length**2
    assert allocations(lambda: reference(*tensors).sum().backward())[1] > 4 * length**2


def test_wrong_inputs_are_named():
    q, k, v = inputs_of([4])
    with pytest.raises(ValueError, match="offsets rise from 0 to 4"):
        jagged_softmax_attention(q, k, v, torch.tensor([0, 3]), scale=1.0)
    with pytest.raises(ValueError, match="offsets is int64 or int32"):
        jagged_softmax_attention(q, k, v, torch.tensor([0.0, 4.0]), scale=1.0)
    with pytest.raises(ValueError, match="share one floating dtype"):
        jagged_softmax_attention(q.float(), k.float(), v, torch.tensor([0, 4]), scale=1.0)
    many = torch.zeros(1, 1, 1).expand(2**31, 1, 1)
    with pytest.raises(ValueError, match=r"a sequence of 2,147,483,648 tokens is beyond 2\^31 - 1"):
        jagged_softmax_attention(many, many, many, torch.tensor([0, 2**31]), scale=1.0)
    with pytest.raises(ConfigurationError, match="backend must be one of auto, cpp, torch, reference, got 'cuda'"):
        jagged_softmax_attention(q, k, v, torch.tensor([0, 4]), scale=1.0, backend="cuda")
    with pytest.raises(ConfigurationError, match=r"computes float32 on the CPU, got torch.float64 on cpu"):
        jagged_softmax_attention(q, k, v, torch.tensor([0, 4]), scale=1.0, backend="cpp")


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_backend_reference_is_the_reference(dtype):
    tensors = inputs_of([9, 4], dtype=dtype)
    operator, reference = pair([9, 4], "reference")
    assert operator(*tensors).dtype == dtype
    assert max(max_errors(operator, reference, tensors)) < (1e-15 if dtype == torch.float64 else 1e-5)


@pytest.mark.slow
def test_no_access_outside_and_no_undefined_behaviour(tmp_path):
    assert_clean("softmax_attention", "softmax_sanitizer.cpp", tmp_path)
