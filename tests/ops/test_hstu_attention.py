from __future__ import annotations

from functools import partial

import pytest
import torch
from _memory import allocations
from hypothesis import given, settings
from hypothesis import strategies as st
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn import functional as F

from tests.ops.jagged_cases import LENGTHS, WIDTHS, far_apart, max_errors, offsets_of
from turbogr.errors import ConfigurationError
from turbogr.models.bias import TimeBuckets
from turbogr.ops.hstu_attention import (
    KERNEL,
    _hstu_attention,
    _hstu_attention_backward,
    jagged_hstu_attention,
    jagged_hstu_attention_reference,
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
    offsets = offsets_of(lengths)
    tokens = int(offsets[-1])
    q, k = (torch.randn(tokens, heads, qk_dim, generator=g, dtype=torch.float64) for _ in range(2))
    v = torch.randn(tokens, heads, v_dim, generator=g, dtype=torch.float64)
    position = torch.randn(max([1, *lengths]) + 3, generator=g, dtype=torch.float64)
    time = torch.randn(28, generator=g, dtype=torch.float64)  # the last bucket begins at 3386
    keys = torch.rand(tokens, generator=g).mul(6).exp().long().cumsum(0)
    queries = keys + torch.rand(tokens, generator=g).mul(6).exp().long()
    tensors = [x.to(dtype).requires_grad_() for x in (q, k, v, position, time)]
    return tensors, offsets, queries, keys


def pair(offsets, queries, keys, use_position=True, use_time=True, backend="auto", **options):
    options = {"scale": 0.05, "alpha": 0.7, **options}

    def call(function):
        def run(q, k, v, position, time):
            return function(
                q,
                k,
                v,
                offsets,
                position_bias=position if use_position else None,
                time_bias=time if use_time else None,
                query_times=queries if use_time else None,
                key_times=keys if use_time else None,
                **options,
            )

        return run

    return call(partial(jagged_hstu_attention, backend=backend)), call(jagged_hstu_attention_reference)


@pytest.mark.parametrize("use_time", [True, False])
@pytest.mark.parametrize("use_position", [True, False])
@pytest.mark.parametrize("lengths", LENGTHS.values(), ids=LENGTHS.keys())
def test_equals_the_reference_with_all_gradients(lengths, use_position, use_time, backend):
    dtype, tolerance = TOLERANCES[backend]
    tensors, offsets, queries, keys = inputs_of(lengths, dtype=dtype)
    operator, reference = pair(offsets, queries, keys, use_position, use_time, backend)
    assert max(max_errors(operator, reference, tensors, relative=True)) < tolerance


@pytest.mark.parametrize(("heads", "qk_dim", "v_dim"), WIDTHS)
def test_all_widths_and_heads(heads, qk_dim, v_dim, backend):
    dtype, tolerance = TOLERANCES[backend]
    tensors, offsets, queries, keys = inputs_of([0, 1, 2, 63, 64, 65, 0, 127, 129], heads, qk_dim, v_dim, dtype)
    operator, reference = pair(offsets, queries, keys, backend=backend, alpha=qk_dim**-0.5)
    assert max(max_errors(operator, reference, tensors, relative=True)) < tolerance


def test_one_sequence_of_5000_tokens(backend):
    """Against the formula for some rows: only they have a gradient, so that nothing of size [5000, 5000] is needed."""
    dtype, tolerance = TOLERANCES[backend]
    tensors, offsets, queries, keys = inputs_of([5000, 3], heads=1, dtype=dtype)
    rows = torch.cat([torch.tensor([0, 63, 64, 4999]), torch.randint(0, 5000, (100,))]).unique()
    operator, _ = pair(offsets, queries, keys, backend=backend)

    def formula(q, k, v, position, time):
        q, k, v, position, time = (x.double() for x in (q, k, v, position, time))
        distance = rows[:, None] - torch.arange(5000)
        bucket = TimeBuckets(time.numel() - 1).buckets(queries[rows, None] - keys[None, :5000])
        scores = 0.7 * torch.einsum("ihd,jhd->hij", q[rows], k[:5000]) + position[distance.clamp(min=0)] + time[bucket]
        return 0.05 * torch.einsum("hij,jhd->ihd", F.silu(scores) * (distance >= 0), v[:5000])

    assert max(max_errors(lambda *x: operator(*x)[rows], formula, tensors, relative=True)) < tolerance


def test_integers_of_32_bits(backend):
    tensors, offsets, queries, keys = inputs_of([40, 0, 3], dtype=TOLERANCES[backend][0])
    wide, _ = pair(offsets, queries, keys, backend=backend)
    narrow, _ = pair(offsets.int(), queries.int(), keys.int(), backend=backend)
    assert torch.equal(wide(*tensors), narrow(*tensors))


def test_elements_beyond_32_bits(backend):
    tensors, offsets, queries, keys = inputs_of([1, 3], qk_dim=4, v_dim=4, dtype=torch.float32)
    q, k, v, position, time = (x.detach() for x in tensors)
    options = (offsets, position, time, queries, keys, 0.1, 1.0, 1.0, 0.301, "causal", backend)
    results = [[_hstu_attention(q, k, x, *options), *_hstu_attention_backward(v, q, k, x, *options)] for x in (v, far_apart(v))]
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


def test_a_wrong_bias_is_noticed(backend):
    """Negative control of the test above: one entry of a table moved by a thousandth."""
    dtype, tolerance = TOLERANCES[backend]
    tensors, offsets, queries, keys = inputs_of([64, 3], dtype=dtype)
    operator, reference = pair(offsets, queries, keys, backend=backend)
    nudge = torch.zeros_like(tensors[3]).index_fill_(0, torch.tensor([5]), 1e-3)
    errors = max_errors(operator, lambda q, k, v, p, t: reference(q, k, v, p + nudge, t), tensors, relative=True)
    assert errors[0] > tolerance


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 2e-5), (torch.bfloat16, 0.1)])
def test_lower_precision_stays_near_the_reference(dtype, tolerance):
    tensors, offsets, queries, keys = inputs_of([150, 3, 70], dtype=dtype)
    operator, reference = pair(offsets, queries, keys)
    assert operator(*tensors).dtype == dtype
    assert max(max_errors(operator, reference, tensors)) < tolerance


@settings(max_examples=25, deadline=None)
@given(
    lengths=st.lists(st.integers(0, 70), max_size=6),
    heads=st.integers(1, 4),
    qk_dim=st.integers(1, 20),
    v_dim=st.integers(1, 20),
    seed=st.integers(0, 99),
)
def test_any_shape_equals_the_reference(lengths, heads, qk_dim, v_dim, seed):
    for backend, (dtype, tolerance) in TOLERANCES.items():
        if backend == "cpp" and KERNEL.library() is None:
            continue
        tensors, offsets, queries, keys = inputs_of(lengths, heads, qk_dim, v_dim, dtype, seed)
        operator, reference = pair(offsets, queries, keys, backend=backend)
        # Few terms can cancel: relative to the largest value, a float32 gradient of so small a case may be less exact.
        assert max(max_errors(operator, reference, tensors, relative=dtype == torch.float32)) < 10 * tolerance


def test_causal_and_within_a_sequence(backend):
    tensors, offsets, queries, keys = inputs_of([5, 4], dtype=TOLERANCES[backend][0])
    operator, _ = pair(offsets, queries, keys, backend=backend)
    before = operator(*tensors)
    with torch.no_grad():
        for tensor in tensors[:3]:
            tensor[3] += 1.0  # token 3 of sequence 0
    changed = (operator(*tensors) - before).abs().sum((1, 2)) > 0
    assert changed.tolist() == [False, False, False, True, True, False, False, False, False]


def test_the_time_unit_scales_the_gaps(backend):
    tensors, offsets, queries, keys = inputs_of([30], dtype=TOLERANCES[backend][0])
    seconds, _ = pair(offsets, queries, keys, backend=backend)
    milliseconds, _ = pair(offsets, queries * 1000, keys * 1000, backend=backend, time_unit=1000.0)
    mistaken, _ = pair(offsets, queries * 1000, keys * 1000, backend=backend)
    torch.testing.assert_close(seconds(*tensors), milliseconds(*tensors))
    assert not torch.allclose(seconds(*tensors), mistaken(*tensors))


@pytest.mark.parametrize("step", [2**40, 2**55])
def test_times_that_span_more_than_32_bits(backend, step):
    dtype, tolerance = TOLERANCES[backend]
    tensors, offsets, queries, keys = inputs_of([40, 2], dtype=dtype)
    far = torch.arange(42) * step
    operator, reference = pair(offsets, queries + far, keys + far, backend=backend, time_divisor=2.0)
    assert max(max_errors(operator, reference, tensors, relative=True)) < tolerance


def test_opcheck(backend):
    dtype, _ = TOLERANCES[backend]
    tensors, offsets, queries, keys = inputs_of([3, 0, 6], heads=2, qk_dim=2, v_dim=3, dtype=dtype)
    options = (queries, keys, 0.1, 1.0, 1.0, 0.301, "causal", backend)
    torch.library.opcheck(_hstu_attention, (*tensors[:3], offsets, *tensors[3:], *options))
    torch.library.opcheck(_hstu_attention, (*tensors[:3], offsets, None, None, None, None, *options[2:]))
    # Dense but permuted inputs: their gradients have the strides that the fake implementation promises.
    permuted = [x.detach().transpose(0, 2).contiguous().transpose(0, 2).requires_grad_() for x in tensors[:3]]
    torch.library.opcheck(_hstu_attention, (*permuted, offsets, *tensors[3:], *options))


def test_fake_tensors_and_a_whole_graph(backend):
    tensors, offsets, queries, keys = inputs_of([3, 0, 6], dtype=TOLERANCES[backend][0])
    operator, _ = pair(offsets, queries, keys, backend=backend)
    with FakeTensorMode(allow_non_fake_inputs=True):
        assert operator(*tensors).shape == (9, 2, 5)
    compiled = torch.compile(operator, backend="aot_eager", fullgraph=True)
    results = [torch.autograd.grad(function(*tensors).square().sum(), tensors) for function in (compiled, operator)]
    for actual, expected in zip(*results, strict=True):
        torch.testing.assert_close(actual, expected)


def test_gradcheck():
    tensors, offsets, queries, keys = inputs_of([3, 0, 6], heads=1, qk_dim=2, v_dim=3)
    operator, _ = pair(offsets, queries, keys)
    assert torch.autograd.gradcheck(operator, tensors)


def test_strided_inputs(backend):
    dtype, tolerance = TOLERANCES[backend]
    tensors, offsets, queries, keys = inputs_of([9, 4, 70], v_dim=8, dtype=dtype)
    packed = torch.cat([x.detach().flatten(1) for x in tensors[:3]], dim=1).requires_grad_()
    operator, reference = pair(offsets, queries, keys, backend=backend)

    def on_views(function):
        def run(packed, position, time):
            views = [x.unflatten(1, (2, 8)) for x in packed.split(16, dim=1)]
            assert not views[0].is_contiguous()
            return function(*views, position, time)

        return run

    assert max(max_errors(on_views(operator), on_views(reference), [packed, *tensors[3:]], relative=True)) < tolerance
    transposed = [x.detach().transpose(1, 2).contiguous().transpose(1, 2).requires_grad_() for x in tensors[:3]]
    assert transposed[0].stride(2) != 1
    assert max(max_errors(operator, reference, [*transposed, *tensors[3:]], relative=True)) < tolerance
    # The gradient of a sum is one number, expanded: all its strides are zero.
    summed = [torch.autograd.grad(function(*tensors).sum(), tensors) for function in (operator, reference)]
    for actual, expected in zip(*summed, strict=True):
        torch.testing.assert_close(actual, expected, rtol=1e-4, atol=1e-4)


def test_keeps_no_square_matrix(backend):
    """What autograd keeps is linear in tokens, and the peak stays below one score matrix, which the reference exceeds."""
    length = 1500
    tensors, offsets, queries, keys = inputs_of([length], heads=1, dtype=torch.float32)
    operator, reference = pair(offsets, queries, keys, backend=backend)
    kept = []
    with torch.autograd.graph.saved_tensors_hooks(lambda x: (kept.append(x.numel()), x)[1], lambda x: x):
        operator(*tensors)
    assert 0 < sum(kept) < 40 * length
    assert allocations(lambda: operator(*tensors).sum().backward())[1] < 4 * length**2
    assert allocations(lambda: reference(*tensors).sum().backward())[1] > 4 * length**2


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"k": torch.zeros(4, 2, 3)}, r"q and k are \[T, H, dqk\]"),
        ({"v": torch.zeros(5, 2, 3)}, r"v is \[T, H, dv\]"),
        ({"q": torch.zeros(4, 2, 2).half()}, "share one floating dtype"),
        ({"offsets": torch.tensor([0, 4], dtype=torch.int16)}, "offsets is int64 or int32"),
        ({"position_bias": torch.zeros(2, 2)}, "position_bias is a float table"),
        ({"position_bias": torch.zeros(3)}, "position_bias has 3 entries, the longest sequence 4 tokens"),
        ({"query_times": None}, "needs query_times"),
        ({"key_times": torch.zeros(3, dtype=torch.int64)}, "needs key_times"),
        ({"time_unit": 0.0}, "must be positive"),
        ({"offsets": torch.tensor([0, 3])}, "offsets rise from 0 to 4"),
        ({"offsets": torch.tensor([0, 5, 4])}, "offsets rise from 0 to 4"),
        ({"backend": "cuda"}, "backend must be one of auto, cpp, torch, reference, got 'cuda'"),
    ],
)
def test_wrong_inputs_are_named(change, message):
    arguments = {
        "q": torch.zeros(4, 2, 2),
        "k": torch.zeros(4, 2, 2),
        "v": torch.zeros(4, 2, 3),
        "offsets": torch.tensor([0, 4]),
        "scale": 1.0,
        "position_bias": torch.zeros(4),
        "time_bias": torch.zeros(5),
        "query_times": torch.zeros(4, dtype=torch.int64),
        "key_times": torch.zeros(4, dtype=torch.int64),
    }
    jagged_hstu_attention(**arguments)
    with pytest.raises(ValueError, match=message):
        jagged_hstu_attention(**{**arguments, **change})


def test_backend_cpp_refuses_what_it_cannot_compute():
    tensors, offsets, queries, keys = inputs_of([4])
    operator, _ = pair(offsets, queries, keys, backend="cpp")
    with pytest.raises(ConfigurationError, match=r"computes float32 or bfloat16 on the CPU, got torch.float64 on cpu"):
        operator(*tensors)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_backend_reference_is_the_reference(dtype):
    tensors, offsets, queries, keys = inputs_of([9, 4], dtype=dtype)
    operator, reference = pair(offsets, queries, keys, backend="reference")
    assert operator(*tensors).dtype == dtype
    assert max(max_errors(operator, reference, tensors)) < (1e-15 if dtype == torch.float64 else 1e-5)
