from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from turbogr.ops.registry import describe
from turbogr.ops.unique import unique_ids, unique_ids_reference


@settings(max_examples=50, deadline=None)
@given(ids=st.lists(st.integers(0, 50), max_size=60), num_rows=st.sampled_from([51, 1000, 10**9]))
def test_equals_the_reference_marked_and_sorted(ids, num_rows):
    tensor = torch.tensor(ids, dtype=torch.int64)
    for actual, expected in zip(unique_ids(tensor, num_rows), unique_ids_reference(tensor, num_rows), strict=True):
        assert actual.dtype == torch.int64
        assert actual.tolist() == expected.tolist()


def test_keeps_the_shape():
    ids = torch.tensor([[3, 1], [3, 9]])
    unique, inverse = unique_ids(ids, 10)
    assert unique.tolist() == [1, 3, 9]
    assert inverse.tolist() == [[1, 0], [1, 2]]


@pytest.mark.parametrize(("ids", "named"), [([0, -3], "-3"), ([4, 10], "10")])
def test_ids_outside_the_table_are_named(ids, named):
    with pytest.raises(IndexError, match=rf"id {named} is outside the table's rows 0\.\.9"):
        unique_ids(torch.tensor(ids), 10)


def test_every_operator_is_described():
    names = [operator.name for operator in describe()]
    assert names == sorted(names)
    assert {"turbogr::jagged_hstu_attention", "turbogr::jagged_softmax_attention", "turbogr::negative_logits"} <= set(names)
