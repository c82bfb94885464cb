"""Parts of a catalogue give, together, exactly what the whole catalogue gives."""

from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from tests.ops.test_catalogue import problem
from turbogr.ops.catalogue import target_ranks, top_items
from turbogr.ops.catalogue_part import CataloguePart, best_of


def parts_of(table: Tensor, cuts: list[int], *arguments: Tensor, **options) -> list[CataloguePart]:
    """The catalogue cut before these rows."""
    bounds = [0, *cuts, len(table)]
    queries, targets, seen, offsets = arguments
    return [
        CataloguePart.of(queries, table[a:b], targets, seen, offsets, first=a, num_items=len(table), **options)
        for a, b in pairwise(bounds)
    ]


def ranks_of(parts: list[CataloguePart]) -> Tensor:
    scores = torch.stack([part.target_scores() for part in parts]).sum(0)
    return parts[0].ranks(torch.stack([part.count_before(scores) for part in parts]).sum(0))


def best_items(parts: list[CataloguePart], k: int) -> tuple[Tensor, Tensor]:
    return best_of(torch.cat([part.top_keys(k) for part in parts], dim=1), k)


@settings(max_examples=60, deadline=None)
@given(
    seed=st.integers(0, 2**20),
    users=st.integers(0, 20),
    items=st.integers(1, 400),
    shares=st.lists(st.floats(0, 1), max_size=5),
    k=st.integers(1, 60),
    chunk_rows=st.sampled_from([None, 1, 64, 200]),
    integers=st.booleans(),
    cosine=st.booleans(),
)
def test_parts_make_the_whole(seed, users, items, shares, k, chunk_rows, integers, cosine):
    queries, table, targets, seen, offsets = problem(seed, users, items, integers=integers)
    table[items // 2] = table[0]  # a tie that crosses parts
    cuts = sorted(round(share * items) for share in shares)  # equal cuts make empty parts
    parts = parts_of(table, cuts, queries, targets, seen, offsets, chunk_rows=chunk_rows, cosine=cosine)
    assert torch.equal(ranks_of(parts), target_ranks(queries, table, targets, seen, offsets, cosine=cosine))
    # The items to leave out are the seen ones: with targets given, those count among them.
    unaimed = parts_of(table, cuts, queries, None, seen, offsets, chunk_rows=chunk_rows, cosine=cosine)
    for found, expected in zip(best_items(unaimed, k), top_items(queries, table, k, seen, offsets, cosine=cosine), strict=True):
        assert torch.equal(found, expected)


def test_a_missing_part_changes_the_result():
    queries, table, targets, seen, offsets = problem(4, users=40, items=300)
    parts = parts_of(table, [100, 200], queries, targets, seen, offsets)
    whole = target_ranks(queries, table, targets, seen, offsets)
    assert torch.equal(ranks_of(parts), whole)
    for missing in range(3):
        scores = torch.stack([part.target_scores() for part in parts]).sum(0)
        counts = torch.stack([part.count_before(scores) for i, part in enumerate(parts) if i != missing]).sum(0)
        assert not torch.equal(parts[0].ranks(counts), whole)
    unaimed = parts_of(table, [100, 200], queries, None, seen, offsets)
    assert not torch.equal(best_items(unaimed[1:], 10)[1], top_items(queries, table, 10, seen, offsets)[1])


def test_nan_in_one_part_puts_the_target_last():
    queries, table, targets, seen, offsets = problem(4, users=6, items=300, most_seen=3)
    table[250] = torch.nan
    parts = parts_of(table, [100, 200], queries, targets, seen, offsets)
    expected = target_ranks(queries, table, targets, seen, offsets)
    assert torch.equal(ranks_of(parts), expected)
    assert (expected >= 295).all()


def test_each_target_is_scored_by_one_part():
    queries, table, targets, seen, offsets = problem(5, users=30, items=90, integers=False)
    scores = torch.stack([part.target_scores() for part in parts_of(table, [30, 30, 31], queries, targets, seen, offsets)])
    assert (scores != 0).sum(0).tolist() == [1] * 30


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"first": 2}, r"rows 2\.\.5 are no part of a catalogue of 4 items"),
        ({"first": -1, "num_items": 9}, r"rows -1\.\.2 are no part"),
        ({"first": 7, "num_items": 10}, r"rows 7\.\.10 are no part of a catalogue of 10 items"),
    ],
)
def test_rows_outside_the_catalogue(options, message):
    with pytest.raises(ValueError, match=message):
        CataloguePart.of(torch.ones(2, 3), torch.ones(4, 3), **options)


def test_targets_are_needed_for_ranks():
    part = CataloguePart.of(torch.ones(2, 3), torch.ones(4, 3))
    with pytest.raises(ValueError, match="without targets"):
        part.target_scores()
    with pytest.raises(ValueError, match="without targets"):
        part.count_before(torch.zeros(2))
