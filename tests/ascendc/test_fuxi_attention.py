"""The AscendC kernels of FuXi's attention on the stand-in: against the float64 reference, in any order of cores."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from tests.ascendc.build import StandInError
from tests.ascendc.fuxi import CHANNELS, backward, case_of, forward
from tests.ascendc.hstu import TOLERANCES, worst
from tests.ascendc.test_fuxi_tiling import facts_of
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


@pytest.mark.parametrize("channel", CHANNELS)
@pytest.mark.parametrize("position", [True, False])
@pytest.mark.parametrize("lengths", [*LENGTHS.values(), BLOCKS], ids=[*LENGTHS, "edges of a task"])
def test_equals_the_reference_with_all_gradients(lengths, position, channel):
    assert_parity(case_of(lengths, position=position, channel=channel))


@pytest.mark.parametrize("channel", ["bucketed", "functional"])
@pytest.mark.parametrize(("heads", "qk_dim", "v_dim"), [*WIDTHS, (1, 200, 512)])
def test_all_widths_and_heads(heads, qk_dim, v_dim, channel):
    assert_parity(case_of([0, 1, 2, 63, 64, 65, 0, 127, 129], heads, qk_dim, v_dim, channel=channel))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize(("heads", "qk_dim", "v_dim"), [(1, 8, 8), (2, 16, 33), (3, 50, 50), (6, 1, 1), (4, 32, 64)])
def test_narrow_dtypes(heads, qk_dim, v_dim, dtype):
    """Outputs stay near 1: rounding one is then below the tolerance."""
    for lengths, channel in (([63, 64, 65, 0, 1, 2], "bucketed"), ([150], "functional")):
        assert_parity(case_of(lengths, heads, qk_dim, v_dim, dtype, channel=channel))


@pytest.mark.parametrize("channel", ["bucketed", "functional"])
def test_the_input_of_the_parity_matrix(channel):
    """Widths that are no multiples of anything, times that rise by up to a month, tables of the size of v."""
    torch.manual_seed(3)
    (q, k, v), offsets, times = parity.attention_inputs()
    functional = channel == "functional"
    case = replace(
        case_of(parity.LENGTHS, 3, 17, 33, channel=channel),
        q=q,
        k=k,
        v=v,
        position=torch.randn(max(parity.LENGTHS)),
        time=torch.tensor([0.7, 0.9, 0.4]) if functional else torch.randn(60),
        query_times=times + 1000,
        key_times=times,
        scale=0.1,
        alpha=1.0,
        unit=86400.0 if functional else 1.0,
    )
    assert torch.equal(case.offsets, offsets)
    assert_parity(case, cores=7)


@pytest.mark.parametrize("channel", ["bucketed", "functional"])
def test_a_wrong_factor_is_seen(channel):
    """Negative control of the comparison, of every tensor."""
    case = case_of([130, 40], channel=channel)
    actual = [forward(case)[0], *backward(case)[0]]
    expected = replace(case, v=case.v * 1.02, gradient=case.gradient * 1.02).reference()
    for a, b in zip(actual, expected, strict=True):
        assert worst([a], [b], 1e-4) > 0.01


def same(first, second):
    return all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


@pytest.mark.parametrize("channel", ["bucketed", "functional"])
def test_any_number_of_cores_in_any_order(channel):
    """Output and gradients of q, k and v are the same bits for all of them, the tables' for any order of the same."""
    case = case_of([300, 0, 64, 17, 257, 1], heads=2, qk_dim=16, v_dim=8, channel=channel)
    expected = case.reference()
    outputs = {(cores, seed): forward(case, cores, seed)[0] for cores in (1, 2, 7, 24) for seed in (1, 2)}
    assert all(torch.equal(x, outputs[1, 1]) for x in outputs.values())
    gradients = {(cores, seed): backward(case, cores, seed)[0] for cores in (1, 2, 7, 24) for seed in (1, 2)}
    for cores in (1, 2, 7, 24):
        assert worst(gradients[cores, 1], expected[1:], 1e-4) <= 1e-4
        assert same(gradients[cores, 1], gradients[cores, 2])
        assert same(gradients[cores, 1][:3], gradients[1, 1][:3])
    assert not same(gradients[1, 1][3:], gradients[24, 1][3:]), "negative control: sums over cores are another order"


def test_all_cores_at_once():
    """Seed 0: the system decides who runs when."""
    case = case_of([300, 70, 64])
    assert same(backward(case, 7, 0)[0], backward(case, 7, 1)[0])


@pytest.mark.parametrize("channel", ["bucketed", "functional"])
def test_times_in_no_order(channel):
    g = torch.Generator().manual_seed(1)
    case = case_of([200, 3, 65], channel=channel)
    shuffled = case.key_times[torch.randperm(case.key_times.numel(), generator=g)]
    for queries, keys in ((case.query_times, shuffled), (case.key_times - 5, case.key_times), (shuffled, case.key_times)):
        assert_parity(replace(case, query_times=queries, key_times=keys))


@pytest.mark.parametrize(
    "numbers", [(0.03, 1.0, 0.5), (-0.03, 0.9, 8.0), (0.03, 1e-6, 0.01), (0.03, 0.999, 1.0), (0.03, 0.5, 0.3)]
)
@pytest.mark.parametrize("start", [0, 1_650_000_000_000, -(2**61)])
def test_time_functions_of_any_gap(numbers, start):
    """Gaps of 0, of 1 and up to 2^60, with a decay of 1, one that is gone at once, and a power that would overflow."""
    gaps = torch.cat([torch.arange(4), torch.logspace(0, 18, 96, dtype=torch.float64).long()])
    case = replace(case_of([100]), time=torch.tensor(numbers), key_times=torch.full((100,), start), query_times=start + gaps)
    out, gradients = forward(case)[0], backward(case)[0]
    expected = case.reference()
    assert worst([out], expected[:1], 1e-4) <= 1e-4
    assert worst(gradients[:4], expected[1:5], 1e-4) <= 1e-4
    # Of the numbers: sums whose terms may be as large as their power.
    torch.testing.assert_close(gradients[4].double(), expected[5], rtol=1e-3, atol=1e-4)


def test_thresholds_in_one_long_sequence():
    """All pairs of a sequence of 300 tokens with times at the edges of buckets, forward and backward."""
    thresholds = bucket_thresholds(60, 1.0, 0.301)
    times = torch.cat([thresholds - 1, thresholds, thresholds + 1, thresholds * 2, torch.arange(64)]).sort().values
    case = case_of([times.numel()], channel="bucketed")
    assert_parity(replace(case, time=torch.randn(60) * 0.02, key_times=times, query_times=times.roll(-1)))


@pytest.mark.parametrize(
    ("change", "message"), [({"divisor": 1e-5}, "a time_divisor of"), ({"time": torch.zeros(9000)}, "time table does not fit")]
)
def test_what_the_tiling_refuses(change, message):
    case = replace(case_of([3], channel="bucketed"), **change)
    with pytest.raises(StandInError, match=message):
        forward(case)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    ("positions", "kind", "times"), [(0, 0, 0), (80, 0, 0), (0, 1, 28), (80, 1, 28), (80, 1, 1000), (80, 2, 0)]
)
def test_local_memory_is_what_the_tiling_says(positions, kind, times, dtype):
    case = case_of([70], dtype=dtype, channel=[None, "bucketed", "functional"][kind])
    case = replace(
        case, position=torch.randn(positions) if positions else None, time=torch.randn(times) if times else case.time
    )
    local = facts_of(70, 2, 8, 5, case.q.element_size(), positions, kind, times, 1)["local"]
    assert backward(case, 1)[1].peak_local_bytes + SELECT_RESERVE == local
    assert forward(case, 1)[1].peak_local_bytes + SELECT_RESERVE <= local


def test_no_byte_and_no_operation_is_spent_on_padding():
    """A batch takes what its sequences take one by one: nothing is padded to the longest. What belongs to the launch, not to a
    sequence, is taken off: a batch of empty sequences."""
    lengths, fields = [300, 1, 64, 5], ("bytes_global", "vector_elements", "cube_multiply_adds", "matmuls")
    for run in (forward, backward):
        full = case_of([300, *lengths])  # as long a position table for all
        case = [replace(case_of(x), position=full.position) for x in (lengths, [300] * 4, [0])]
        apart = [run(replace(case_of([x]), position=full.position), 1)[1] for x in lengths]
        together, padded, nothing = (run(x, 1)[1] for x in case)
        for field in fields:
            launch = getattr(nothing, field)
            parts = sum(getattr(x, field) - launch for x in apart)
            taken = getattr(together, field) - launch
            assert taken == parts
            assert taken < 0.5 * (getattr(padded, field) - launch), "negative control: padded to the longest"


@pytest.mark.parametrize("channel", ["bucketed", "functional"])
def test_heads_share_position_and_time_weights(channel):
    """More heads take more of the semantic channel's functions, gathering and reading of times none."""
    for run in (forward, backward):
        one, three = (run(case_of([130, 40], heads, channel=channel), 1)[1] for heads in (1, 3))
        semantic = [run(case_of([130, 40], heads, position=False, channel=None), 1)[1] for heads in (1, 3)]
        for field in ("vector_functions", "matmuls"):
            more = getattr(three, field) - getattr(one, field)
            assert more == getattr(semantic[1], field) - getattr(semantic[0], field) > 0
        assert three.vector_gathers == one.vector_gathers > 0
        assert three.scalar_operations == one.scalar_operations


@pytest.mark.parametrize("lengths", [[64], [300], [130, 65, 64, 63], [600]])
@pytest.mark.parametrize("channel", ["bucketed", "functional"])
def test_bias_gradients_need_few_scalar_operations(lengths, channel):
    """At most an eighth of one read-modify-write per pair and table, all of the kernel's scalar operations counted."""
    pairs = sum(n * (n + 1) // 2 for n in lengths)
    for heads in (1, 3):
        counters = backward(case_of(lengths, heads, channel=channel), 2)[1]
        assert counters.scalar_operations <= 2 * pairs / 8
    apart = [backward(case_of(lengths, position=p, channel=None), 2)[1].scalar_operations for p in (True, False)]
    assert apart[0] == apart[1], "the position table's gradient takes no scalar operation at all"


def test_when_cores_meet():
    """After the gradient's split, and before sums over cores. Cores in each other's way would make the stand-in throw."""
    case = case_of([300, 70])
    assert (forward(case, 7)[1].barriers, backward(case, 7)[1].barriers) == (0, 2)
    assert backward(case_of([300, 70], position=False, channel=None), 7)[1].barriers == 0
