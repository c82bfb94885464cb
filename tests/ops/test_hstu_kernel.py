"""The C++ kernel of HSTU attention beyond what every back end is tested on: shapes at tile edges, buckets, threads, memory."""

from __future__ import annotations

import math

import pytest
import torch
from torch.nn import functional as F

from tests.ops.jagged_cases import max_errors, offsets_of
from tests.ops.sanitizer import assert_clean
from tests.ops.test_hstu_attention import inputs_of, pair
from tests.ops.thread_counts import same_for_threads
from turbogr.errors import ConfigurationError
from turbogr.models.bias import TimeBuckets
from turbogr.ops import hstu_attention
from turbogr.ops.hstu_attention import KERNEL, jagged_hstu_attention
from turbogr.ops.native import Kernel
from turbogr.ops.time_buckets import bucket_thresholds

TOLERANCE = 1e-5
EDGES = [0, 1, 2, 63, 64, 65, 0, 127, 129]
BUCKETS = [
    (128, 0.301, 1.0),
    (128, 0.301, 1000.0),
    (32, 0.5, 60.0),
    (12, 0.7, 60.0),
    (64, math.log(2), 1.0),  # every power of two is a threshold
    (20, 2.0, 1e-3),
    (300, 0.05, 1.0),
    (150, 0.001, 1.0),  # too fine to guess: every bucket is looked up
    (1, 0.301, 1.0),
]


@pytest.fixture(autouse=True)
def _kernel():
    if KERNEL.library() is None:
        pytest.skip(KERNEL.failure())


@pytest.mark.parametrize(
    ("heads", "qk_dim", "v_dim"),
    [(1, 8, 8), (2, 16, 33), (3, 50, 50), (4, 32, 32), (5, 7, 65), (6, 1, 1), (7, 17, 128), (8, 128, 64)],
)
def test_edges_of_tiles_at_all_widths(heads, qk_dim, v_dim):
    tensors, offsets, queries, keys = inputs_of(EDGES, heads, qk_dim, v_dim, torch.float32)
    operator, reference = pair(offsets, queries, keys, backend="cpp", alpha=qk_dim**-0.5)
    assert max(max_errors(operator, reference, tensors, relative=True)) < TOLERANCE


def test_one_sequence_of_5000_tokens():
    """Against the formula for some rows: only they have a gradient, so that nothing of size [5000, 5000] is needed."""
    tensors, offsets, queries, keys = inputs_of([5000, 3], heads=2, dtype=torch.float32)
    rows = torch.cat([torch.tensor([0, 63, 64, 4999]), torch.randint(0, 5000, (100,))]).unique()
    operator, _ = pair(offsets, queries, keys, backend="cpp")

    def formula(q, k, v, position, time):
        q, k, v, position, time = (x.double() for x in (q, k, v, position, time))
        distance = rows[:, None] - torch.arange(5000)
        bucket = TimeBuckets(time.numel() - 1).buckets(queries[rows, None] - keys[None, :5000])
        scores = 0.7 * torch.einsum("ihd,jhd->hij", q[rows], k[:5000]) + position[distance.clamp(min=0)] + time[bucket]
        return 0.05 * torch.einsum("hij,jhd->ihd", F.silu(scores) * (distance >= 0), v[:5000])

    assert max(max_errors(lambda *x: operator(*x)[rows], formula, tensors, relative=True)) < TOLERANCE


def cpp(offsets, queries, keys, products):
    """The operator with the option `products`, which the reference does not have."""

    def run(q, k, v, position, time):
        return jagged_hstu_attention(
            q,
            k,
            v,
            offsets,
            scale=0.05,
            alpha=0.7,
            position_bias=position,
            time_bias=time,
            query_times=queries,
            key_times=keys,
            products=products,
            backend="cpp",
        )

    return run


@pytest.mark.parametrize(
    ("heads", "qk_dim", "v_dim"), [(1, 8, 8), (2, 16, 33), (3, 50, 50), (4, 32, 32), (5, 7, 65), (6, 1, 1), (7, 17, 128)]
)
def test_products_of_bfloat16(heads, qk_dim, v_dim):
    """Stated tolerance: 1% of the largest value, 0.5% of the root mean square."""
    tensors, offsets, queries, keys = inputs_of(EDGES, heads, qk_dim, v_dim, torch.float32)
    _, reference = pair(offsets, queries, keys)
    rounded = cpp(offsets, queries, keys, "bf16")
    errors = max_errors(rounded, reference, tensors, relative=True)
    assert max(errors) < 1e-2
    assert min(errors) > 1e-5, "negative control: something is rounded"
    out = rounded(*tensors).detach()
    expected = reference(*(x.detach().double() for x in tensors))
    assert float((out - expected).norm() / expected.norm()) < 5e-3


def test_products_are_known():
    tensors, offsets, queries, keys = inputs_of([3], dtype=torch.float32)
    with pytest.raises(ConfigurationError, match="products must be one of fp32, bf16, got 'fp16'"):
        cpp(offsets, queries, keys, "fp16")(*tensors)


@pytest.mark.parametrize("products", ["fp32", "bf16"])
def test_threads_do_not_change_a_bit(products):
    tensors, offsets, queries, keys = inputs_of([300, 5, 64, 1, 200], heads=4, qk_dim=16, v_dim=16, dtype=torch.float32)
    operator = cpp(offsets, queries, keys, products)

    def results_of():
        out = operator(*tensors)
        return [out, *torch.autograd.grad(out.square().sum(), tensors)]

    same_for_threads(results_of, tensors[0], (1, 2, 3, 2))


def bucket_of(gaps, count, divisor, unit, sign, alone, backend):
    """Buckets that the kernel uses: row b of the table holds b + 1, and an output that reads one value tells it."""
    tokens = gaps.numel()
    table = torch.arange(1.0, count + 2)
    if alone:  # one sequence a gap
        offsets, times, values = torch.arange(tokens + 1), torch.zeros(tokens, dtype=torch.int64), torch.ones(tokens, 1, 1)
        queries, keys = (times, gaps) if sign < 0 else (gaps, times)
    else:  # one sequence, whose last row sees every gap
        offsets, values = offsets_of([tokens]), torch.eye(tokens)[:, None]
        queries, keys = torch.zeros(tokens, dtype=torch.int64), -sign * gaps
    zeros = torch.zeros(tokens, 1, 1)
    out = jagged_hstu_attention(
        zeros,
        zeros,
        values,
        offsets,
        scale=1.0,
        time_bias=table,
        query_times=queries,
        key_times=keys,
        time_unit=unit,
        time_divisor=divisor,
        backend=backend,
    )
    read = out[:, 0, 0] if alone else out[-1, 0]
    return (read[:, None] - F.silu(table)).abs().argmin(1)


@pytest.mark.parametrize("backend", ["cpp", "torch"])
@pytest.mark.parametrize("layout", ["alone", "together", "in order"])
@pytest.mark.parametrize("sign", [1, -1])
@pytest.mark.parametrize("largest", [2**20, 2**50, 2**62])
@pytest.mark.parametrize(("count", "divisor", "unit"), BUCKETS)
def test_buckets_are_those_of_float64_at_every_threshold(count, divisor, unit, largest, sign, layout, backend):
    thresholds = bucket_thresholds(count + 1, unit, divisor)
    assert thresholds.shape == (count,)
    near = (thresholds[thresholds < largest, None] + torch.tensor([-2, -1, 0, 1, 2])).flatten()
    spread = torch.logspace(0, math.log10(largest), 100, dtype=torch.float64).long()
    gaps = torch.cat([near, spread, torch.arange(5)]).clamp(min=0)
    if layout == "in order":  # times that rise take shorter ways
        gaps = gaps.sort(descending=sign > 0).values
    expected = TimeBuckets(count, divisor, unit).buckets(gaps)
    assert torch.equal(bucket_of(gaps, count, divisor, unit, sign, layout == "alone", backend), expected)
    if count > 1:
        assert expected.unique().numel() > 1, "negative control: the gaps tell buckets apart"


def test_times_in_no_order():
    """Times usually rise within a sequence and no query is before its own key; nothing depends on that but speed."""
    tensors, offsets, queries, keys = inputs_of([200, 3, 65], dtype=torch.float32)
    shuffled = keys[torch.randperm(keys.numel(), generator=torch.Generator().manual_seed(1))]
    for times in ((queries, shuffled), (keys - 5, keys), (shuffled, keys)):
        operator, reference = pair(offsets, *times, backend="cpp")
        assert max(max_errors(operator, reference, tensors, relative=True)) < TOLERANCE


def test_thresholds_are_the_smallest_gaps_of_their_buckets():
    thresholds = bucket_thresholds(129, 1.0, 0.301)
    reachable = thresholds < 2**60
    buckets = TimeBuckets(128, 0.301, 1.0)
    wanted = torch.arange(1, 129)[reachable]
    assert (buckets.buckets(thresholds[reachable]) >= wanted).all()
    assert (buckets.buckets(thresholds[reachable] - 1) < wanted).all()


@pytest.mark.parametrize("width", [(16, 16), (7, 33)])
def test_bfloat16_is_rounded_at_the_ends_only(width):
    """Inputs and outputs hold bfloat16: the results are those of float32 on the same numbers, rounded once."""
    tensors, offsets, queries, keys = inputs_of(EDGES, 3, *width, torch.bfloat16)
    operator, _ = pair(offsets, queries, keys, backend="cpp")

    def step(leaves, gradient):
        out = operator(*leaves)
        return out, *torch.autograd.grad(out, leaves, gradient.to(out.dtype))

    gradient = torch.randn(tensors[2].shape, generator=torch.Generator().manual_seed(3)).bfloat16()
    wide = [x.detach().float().requires_grad_() for x in tensors]
    for actual, expected in zip(step(tensors, gradient), step(wide, gradient), strict=True):
        assert actual.dtype == torch.bfloat16
        assert torch.equal(actual, expected.bfloat16())


@pytest.mark.parametrize("value", [torch.nan, torch.inf])
@pytest.mark.parametrize("products", ["fp32", "bf16"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("which", [0, 1, 2])
def test_damaged_numbers_stay_visible(which, dtype, products, value):
    tensors, offsets, queries, keys = inputs_of([70, 3], dtype=dtype)
    with torch.no_grad():
        tensors[which][5, 1, 2] = value
    actual = cpp(offsets, queries, keys, products)(*tensors).isfinite()
    expected = pair(offsets, queries, keys, backend="torch")[0](*tensors).isfinite()
    assert torch.equal(actual, expected)
    assert not actual.all()


@pytest.mark.slow
@pytest.mark.parametrize("flags", ["-mno-avx512f", "-mno-avx"])
def test_narrower_vectors(flags, monkeypatch, tmp_path):
    """The same source for processors with AVX2 and with four lanes only."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setenv("CXX", f"g++ {flags}")
    kernel = Kernel("hstu_attention")
    if kernel.library() is None:
        pytest.skip(f"g++ {flags} does not build here: {kernel.failure()}")
    monkeypatch.setattr(hstu_attention, "KERNEL", kernel)
    test_edges_of_tiles_at_all_widths(3, 50, 33)
    test_edges_of_tiles_at_all_widths(2, 7, 8)
    test_bfloat16_is_rounded_at_the_ends_only((7, 33))
    test_products_of_bfloat16(3, 50, 33)
    for sign, layout in ((1, "alone"), (-1, "together"), (1, "in order")):
        test_buckets_are_those_of_float64_at_every_threshold(128, 0.301, 1.0, 2**50, sign, layout, "cpp")


@pytest.mark.slow
def test_no_access_outside_and_no_undefined_behaviour(tmp_path):
    assert_clean("hstu_attention", "hstu_sanitizer.cpp", tmp_path)
