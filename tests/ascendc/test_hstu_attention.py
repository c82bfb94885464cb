"""The AscendC kernels of HSTU attention on the stand-in: against the float64 reference, in any order on any number of cores."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch

from tests.ascendc.build import StandInError
from tests.ascendc.hstu import TOLERANCES, backward, case_of, forward, worst
from tests.ascendc.test_hstu_tiling import facts_of
from tests.ops import parity
from tests.ops.jagged_cases import LENGTHS, WIDTHS
from turbogr.ops.time_buckets import bucket_thresholds

SELECT_RESERVE = 8 * 1024
BLOCKS = [255, 256, 257, 0, 320, 321]
"""Around a task's rows."""


def assert_parity(case, cores=2, seed=1):
    expected = case.reference()
    tolerance = TOLERANCES[case.q.dtype]
    out, _ = forward(case, cores, seed)
    assert worst([out], expected[:1], tolerance) <= tolerance
    gradients, _ = backward(case, cores, seed)
    assert worst(gradients, expected[1:], tolerance) <= tolerance


@pytest.mark.parametrize("time", [True, False])
@pytest.mark.parametrize("position", [True, False])
@pytest.mark.parametrize("lengths", [*LENGTHS.values(), BLOCKS], ids=[*LENGTHS, "edges of a task"])
def test_equals_the_reference_with_all_gradients(lengths, position, time):
    assert_parity(case_of(lengths, position=position, time=time))


@pytest.mark.parametrize(("heads", "qk_dim", "v_dim"), [*WIDTHS, (1, 200, 512)])
def test_all_widths_and_heads(heads, qk_dim, v_dim):
    assert_parity(case_of([0, 1, 2, 63, 64, 65, 0, 127, 129], heads, qk_dim, v_dim))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize(("heads", "qk_dim", "v_dim"), [(1, 8, 8), (2, 16, 33), (3, 50, 50), (6, 1, 1), (4, 32, 64)])
def test_narrow_dtypes(heads, qk_dim, v_dim, dtype):
    """With the factor 1 / longest length of the models: rounding an output is then below the tolerance."""
    for lengths in ([63, 64, 65, 0, 1, 2], [300]):
        assert_parity(replace(case_of(lengths, heads, qk_dim, v_dim, dtype), scale=1 / max(lengths)))


def test_the_input_of_the_parity_matrix():
    """Widths that are no multiples of anything, times that rise by up to a month."""
    torch.manual_seed(3)
    (q, k, v), offsets, times = parity.attention_inputs()
    case = replace(
        case_of(parity.LENGTHS, 3, 17, 33),
        q=q,
        k=k,
        v=v,
        query_times=times + 1000,
        key_times=times,
        alpha=0.3,
        time=torch.randn(60),
    )
    assert torch.equal(case.offsets, offsets)
    assert_parity(case, cores=7)


def test_a_wrong_factor_is_seen():
    """Negative control of the comparison, of every tensor."""
    case = case_of([130, 40])
    expected = replace(case, alpha=case.alpha * 1.01).reference()
    actual = [forward(case)[0], *backward(case)[0]]
    for a, b in zip(actual, expected, strict=True):
        assert worst([a], [b], 1e-4) > 0.01


def same(first, second):
    return all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


def test_any_number_of_cores_in_any_order():
    """Output and gradients of q, k and v are the same bits for all of them, the tables' for any order of the same cores."""
    case = case_of([300, 0, 64, 17, 257, 1], heads=2, qk_dim=16, v_dim=8)
    expected = case.reference()
    outputs = {(cores, seed): forward(case, cores, seed)[0] for cores in (1, 2, 7, 24) for seed in (1, 2)}
    assert all(torch.equal(x, outputs[1, 1]) for x in outputs.values())
    gradients = {(cores, seed): backward(case, cores, seed)[0] for cores in (1, 2, 7, 24) for seed in (1, 2)}
    for cores in (1, 2, 7, 24):
        assert worst(gradients[cores, 1], expected[1:], 1e-4) <= 1e-4
        assert same(gradients[cores, 1], gradients[cores, 2])
        assert same(gradients[cores, 1][:3], gradients[1, 1][:3])
    assert not torch.equal(gradients[1, 1][4], gradients[24, 1][4]), "negative control: sums over cores are another order"


def test_all_cores_at_once():
    """Seed 0: the system decides who runs when."""
    case = case_of([300, 70, 64])
    assert same(backward(case, 7, 0)[0], backward(case, 7, 1)[0])


def test_times_in_no_order():
    g = torch.Generator().manual_seed(1)
    case = case_of([200, 3, 65])
    shuffled = case.key_times[torch.randperm(case.key_times.numel(), generator=g)]
    for queries, keys in ((case.query_times, shuffled), (case.key_times - 5, case.key_times), (shuffled, case.key_times)):
        assert_parity(replace(case, query_times=queries, key_times=keys))


BUCKETS = [
    (128, 0.301, 1.0),
    (128, 0.301, 1000.0),
    (32, 0.5, 60.0),
    (64, math.log(2), 1.0),  # every power of two is a threshold
    (20, 2.0, 1e-3),
    (300, 0.05, 1.0),
    (150, 0.001, 1.0),
    (1, 0.301, 1.0),
]


@pytest.mark.parametrize("start", [0, 1_650_000_000_000, -(2**61)])
@pytest.mark.parametrize(("count", "divisor", "unit"), BUCKETS)
def test_buckets_are_those_of_float64_at_every_threshold(count, divisor, unit, start):
    """64 sequences whose pairs have the gaps around each threshold, of either sign; the time bias is all there is."""
    thresholds = bucket_thresholds(count, unit, divisor)
    near = (thresholds[thresholds < 2**60, None] + torch.tensor([-1, 0])).flatten()
    spread = torch.logspace(0, math.log10(2**60), 50, dtype=torch.float64).long()
    gaps = torch.cat([near, spread, torch.arange(3)])
    gaps = gaps[torch.randperm(gaps.numel(), generator=torch.Generator().manual_seed(2))][:600]
    signs = torch.tensor([1, -1]).repeat(gaps.numel())[: gaps.numel()]
    tokens = gaps.numel()
    case = case_of([1] * tokens, heads=1, qk_dim=1, v_dim=1)
    table = torch.linspace(-2, 2, count)
    case = replace(
        case,
        q=torch.zeros(tokens, 1, 1),
        v=torch.ones(tokens, 1, 1),
        position=None,
        time=table,
        scale=1.0,
        unit=unit,
        divisor=divisor,
        key_times=torch.full((tokens,), start),
        query_times=start + signs * gaps,
    )
    expected = case.reference()[0]
    assert float((forward(case)[0].double() - expected).abs().max()) < 1e-6
    if count > 1:
        moved = replace(case, query_times=case.query_times + signs).reference()[0]
        assert float((moved - expected).abs().max()) > 4 / count / 4, "negative control: one tick is another bucket"


def test_thresholds_in_one_long_sequence():
    """All pairs of a sequence of 300 tokens with times at thresholds, forward and backward."""
    thresholds = bucket_thresholds(60, 1.0, 0.301)
    times = torch.cat([thresholds - 1, thresholds, thresholds + 1, thresholds * 2, torch.arange(64)]).sort().values
    case = replace(case_of([times.numel()]), time=torch.randn(60), key_times=times, query_times=times.roll(-1))
    assert_parity(case)


@pytest.mark.parametrize(
    ("change", "message"), [({"divisor": 1e-5}, "a time_divisor of"), ({"time": torch.zeros(9000)}, "time table does not fit")]
)
def test_what_the_tiling_refuses(change, message):
    case = replace(case_of([3]), **change)
    with pytest.raises(StandInError, match=message):
        forward(case)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("positions", "times"), [(0, 0), (80, 0), (0, 28), (80, 28), (80, 1000)])
def test_local_memory_is_what_the_tiling_says(positions, times, dtype):
    case = case_of([70], dtype=dtype)
    case = replace(case, position=torch.randn(positions) if positions else None, time=torch.randn(times) if times else None)
    facts = facts_of(70, 2, 8, 5, case.q.element_size(), positions, times, 1)
    assert forward(case, 1)[1].peak_local_bytes + SELECT_RESERVE == facts["local_forward"]
    assert backward(case, 1)[1].peak_local_bytes + SELECT_RESERVE == facts["local_backward"]


def test_no_byte_and_no_operation_is_spent_on_padding():
    """A batch takes what its sequences take one by one: nothing is converted, nothing padded to the longest."""
    lengths, fields = [300, 1, 64, 5], ("bytes_global", "vector_elements", "cube_multiply_adds", "matmuls")
    options = {"heads": 2, "position": False, "time": False}
    for run in (forward, backward):
        together = run(case_of(lengths, **options), 1)[1]
        apart = [run(case_of([x], **options), 1)[1] for x in lengths]
        padded = run(case_of([max(lengths)] * len(lengths), **options), 1)[1]
        for field in fields:
            assert getattr(together, field) == sum(getattr(x, field) for x in apart)
            assert getattr(together, field) < 0.5 * getattr(padded, field), "negative control: padded to the longest"


@pytest.mark.parametrize("lengths", [[64], [300], [130, 65, 64, 63], [600]])
def test_bias_gradients_need_few_scalar_operations(lengths):
    """At most an eighth of one read-modify-write per pair and table, all of the kernel's scalar operations counted."""
    pairs = sum(n * (n + 1) // 2 for n in lengths)
    for heads in (1, 3):
        counters = backward(case_of(lengths, heads), 2)[1]
        assert counters.scalar_operations <= 2 * pairs / 8
    apart = [backward(case_of(lengths, position=p, time=t), 2)[1].scalar_operations for p, t in ((True, False), (False, False))]
    assert apart[0] == apart[1], "the position table's gradient takes no scalar operation at all"


def test_cores_meet_once():
    """Before the tables' sums are added up. Where cores got into each other's way otherwise, the stand-in would throw."""
    case = case_of([300, 70])
    assert (forward(case, 7)[1].barriers, backward(case, 7)[1].barriers) == (0, 1)
    assert backward(case_of([300, 70], position=False, time=False), 7)[1].barriers == 0
