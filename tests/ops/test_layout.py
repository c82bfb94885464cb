"""The layout that PyTorch attention computes on: every token at one place, every pair in one block."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.ops.jagged_cases import LENGTHS, offsets_of
from turbogr.ops.layout import BLOCK_ROWS, CHUNK_ELEMENTS, FREE_WASTE, MAX_WASTE, PAIR_ELEMENTS, Layout, partition


@pytest.mark.parametrize("lengths", LENGTHS.values(), ids=LENGTHS.keys())
def test_what_is_spread_comes_back_and_padding_is_zero(lengths):
    layout, tokens = Layout(offsets_of(lengths), 3), sum(lengths)
    x = torch.randn(tokens, 3, 5)
    dense = layout.spread(x)
    assert torch.equal(layout.collect(dense), x)
    torch.testing.assert_close(dense.abs().sum(), x.abs().sum())
    times = torch.arange(1, tokens + 1)
    assert torch.equal(layout.collect_tokens(layout.spread_tokens(times)), times)
    assert layout.spread_tokens(times).sum() == times.sum()
    # Both ways to spread put a token at the same place of its group.
    by_token = layout.spread(times.float()[:, None, None].expand(-1, 3, 1))
    for group in layout.groups:
        matrices = group.matrices(by_token).view(group.size, 3, group.length)
        assert torch.equal(matrices, group.tokens(layout.spread_tokens(times.float()))[:, None].expand_as(matrices))


@settings(max_examples=50, deadline=None)
@given(lengths=st.lists(st.integers(0, 3 * BLOCK_ROWS), max_size=40), heads=st.integers(1, 8))
def test_blocks_cover_every_causal_pair_once_and_chunks_are_small(lengths, heads):
    layout, wanted = Layout(offsets_of(lengths), heads), {}
    for group in layout.groups:
        wanted[group.start] = group.size * group.length * (group.length + 1) // 2
    for chunk in layout.chunks():
        assert len(chunk.blocks) == 1 or chunk.pairs * (heads + PAIR_ELEMENTS) <= CHUNK_ELEMENTS
        numbers = torch.arange(chunk.pairs)
        covered = [block.of_pairs(numbers) for block in chunk.blocks]
        assert torch.cat([x.flatten() for x in covered]).tolist() == numbers.tolist()
        for block in chunk.blocks:
            wanted[block.group.start] -= block.group.size * (block.rows * (block.rows + 1) // 2 + block.rows * block.first)
            assert block.of_scores(chunk.new_scores(torch.empty(0))).shape == (block.group.size * heads, block.rows, block.end)
    assert not any(wanted.values())


@settings(max_examples=50, deadline=None)
@given(lengths=st.lists(st.integers(0, 300), max_size=200), heads=st.integers(1, 8))
def test_groups_are_of_similar_lengths(lengths, heads):
    groups = list(partition(lengths, heads))
    assert sorted(b for members in groups for b in members) == [b for b, n in enumerate(lengths) if n]
    for members in groups:
        longest, valid = lengths[members[0]], sum(lengths[b] ** 2 for b in members)
        assert longest == max(lengths[b] for b in members)
        waste = len(members) * longest**2 - valid
        assert waste <= (MAX_WASTE - 1) * valid or waste * heads <= FREE_WASTE
        block = len(members) * (heads + PAIR_ELEMENTS) * min(longest, BLOCK_ROWS) * longest
        assert len(members) == 1 or block <= CHUNK_ELEMENTS
