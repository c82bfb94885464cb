"""The kernels of negative logits on the stand-in: parity, determinism, and what they move."""

from __future__ import annotations

from itertools import cycle

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.ascendc.build import StandInError
from tests.ascendc.hstu import DTYPES, TOLERANCES
from tests.ascendc.lookup import fraction_off
from tests.ascendc.lookup_counters import expanded
from tests.ascendc.negatives import Case, backward, case_of, forward
from tests.ascendc.test_embedding_lookup import SEARCH
from tests.ops.test_negative_logits import SHAPES

CORES = [1, 2, 7, 24]
PARITY = [(shape, cores) for shape, cores in zip([x for x in SHAPES if x[2]], cycle([7, 24, 2, 1]), strict=False)]
"""Tokens, samples, width and rows. Without a column there is nothing to launch."""


def gradient_of(case: Case, seed: int = 2) -> torch.Tensor:
    """Such that no gradient is much larger than 1."""
    tokens, samples = case.index.shape
    most = max(1, samples, 2 * tokens * samples // max(1, len(case.rows)))
    g = torch.Generator().manual_seed(seed)
    return (torch.randn(tokens, samples, generator=g) / (3 * most**0.5)).to(case.output.dtype)


def check(case: Case, cores: int, seed: int) -> None:
    dtype, gradient = case.output.dtype, gradient_of(case)
    actual = forward(case, cores, seed)[0], *backward(case, gradient, cores, seed)[:2]
    for x, y in zip(actual, case.expected(gradient), strict=True):
        assert fraction_off(x, y, dtype) <= TOLERANCES[dtype]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("shape", "cores"), PARITY, ids=str)
def test_equals_the_reference(shape, cores, dtype):
    check(case_of(*shape, dtype), cores, seed=5)


@pytest.mark.parametrize("cores", CORES)
@pytest.mark.parametrize("shape", [(40, 7, 6, 30), (65, 17, 33, 64), (3, 400, 128, 90)], ids=str)
def test_every_number_of_cores_in_any_order(shape, cores):
    for seed in (0, 1, 2):
        check(case_of(*shape), cores, seed)


@pytest.mark.parametrize("width", [63, 64, 65, 200, 4096])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_widths_around_a_vector(width, dtype):
    check(case_of(12, 9, width, 20, dtype), 7, seed=3)


@settings(max_examples=40, deadline=None)
@given(
    tokens=st.integers(0, 60),
    samples=st.integers(0, 70),
    width=st.integers(1, 140),
    rows=st.integers(1, 300),
    dtype=st.sampled_from(DTYPES),
    cores=st.integers(1, 30),
)
def test_any_shape_equals_the_reference(tokens, samples, width, rows, dtype, cores):
    case = case_of(tokens, samples, width, rows, dtype)
    gradient = gradient_of(case)
    actual = forward(case, cores)[0], *backward(case, gradient, cores)[:2]
    for x, y in zip(actual, case.expected(gradient), strict=True):
        # Too few numbers for a fraction of them.
        torch.testing.assert_close(x.double(), y, atol=2 * TOLERANCES[dtype], rtol=2 * TOLERANCES[dtype])


def test_a_wrong_sample_is_noticed():
    """Negative control of the parity tests."""
    case = case_of(40, 7, 33, 30)
    gradient = gradient_of(case)
    moved = Case(case.output, case.rows, case.index.clone())
    moved.index[3, 2] = (moved.index[3, 2] + 1) % 30
    actual = forward(moved)[0], *backward(moved, gradient)[:2]
    assert all(fraction_off(x, y, torch.float32) > 1e-4 for x, y in zip(actual, case.expected(gradient), strict=True))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_the_same_bits_in_every_order_of_the_cores(dtype):
    """With a row that half of all samples are, which cores share, and tokens that they share."""
    case = case_of(35, 64, 24, 50, dtype)
    case.index[:, ::2] = 17
    gradient = gradient_of(case)
    for cores in (2, 24):
        first = forward(case, cores, 0)[0], *backward(case, gradient, cores, 0)[:2]
        for seed in (1, 2, 3):
            again = forward(case, cores, seed)[0], *backward(case, gradient, cores, seed)[:2]
            assert all(map(torch.equal, again, first))
    if dtype == torch.float32:
        others = backward(Case(case.output, case.rows, case.index.flip(1)), gradient.flip(1), 24, 1)
        assert not torch.equal(others[0], first[1]), "negative control: another order of the sums changes bits"


@pytest.mark.parametrize("wrong", [-1, 30, 2**40, -(2**63)])
def test_an_index_outside_stops_the_kernel(wrong):
    case = case_of(40, 7, 6, 30)
    case.index[33, 5] = wrong
    with pytest.raises(StandInError, match=r"Trap.*: the kernel stopped itself"):
        forward(case)
    with pytest.raises(StandInError, match=r"Trap.*: the kernel stopped itself"):
        backward(case, gradient_of(case))


@pytest.mark.parametrize("value", [torch.nan, torch.inf])
def test_damaged_numbers_stay_where_they_are(value):
    case = case_of(9, 5, 20, 9)
    case.index[:] = torch.arange(9)[:, None]
    case.output[2, 19] = value
    case.rows[4, 0] = value
    logits, _ = forward(case)
    assert not logits[[2, 4]].isfinite().any()
    assert logits.isfinite().all(1).sum() == 7


def test_forward_moves_every_row_once_and_nothing_larger():
    """Of [T, R, D] nothing lies in global memory: rows come in once per sample, logits go out."""
    tokens, samples, width, cores = 60, 40, 128, 24
    case = case_of(tokens, samples, width, 500, torch.bfloat16)
    _, counters = forward(case, cores)
    pairs, row = tokens * samples, width * 2
    assert counters.bytes_global_to_local == pairs * (8 + row) + tokens * row
    assert counters.bytes_local_to_global == pairs * 2
    assert counters.scalar_operations == pairs  # the index
    assert counters.bytes_local_to_local == counters.atomic_elements == counters.matmuls == 0


def test_traffic_against_expanded_rows():
    """The naive way: rows gathered to [T, R, D] in global memory, products with these; both by the same kernels."""
    tokens, samples, width, cores = 60, 40, 64, CORES[-1]
    case = case_of(tokens, samples, width, 500)
    gradient = gradient_of(case)
    pairs = tokens * samples
    (logits, of_gathered), there, back = expanded(case, gradient)
    expected, fused = forward(case, cores)
    _, of_rows, once = backward(case, gradient, cores)
    assert torch.equal(logits, expected)
    torch.testing.assert_close(of_gathered, of_rows)
    assert sum(x.bytes_global for x in there) > 2.8 * fused.bytes_global
    assert sum(x.bytes_global for x in back) > 2.5 * once.bytes_global
    assert once.atomic_elements == 0
    row = width * 4
    most = 2 * pairs * (8 + 4 + row) + 500 * 8 + 2 * 2 * cores * row + cores * SEARCH
    assert once.bytes_global_to_local <= most
    assert once.bytes_local_to_global <= (tokens + 500) * row + 2 * 2 * cores * row


@pytest.mark.parametrize("width", [0, 4097])
def test_widths_that_are_refused(width):
    with pytest.raises(StandInError, match="rows have 1 to 4096 columns"):
        forward(case_of(5, 3, width, 4))
