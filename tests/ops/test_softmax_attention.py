from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn import functional as F

from tests.ops.jagged_cases import LENGTHS, max_errors, offsets_of
from turbogr.ops.softmax_attention import (
    _softmax_attention,
    jagged_softmax_attention,
    jagged_softmax_attention_reference,
)


def inputs_of(lengths, heads=2, qk_dim=8, v_dim=5, seed=0):
    g = torch.Generator().manual_seed(seed)
    tokens = sum(lengths)
    widths = (qk_dim, qk_dim, v_dim)
    return [torch.randn(tokens, heads, d, generator=g, dtype=torch.float64).requires_grad_() for d in widths]


def pair(lengths, scale=0.4):
    offsets = offsets_of(lengths)
    return (
        lambda q, k, v: jagged_softmax_attention(q, k, v, offsets, scale=scale),
        lambda q, k, v: jagged_softmax_attention_reference(q, k, v, offsets, scale=scale),
    )


@pytest.mark.parametrize("lengths", LENGTHS.values(), ids=LENGTHS.keys())
def test_equals_the_reference_with_all_gradients(lengths):
    assert max(max_errors(*pair(lengths), inputs_of(lengths))) < 1e-12


@settings(max_examples=25, deadline=None)
@given(
    lengths=st.lists(st.integers(0, 40), max_size=6), heads=st.integers(1, 4), dim=st.integers(1, 9), seed=st.integers(0, 99)
)
def test_any_shape_equals_the_reference(lengths, heads, dim, seed):
    assert max(max_errors(*pair(lengths), inputs_of(lengths, heads, dim, dim, seed))) < 1e-12


def test_equals_torch_on_a_single_sequence():
    q, k, v = inputs_of([33], v_dim=8)
    expected = F.scaled_dot_product_attention(*(x.transpose(0, 1) for x in (q, k, v)), is_causal=True, scale=0.4)
    torch.testing.assert_close(pair([33])[0](q, k, v), expected.transpose(0, 1))


def test_opcheck_and_gradcheck():
    tensors = inputs_of([3, 0, 5], heads=1, qk_dim=2, v_dim=3)
    torch.library.opcheck(_softmax_attention, (*tensors, offsets_of([3, 0, 5]), 0.5))
    assert torch.autograd.gradcheck(pair([3, 0, 5])[0], tensors)


def test_wrong_inputs_are_named():
    q, k, v = inputs_of([4])
    with pytest.raises(ValueError, match="offsets rise from 0 to 4"):
        jagged_softmax_attention(q, k, v, torch.tensor([0, 3]), scale=1.0)
    with pytest.raises(ValueError, match="share one floating dtype"):
        jagged_softmax_attention(q.float(), k.float(), v, torch.tensor([0, 4]), scale=1.0)
