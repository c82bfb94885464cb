from __future__ import annotations

import pytest
import torch
from _memory import allocations
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.ops.jagged_cases import max_errors
from turbogr.ops import negative_logits as module
from turbogr.ops.negative_logits import _negative_logits, negative_logits, negative_logits_reference


def inputs_of(tokens, samples, dim, rows, seed=0):
    g = torch.Generator().manual_seed(seed)
    output = torch.randn(tokens, dim, generator=g, dtype=torch.float64).requires_grad_()
    table = torch.randn(rows, dim, generator=g, dtype=torch.float64).requires_grad_()
    return output, table, torch.randint(0, rows, (tokens, samples), generator=g)


@pytest.mark.parametrize("segment_bytes", [1, 3000, 1 << 22])
@pytest.mark.parametrize("rows_per_sample", [0, 10**9], ids=["gathered", "dense"])
@pytest.mark.parametrize("shape", [(40, 7, 6, 30), (1, 1, 1, 1), (0, 3, 4, 5), (50, 3, 5, 2000)])
def test_both_ways_equal_the_reference(shape, rows_per_sample, segment_bytes, monkeypatch):
    monkeypatch.setattr(module, "DENSE_ROWS_PER_SAMPLE", rows_per_sample)
    monkeypatch.setattr(module, "SEGMENT_BYTES", segment_bytes)
    output, table, index = inputs_of(*shape)
    errors = max_errors(
        lambda o, r: negative_logits(o, r, index), lambda o, r: negative_logits_reference(o, r, index), [output, table]
    )
    assert max(errors) < 1e-12


@settings(max_examples=20, deadline=None)
@given(tokens=st.integers(1, 30), samples=st.integers(1, 9), dim=st.integers(1, 9), rows=st.integers(1, 400))
def test_any_shape_equals_the_reference(tokens, samples, dim, rows):
    output, table, index = inputs_of(tokens, samples, dim, rows)
    errors = max_errors(
        lambda o, r: negative_logits(o, r, index), lambda o, r: negative_logits_reference(o, r, index), [output, table]
    )
    assert max(errors) < 1e-12


@pytest.mark.parametrize("rows", [30, 3000])
def test_opcheck_and_gradcheck(rows):
    output, table, index = inputs_of(5, 3, 2, rows)
    torch.library.opcheck(_negative_logits, (output, table, index))
    assert torch.autograd.gradcheck(lambda o: negative_logits(o, table, index), [output])


@pytest.mark.parametrize("rows", [400, 40_000])
def test_never_materialises_every_embedding(rows):
    """The peak stays far below the [T, R, D] tensor, which the formula written naively reaches."""
    tokens, samples, dim = 6000, 64, 64
    output, table, index = inputs_of(tokens, samples, dim, rows)
    output, table = (x.detach().float().requires_grad_() for x in (output, table))
    everything = tokens * samples * dim * 4
    _, peak = allocations(lambda: negative_logits(output, table, index).sum().backward())
    assert peak < 0.5 * everything
    _, naive = allocations(lambda: torch.einsum("td,trd->tr", output, table[index]).sum().backward())
    assert naive >= everything


def test_wrong_inputs_are_named():
    output, table, index = inputs_of(4, 3, 2, 5)
    with pytest.raises(ValueError, match=r"share D and dtype"):
        negative_logits(output, table.float(), index)
    with pytest.raises(ValueError, match=r"index is int64 or int32 \[T, R\] with T = 4"):
        negative_logits(output, table, index[:2])
