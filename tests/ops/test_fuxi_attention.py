from __future__ import annotations

from functools import partial

import pytest
import torch
from _memory import allocations
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.ops.jagged_cases import LENGTHS, far_apart, max_errors, offsets_of
from turbogr.errors import ConfigurationError
from turbogr.ops.fuxi_attention import (
    KERNEL,
    _fuxi_attention,
    _fuxi_attention_backward,
    jagged_fuxi_attention,
    jagged_fuxi_attention_reference,
)
from turbogr.ops.masks import register_mask

TOLERANCES = {"torch": (torch.float64, 1e-11), "cpp": (torch.float32, 1e-5)}
"""By back end: the dtype it is checked in, and the largest error relative to the largest value."""

CHANNELS = ["bucketed", "functional", None]


@pytest.fixture(params=TOLERANCES)
def backend(request):
    if request.param == "cpp" and KERNEL.library() is None:
        pytest.skip(KERNEL.failure())
    return request.param


def window(query_position, key_position):
    return query_position - key_position < 3


def inputs_of(lengths, heads=2, qk_dim=8, v_dim=5, dtype=torch.float64, seed=0):
    """q, k, v, position table, time table, and the time function's three numbers; then offsets and both times."""
    g = torch.Generator().manual_seed(seed)
    offsets = offsets_of(lengths)
    tokens = int(offsets[-1])
    q, k = (torch.randn(tokens, heads, qk_dim, generator=g, dtype=torch.float64) for _ in range(2))
    v = torch.randn(tokens, heads, v_dim, generator=g, dtype=torch.float64)
    position = torch.randn(max([1, *lengths]) + 3, generator=g, dtype=torch.float64)
    time = torch.randn(28, generator=g, dtype=torch.float64)  # the last bucket begins at 3386
    function = [torch.tensor(x, dtype=torch.float64) for x in (-0.8, 0.9, 0.6)]
    keys = torch.rand(tokens, generator=g).mul(6).exp().long().cumsum(0)
    gaps = torch.rand(tokens, generator=g).mul(6).exp().long()
    queries = keys + torch.where(torch.rand(tokens, generator=g) < 0.1, 0, gaps)  # some gaps are 0
    tensors = [x.to(dtype).requires_grad_() for x in (q, k, v, position, time, *function)]
    return tensors, offsets, queries, keys


def pair(offsets, queries, keys, channel="functional", use_position=True, backend="auto", **options):
    """The operator and the reference, both of the tensors of `inputs_of`."""
    options = {"scale": 0.05, "alpha": 0.7, "time_unit": 60.0 if channel == "functional" else 1.0, **options}

    def call(function):
        def run(q, k, v, position, time, *numbers):
            return function(
                q,
                k,
                v,
                offsets,
                position_bias=position if use_position else None,
                time_bias=time if channel == "bucketed" else None,
                time_function=numbers if channel == "functional" else None,
                query_times=queries if channel else None,
                key_times=keys if channel else None,
                **options,
            )

        return run

    return call(partial(jagged_fuxi_attention, backend=backend)), call(jagged_fuxi_attention_reference)


def worst_error(operator, reference, tensors, offsets):
    """Largest error of the output and of each gradient, relative to its largest value.

    The gradient of the time function's three numbers is a sum over all pairs and may by chance come out near 0: its error is
    relative to the size that a sum of so many terms of both signs has.
    """
    relative = max_errors(operator, reference, tensors, relative=True)
    absolute = max_errors(operator, reference, tensors)
    lengths = offsets.diff().double()
    _, heads, width = tensors[2].shape
    size = max(1.0, float((lengths * (lengths + 1)).sum() / 2 * heads * width) ** 0.5)
    return max(*relative[:6], *(min(a, b / size) for a, b in zip(relative[6:], absolute[6:], strict=True)))


@pytest.mark.parametrize("channel", CHANNELS)
@pytest.mark.parametrize("use_position", [True, False])
@pytest.mark.parametrize("lengths", LENGTHS.values(), ids=LENGTHS.keys())
def test_equals_the_reference_with_all_gradients(lengths, use_position, channel, backend):
    dtype, tolerance = TOLERANCES[backend]
    tensors, offsets, queries, keys = inputs_of(lengths, dtype=dtype)
    operator, reference = pair(offsets, queries, keys, channel, use_position, backend)
    assert worst_error(operator, reference, tensors, offsets) < tolerance


@pytest.mark.parametrize(("index", "channel"), [(3, "bucketed"), (4, "bucketed"), (5, "functional"), (6, "functional")])
def test_a_wrong_weight_is_noticed(index, channel, backend):
    """Negative control of the test above: one number moved by a thousandth."""
    dtype, tolerance = TOLERANCES[backend]
    tensors, offsets, queries, keys = inputs_of([64, 3], dtype=dtype)
    operator, reference = pair(offsets, queries, keys, channel, backend=backend)

    def nudged(*x):
        moved = x[index] + torch.zeros_like(x[index]).index_fill_(0, torch.tensor([5]), 1e-3) if index < 5 else x[index] + 1e-3
        return reference(*x[:index], moved, *x[index + 1 :])

    assert max_errors(operator, nudged, tensors, relative=True)[0] > tolerance


@pytest.mark.parametrize("channel", CHANNELS)
def test_the_slots_of_a_head_are_position_time_semantic(channel, backend):
    tensors, offsets, queries, keys = inputs_of([7], dtype=TOLERANCES[backend][0])
    full = pair(offsets, queries, keys, channel, backend=backend)[0](*tensors)
    assert full.shape == (7, 2, 15)
    without = pair(offsets, queries, keys, None, False, backend)[0](*tensors)
    assert without[..., :10].count_nonzero() == 0
    torch.testing.assert_close(full[..., 10:], without[..., 10:])
    first = tensors[2][0]  # row 0 sees itself only
    torch.testing.assert_close(full[0, :, :5], tensors[3][0] * first)
    if channel is None:
        assert full[..., 5:10].count_nonzero() == 0
    else:
        assert full[..., 5:10].count_nonzero() > 0


@pytest.mark.parametrize("channel", CHANNELS)
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 2e-5), (torch.bfloat16, 2e-2)])
def test_lower_precision_stays_near_the_reference(dtype, tolerance, channel):
    tensors, offsets, queries, keys = inputs_of([150, 3, 70], dtype=dtype)
    operator, reference = pair(offsets, queries, keys, channel, backend="torch")
    assert operator(*tensors).dtype == dtype
    assert max(max_errors(operator, reference, tensors, relative=True)) < tolerance


@pytest.mark.parametrize("channel", CHANNELS)
def test_bfloat16_with_parameters_in_float32(channel):
    """As under autocast: each gradient comes in its own tensor's dtype."""
    tensors, offsets, queries, keys = inputs_of([150, 3, 70], dtype=torch.float32)
    tensors[:3] = [x.detach().bfloat16().requires_grad_() for x in tensors[:3]]
    operator, reference = pair(offsets, queries, keys, channel)
    out = operator(*tensors)
    assert out.dtype == torch.bfloat16
    for tensor, gradient in zip(tensors, torch.autograd.grad(out.sum(), tensors, allow_unused=True), strict=True):
        assert gradient is None or gradient.dtype == tensor.dtype
    assert max(max_errors(operator, reference, tensors, relative=True)) < 2e-2


@settings(max_examples=25, deadline=None)
@given(
    lengths=st.lists(st.integers(0, 70), max_size=6),
    heads=st.integers(1, 4),
    qk_dim=st.integers(1, 20),
    v_dim=st.integers(1, 20),
    channel=st.sampled_from(CHANNELS),
    seed=st.integers(0, 99),
)
def test_any_shape_equals_the_reference(lengths, heads, qk_dim, v_dim, channel, seed):
    for backend, (dtype, tolerance) in TOLERANCES.items():
        if backend == "cpp" and KERNEL.library() is None:
            continue
        tensors, offsets, queries, keys = inputs_of(lengths, heads, qk_dim, v_dim, dtype, seed)
        operator, reference = pair(offsets, queries, keys, channel, backend=backend)
        # Few terms can cancel: a gradient of so small a case may be less exact.
        assert worst_error(operator, reference, tensors, offsets) < 10 * tolerance


@pytest.mark.parametrize("channel", CHANNELS)
def test_causal_and_within_a_sequence(channel, backend):
    tensors, offsets, queries, keys = inputs_of([5, 4], dtype=TOLERANCES[backend][0])
    operator, _ = pair(offsets, queries, keys, channel, backend=backend)
    before = operator(*tensors)
    with torch.no_grad():
        for tensor in tensors[:3]:
            tensor[3] += 1.0  # token 3 of sequence 0
    changed = (operator(*tensors) - before).abs().sum((1, 2)) > 0
    assert changed.tolist() == [False, False, False, True, True, False, False, False, False]


@pytest.mark.parametrize("channel", CHANNELS)
def test_a_mask_forbids_more(channel):
    register_mask("fuxi_window", window)
    tensors, offsets, queries, keys = inputs_of([140, 0, 5])
    operator, reference = pair(offsets, queries, keys, channel, mask="fuxi_window")
    assert max(max_errors(operator, reference, tensors)) < 1e-11
    causal, _ = pair(offsets, queries, keys, channel)
    assert not torch.allclose(operator(*tensors), causal(*tensors))
    with pytest.raises(ConfigurationError, match="backend cpp computes mask causal only"):
        pair(offsets, queries, keys, channel, mask="fuxi_window", backend="cpp")[0](*tensors)


@pytest.mark.parametrize("channel", ["bucketed", "functional"])
def test_the_time_unit_scales_the_gaps(channel, backend):
    tensors, offsets, queries, keys = inputs_of([30], dtype=TOLERANCES[backend][0])
    seconds, _ = pair(offsets, queries, keys, channel, backend=backend, time_unit=1.0)
    milliseconds, _ = pair(offsets, queries * 1000, keys * 1000, channel, backend=backend, time_unit=1000.0)
    mistaken, _ = pair(offsets, queries * 1000, keys * 1000, channel, backend=backend, time_unit=1.0)
    torch.testing.assert_close(seconds(*tensors), milliseconds(*tensors))
    assert not torch.allclose(seconds(*tensors), mistaken(*tensors))


@pytest.mark.parametrize("channel", ["bucketed", "functional"])
@pytest.mark.parametrize("step", [2**40, 2**55])
def test_times_that_span_more_than_32_bits(backend, step, channel):
    dtype, tolerance = TOLERANCES[backend]
    tensors, offsets, queries, keys = inputs_of([40, 2], dtype=dtype)
    far = torch.arange(42) * step
    unit = 1.0 if channel == "bucketed" else float(step)
    operator, reference = pair(offsets, queries + far, keys + far, channel, backend=backend, time_divisor=2.0, time_unit=unit)
    assert max(max_errors(operator, reference, tensors, relative=True)) < tolerance


@pytest.mark.parametrize("exponent", [0.05, 0.5, 1.0, 3.0])
@pytest.mark.parametrize("decay", [1e-6, 0.5, 0.999, 1.0])
@pytest.mark.parametrize("unit", [1.0, 60.0, 1e6])
def test_the_time_function_over_its_whole_range(unit, decay, exponent, backend):
    """Gaps from 0 to 3 10^9 ticks: weights from 1 to far below the smallest number, and no NaN in any gradient."""
    dtype, tolerance = TOLERANCES[backend]
    tensors, offsets, _, _ = inputs_of([40, 1], dtype=dtype)
    keys = torch.arange(41) // 2 * torch.logspace(0, 8, 41).long()
    with torch.no_grad():
        tensors[6].fill_(decay)
        tensors[7].fill_(exponent)
    operator, reference = pair(offsets, keys, keys, backend=backend, time_unit=unit)
    errors = max_errors(operator, reference, tensors, relative=True)
    # The decay's gradient grows with the largest power, which float32 knows to its own precision only.
    assert max(errors) < 10 * tolerance


def test_a_gap_of_zero_is_safe(backend):
    tensors, offsets, _, _ = inputs_of([5], dtype=TOLERANCES[backend][0])
    times = torch.full((5,), 7)
    operator, _ = pair(offsets, times, times, backend=backend)
    out = operator(*tensors)
    torch.testing.assert_close(out[..., 5:10], tensors[5] * tensors[2].cumsum(0))
    gradients = torch.autograd.grad(out.sum(), tensors[5:])
    assert gradients[0] != 0
    assert gradients[1] == gradients[2] == 0


def test_opcheck(backend):
    dtype, _ = TOLERANCES[backend]
    tensors, offsets, queries, keys = inputs_of([3, 0, 6], heads=2, qk_dim=2, v_dim=3, dtype=dtype)
    numbers = torch.stack([x.detach() for x in tensors[5:]]).requires_grad_()
    options = (0.1, 1.0, 1.0, 0.301)
    calls = [
        (tensors[3], tensors[4], queries, keys, *options, False),
        (tensors[3], numbers, queries, keys, *options, True),
        (None, None, None, None, *options, False),
    ]
    # Dense but permuted inputs: their gradients have the strides that the fake implementation promises.
    permuted = [x.detach().transpose(0, 2).contiguous().transpose(0, 2).requires_grad_() for x in tensors[:3]]
    for call in calls:
        torch.library.opcheck(_fuxi_attention, (*tensors[:3], offsets, *call, "causal", backend))
    torch.library.opcheck(_fuxi_attention, (*permuted, offsets, *calls[0], "causal", backend))


@pytest.mark.parametrize("channel", CHANNELS)
def test_gradcheck(channel):
    tensors, offsets, queries, keys = inputs_of([3, 0, 6], heads=1, qk_dim=2, v_dim=3)
    operator, _ = pair(offsets, queries, keys, channel)
    assert torch.autograd.gradcheck(operator, tensors)


@pytest.mark.parametrize("channel", CHANNELS)
def test_strided_inputs(channel, backend):
    dtype, tolerance = TOLERANCES[backend]
    tensors, offsets, queries, keys = inputs_of([9, 4, 70], v_dim=8, dtype=dtype)
    packed = torch.cat([x.detach().flatten(1) for x in tensors[:3]], dim=1).requires_grad_()
    operator, reference = pair(offsets, queries, keys, channel, backend=backend)

    def on_views(function):
        def run(packed, *rest):
            views = [x.unflatten(1, (2, 8)) for x in packed.split(16, dim=1)]
            assert not views[0].is_contiguous()
            return function(*views, *rest)

        return run

    assert max(max_errors(on_views(operator), on_views(reference), [packed, *tensors[3:]], relative=True)) < tolerance
    transposed = [x.detach().transpose(1, 2).contiguous().transpose(1, 2).requires_grad_() for x in tensors[:3]]
    assert transposed[0].stride(2) != 1
    assert max(max_errors(operator, reference, [*transposed, *tensors[3:]], relative=True)) < tolerance
    # The gradient of a sum is one number, expanded: all its strides are zero.
    summed = [
        torch.autograd.grad(function(*tensors).sum(), tensors, allow_unused=True, materialize_grads=True)
        for function in (operator, reference)
    ]
    for actual, expected in zip(*summed, strict=True):
        torch.testing.assert_close(actual, expected, rtol=1e-4, atol=1e-4)


def test_elements_beyond_32_bits(backend):
    tensors, offsets, queries, keys = inputs_of([1, 3], qk_dim=4, v_dim=4, dtype=torch.float32)
    q, k, v, position, *_ = (x.detach() for x in tensors)
    numbers, gradient = torch.tensor([0.1, 0.9, 0.6]), torch.ones(4, 2, 12)
    results = []
    for values in (v, far_apart(v)):
        inputs = (q, k, values, offsets, position, numbers, queries, keys, 0.4, 1.0, 60.0, 0.301, True, "causal", backend)
        results.append([_fuxi_attention(*inputs), *_fuxi_attention_backward(gradient, *inputs)])
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


def test_int32_offsets_and_times(backend):
    tensors, offsets, queries, keys = inputs_of([9, 4], dtype=TOLERANCES[backend][0])
    wide, _ = pair(offsets, queries, keys, backend=backend)
    narrow, _ = pair(offsets.int(), queries.int(), keys.int(), backend=backend)
    assert torch.equal(wide(*tensors), narrow(*tensors))


def test_autocast_does_not_change_the_arithmetic(backend):
    tensors, offsets, queries, keys = inputs_of([9, 4], dtype=torch.float32)
    operator, _ = pair(offsets, queries, keys, backend=backend)
    expected = operator(*tensors)
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(operator(*tensors), expected)


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


def numbers(amplitude=0.1, decay=0.5, exponent=1.0):
    return tuple(torch.tensor(x) for x in (amplitude, decay, exponent))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"k": torch.zeros(4, 2, 3)}, r"q and k are \[T, H, dqk\]"),
        ({"v": torch.zeros(5, 2, 3)}, r"v is \[T, H, dv\]"),
        ({"q": torch.zeros(4, 2, 2).half()}, "share one floating dtype"),
        ({"offsets": torch.tensor([0.0, 4.0])}, "offsets is int64 or int32"),
        ({"offsets": torch.tensor([0, 3])}, "offsets rise from 0 to 4"),
        ({"offsets": torch.tensor([0, 5, 4])}, "offsets rise from 0 to 4"),
        ({"position_bias": torch.zeros(2, 2)}, "position_bias is a float table"),
        ({"position_bias": torch.zeros(3)}, "position_bias has 3 entries, the longest sequence 4 tokens"),
        ({"query_times": None}, "time_bias needs query_times"),
        ({"key_times": torch.zeros(3, dtype=torch.int64)}, "time_bias needs key_times"),
        ({"time_unit": 0.0}, "must be positive"),
        ({"time_bias": torch.zeros(0)}, "time_bias is a float table"),
        ({"time_function": numbers()}, "got both"),
        ({"time_bias": None, "time_function": numbers(decay=0.0)}, r"decay must lie in \(0, 1\]"),
        ({"time_bias": None, "time_function": numbers(decay=1.5)}, r"decay must lie in \(0, 1\]"),
        ({"time_bias": None, "time_function": numbers(exponent=-1.0)}, "exponent be positive"),
        ({"time_bias": None, "time_function": numbers()[:2]}, "amplitude, decay and exponent, one float each"),
        ({"time_bias": None, "time_function": numbers(), "key_times": None}, "time_function needs key_times"),
        ({"backend": "cuda"}, "backend must be one of auto, cpp, torch, reference, got 'cuda'"),
        ({"mask": "nothing"}, "there is no mask 'nothing'"),
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
    jagged_fuxi_attention(**arguments)
    with pytest.raises(ValueError, match=message):
        jagged_fuxi_attention(**{**arguments, **change})


@pytest.mark.parametrize("channel", CHANNELS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_backend_reference_is_the_reference(dtype, channel):
    tensors, offsets, queries, keys = inputs_of([9, 4], dtype=dtype)
    operator, reference = pair(offsets, queries, keys, channel, backend="reference")
    assert operator(*tensors).dtype == dtype
    assert max(max_errors(operator, reference, tensors)) < (1e-15 if dtype == torch.float64 else 1e-5)
