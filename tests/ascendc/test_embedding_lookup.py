"""The look-up kernels on the stand-in: parity, determinism, and what they move."""

from __future__ import annotations

from itertools import cycle

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.ascendc.build import StandInError
from tests.ascendc.hstu import DTYPES, TOLERANCES
from tests.ascendc.lookup import Batch, backward, batch_of, forward, fraction_off
from tests.ascendc.lookup_counters import padded
from tests.ops.test_embedding_lookup import CASES
from turbogr.ops.embedding_lookup import jagged_embedding_lookup, jagged_embedding_lookup_reference

WIDTHS = [1, 7, 16, 50, 128]
CORES = [1, 2, 7, 24]
SEARCH = 3 * 128 * 8
"""Bytes of starts that a core reads at most, to find its part of a table's sums."""


def gradient_of(batch: Batch, seed: int = 2) -> torch.Tensor:
    """Such that no row's gradient is much larger than 1."""
    most = max(1, int(batch.ids.bincount().max()) if len(batch.ids) else 1)
    g = torch.Generator().manual_seed(seed)
    return (torch.randn(len(batch.ids), batch.width, generator=g) / (3 * most**0.5)).to(batch.dtype)


def expected_gradients(batch: Batch, gradient: torch.Tensor) -> list[torch.Tensor]:
    leaves = [x.double().requires_grad_() for x in batch.tables]
    out = jagged_embedding_lookup_reference(leaves, batch.ids, batch.splits)
    return list(torch.autograd.grad(out, leaves, gradient.double(), allow_unused=True, materialize_grads=True))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("rows", "counts"), CASES.values(), ids=CASES.keys())
def test_equals_the_reference(rows, counts, dtype):
    for seed, (width, cores) in enumerate(zip([*WIDTHS, *WIDTHS], cycle(CORES), strict=False)):
        batch = batch_of(rows, counts, width, dtype, seed)
        out, _ = forward(batch, cores, seed)
        assert torch.equal(out.double(), jagged_embedding_lookup_reference(batch.tables, batch.ids, batch.splits))
        gradient = gradient_of(batch)
        actual, _ = backward(batch, gradient, cores, seed)
        for x, y in zip(actual, expected_gradients(batch, gradient), strict=True):
            assert fraction_off(x, y, dtype) <= TOLERANCES[dtype]


@pytest.mark.parametrize("width", [511, 4096])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_wide_rows(width, dtype):
    batch = batch_of([9, 300], [40, 300], width, dtype)
    assert torch.equal(forward(batch)[0], jagged_embedding_lookup(batch.tables, batch.ids, batch.splits, backend="reference"))
    gradient = gradient_of(batch)
    for x, y in zip(backward(batch, gradient)[0], expected_gradients(batch, gradient), strict=True):
        assert fraction_off(x, y, dtype) <= TOLERANCES[dtype]


@pytest.mark.parametrize("cores", CORES)
def test_rows_that_many_cores_share(cores):
    """Half of all ids are one row's: its positions are spread over many cores, and summed in a fixed order."""
    batch = batch_of([60, 5], [500, 90], 20)
    batch.ids[100:400] = 30
    gradient = gradient_of(batch)
    for x, y in zip(backward(batch, gradient, cores)[0], expected_gradients(batch, gradient), strict=True):
        torch.testing.assert_close(x.double(), y, atol=1e-6, rtol=1e-5)


@settings(max_examples=40, deadline=None)
@given(
    sizes=st.lists(st.tuples(st.integers(1, 300), st.integers(0, 200)), min_size=1, max_size=4),
    width=st.integers(1, 80),
    dtype=st.sampled_from(DTYPES),
    skew=st.sampled_from([1.0, 8.0]),
    cores=st.integers(1, 30),
)
def test_any_shape_equals_the_reference(sizes, width, dtype, skew, cores):
    rows, counts = zip(*sizes, strict=True)
    batch = batch_of(rows, counts, width, dtype, skew=skew)
    assert torch.equal(
        forward(batch, cores)[0].double(), jagged_embedding_lookup_reference(batch.tables, batch.ids, batch.splits)
    )
    gradient = gradient_of(batch)
    for x, y in zip(backward(batch, gradient, cores)[0], expected_gradients(batch, gradient), strict=True):
        # Too few numbers for a fraction of them.
        torch.testing.assert_close(x.double(), y, atol=2 * TOLERANCES[dtype], rtol=2 * TOLERANCES[dtype])


def test_a_wrong_id_is_noticed():
    """Negative control of the parity tests."""
    batch = batch_of([50, 5], [20, 9], 8)
    gradient = gradient_of(batch)
    moved = Batch(batch.tables, batch.ids.clone(), batch.splits)
    moved.ids[3] = (moved.ids[3] + 1) % 50
    assert not torch.equal(forward(moved)[0], forward(batch)[0])
    errors = [
        fraction_off(x, y, torch.float32)
        for x, y in zip(backward(moved, gradient)[0], expected_gradients(batch, gradient), strict=True)
    ]
    assert errors[0] > TOLERANCES[torch.float32]
    assert errors[1] == 0


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_the_same_bits_in_every_order_of_the_cores(dtype):
    batch = batch_of([300, 40], [2000, 700], 24, dtype, skew=3)
    gradient = gradient_of(batch)
    for cores in (2, 24):
        first = backward(batch, gradient, cores, 0)[0]
        for seed in (1, 2, 3):
            assert all(map(torch.equal, backward(batch, gradient, cores, seed)[0], first))
    order = torch.randperm(2000, generator=torch.Generator().manual_seed(0))
    shuffled = Batch(batch.tables, torch.cat([batch.ids[:2000][order], batch.ids[2000:]]), batch.splits)
    other = backward(shuffled, torch.cat([gradient[:2000][order], gradient[2000:]]), 24, 1)[0]
    if dtype == torch.float32:
        assert not torch.equal(other[0], first[0]), "negative control: another order of the sums changes bits"


def test_only_gradients_that_are_wanted_are_written():
    batch = batch_of([50, 5, 7], [20, 9, 4], 8)
    gradient = gradient_of(batch)
    expected, everything = backward(batch, gradient)
    actual, some = backward(batch, gradient, wanted=[True, False, True])
    assert actual[1] is None
    assert torch.equal(actual[0], expected[0])
    assert torch.equal(actual[2], expected[2])
    assert some.bytes_local_to_global < everything.bytes_local_to_global


@pytest.mark.parametrize("wrong", [-1, -(2**63), 5, 2**62])
def test_an_id_outside_its_table_stops_the_kernel(wrong):
    batch = batch_of([50, 5], [20, 9], 8)
    batch.ids[23] = wrong
    with pytest.raises(StandInError, match=r"Trap.*: the kernel stopped itself"):
        forward(batch)


@pytest.mark.parametrize("width", [0, 4097])
def test_widths_that_are_refused(width):
    with pytest.raises(StandInError, match="rows have 1 to 4096 columns"):
        forward(batch_of([50], [20], width))


def test_traffic_is_independent_of_padding():
    lengths = [3, 200, 41, 0, 96, 17, 64, 130]
    tokens, width, cores = sum(lengths), 64, 24
    batch = batch_of([500, 90], [tokens, tokens], width, torch.float16)
    gradient = gradient_of(batch)
    _, there = forward(batch, cores)
    row = width * 2
    # Ids and rows come in once, rows go out once, nothing else; the list of tables is read number by number.
    assert there.bytes_global_to_local == 2 * tokens * (8 + row)
    assert there.bytes_local_to_global == 2 * tokens * row
    assert there.scalar_local_reads == 2 * tokens
    assert there.scalar_global_reads == cores * 2 * 5
    _, back = backward(batch, gradient, cores)
    assert back.atomic_elements == there.atomic_elements == 0
    for counters in (there, back):
        assert counters.bytes_local_to_local == counters.matmuls == 0
    starts, shared = 590 * 8 + 2 * cores * SEARCH, 2 * 2 * cores * width * 4
    assert back.bytes_global_to_local <= 2 * tokens * (8 + row) + starts + shared
    for longest in (200, 400):
        filled = padded(batch, lengths, longest)
        # What a batch is padded to leaves no trace in its ids.
        kept = torch.arange(longest) < torch.tensor(lengths)[:, None]
        ids = torch.cat([x[kept.flatten()] for x in filled.ids.chunk(2)])
        assert torch.equal(ids, batch.ids)
        slots = len(lengths) * longest
        _, naive = forward(filled, cores)
        assert naive.bytes_global / there.bytes_global == slots / tokens
        _, naive_back = backward(filled, torch.zeros(2 * slots, width, dtype=torch.float16), cores)
        assert naive_back.bytes_global_to_local >= 2 * slots * (8 + row)


def test_backward_reads_every_gradient_once_and_writes_every_row_once():
    batch = batch_of([400, 70], [1500, 600], 32, torch.float32, skew=2)
    cores = 24
    _, counters = backward(batch, gradient_of(batch), cores)
    ids, rows, row = 2100, 470, 32 * 4
    shared = 2 * 2 * cores * row  # at most two rows of a table a core
    inputs = ids * (8 + row) + rows * 8
    assert inputs <= counters.bytes_global_to_local <= inputs + shared + 2 * cores * SEARCH
    assert rows * row <= counters.bytes_local_to_global <= rows * row + shared
    assert counters.scalar_operations <= ids + rows + 2 * cores * 40
    assert counters.barriers == 2  # one a table
