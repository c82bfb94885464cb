"""The arithmetic of negatives' bytes, against formulas written down here, a count and the paper's Table 7."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from turbogr.batch import JaggedBatch
from turbogr.negative_bytes import (
    FP16,
    NegativeLoad,
    apart,
    choices,
    fused,
    gathered,
    offload_below,
    offloaded,
)

LOAD = NegativeLoad(tokens=1000, drawn=8, width=16, distinct=6000, added=5000)

TABLE_7 = {32: (22.21, 17.42), 64: (31.64, 23.44), 128: (50.39, 34.27)}
"""Negatives -> GB of FuXi-large on the device: plain, offloaded."""


def test_the_formulas():
    assert vars(gathered(LOAD)) == {
        "ids": 64_000,
        "rows": 1000 * 8 * 16 * 4,
        "gradients": 1000 * 8 * 16 * 4,
        "logits": 64_000,
        "host": 0,
    }
    assert vars(fused(LOAD)) == {
        "ids": 128_000,
        "rows": 2 * 5000 * 16 * 4,
        "gradients": 5000 * 16 * 4,
        "logits": 32_000,
        "host": 0,
    }
    half = apart(LOAD)
    assert (half.rows, half.gradients, half.host) == (6000 * 16 * 2, 2 * 6000 * 16 * 4, 0)
    away = offloaded(LOAD, 100)
    assert (away.rows, away.gradients) == (2 * 800 * 16 * 4, 800 * 16 * 4)
    assert away.host == 6000 * 16 * 8
    assert away.device == away.ids + away.rows + away.gradients + away.logits
    assert offloaded(LOAD, 100, FP16).rows == away.rows // 2


def test_nothing_grows_with_tokens_but_ids_and_logits_where_rows_are_offloaded():
    twice = NegativeLoad(2000, 8, 16, 12_000, 12_000)
    small, large = offloaded(LOAD), offloaded(twice)
    assert (large.rows, large.gradients) == (small.rows, small.gradients)
    assert (large.ids, large.logits) == (2 * small.ids, 2 * small.logits)
    assert gathered(twice).rows == 2 * gathered(LOAD).rows, "where they are not, it does"


def test_a_segment_never_holds_more_than_all_rows():
    assert offloaded(LOAD, 10**6).rows == 2 * 6000 * 16 * 4
    with pytest.raises(ValueError, match="at least 1 token"):
        offloaded(LOAD, 0)


def test_sharing_widens_logits_and_places_alone():
    for without, shared in ((fused(LOAD), fused(LOAD, 3)), (apart(LOAD), apart(LOAD, k=3))):
        assert (shared.rows, shared.gradients) == (without.rows, without.gradients)
        assert shared.logits == 3 * without.logits
    assert offloaded(LOAD, 100, k=3).rows == 3 * offloaded(LOAD, 100).rows, "what is borrowed comes with the segment"
    assert offloaded(LOAD, 100, k=3).host == offloaded(LOAD, 100).host
    with pytest.raises(ValueError, match="at least 1"):
        fused(LOAD, 0)


def test_offload_pays_where_rows_are_many():
    assert offload_below(LOAD) == pytest.approx(10 * fused(LOAD).device)
    assert offload_below(LOAD, value_bytes=FP16) == pytest.approx(10 * apart(LOAD).device)
    few = NegativeLoad(1000, 8, 16, 700, 600)
    assert offload_below(few) == 0
    assert offload_below(few, segment=10) == pytest.approx(10 * fused(few).device), "smaller segments"


@pytest.mark.parametrize(("tokens", "drawn", "num_items"), [(50, 4, 30), (300, 8, 1000), (100, 3, 100_000)])
def test_expected_rows_are_those_of_uniform_draws(tokens, drawn, num_items):
    generator = torch.Generator().manual_seed(0)
    counts = [len(torch.randint(num_items, (tokens * drawn,), generator=generator).unique()) for _ in range(50)]
    expected = NegativeLoad.expected(tokens, drawn, 8, num_items)
    assert expected.distinct == pytest.approx(sum(counts) / len(counts), rel=0.01)
    assert expected.added == expected.distinct
    fewer = NegativeLoad.expected(tokens, drawn, 8, num_items, others=num_items // 2)
    assert fewer.distinct == expected.distinct
    assert fewer.added == pytest.approx(expected.distinct / 2, abs=1)


def test_expected_rows_at_the_ends():
    assert NegativeLoad.expected(10, 4, 8, 1) == NegativeLoad(10, 4, 8, 1, 1)
    assert NegativeLoad.expected(0, 4, 8, 1).distinct == NegativeLoad.expected(0, 4, 8, 9).distinct == 0
    with pytest.raises(ValueError, match="num_items"):
        NegativeLoad.expected(10, 4, 8, 5, others=6)


def test_a_batch_is_counted():
    negatives = torch.tensor([[5, 6], [5, 0], [9, 1]])
    batch = JaggedBatch(
        values=torch.tensor([0, 2, 4]),
        offsets=torch.tensor([0, 3]),
        timestamps=torch.arange(3),
        targets=torch.tensor([2, 4, 6]),
        target_times=torch.arange(3),
        user_ids=torch.tensor([0]),
        max_length=3,
        negatives=negatives,
    )
    assert NegativeLoad.of(batch, 8) == NegativeLoad(3, 2, 8, distinct=5, added=3), "0 is a token, 6 a target"
    assert NegativeLoad.of(batch, 8, 1) == NegativeLoad(3, 1, 8, distinct=2, added=2)
    with pytest.raises(ValueError, match="3 negatives a token cannot be taken from a batch that has 2"):
        NegativeLoad.of(batch, 8, 3)
    with pytest.raises(ValueError, match="has 0"):
        NegativeLoad.of(replace(batch, negatives=None), 8)


def test_the_papers_table_is_the_gathered_tensor():
    """Width 1,024, 15 histories of 2,048 tokens: what offloading saved is [T, R, D] once; what it left still grows with R."""
    saved = {negatives: plain - offload for negatives, (plain, offload) in TABLE_7.items()}
    for negatives, gigabytes in saved.items():
        one = gathered(NegativeLoad.expected(15 * 2048, negatives, 1024, 10**7)).rows / 1e9
        assert gigabytes == pytest.approx(one, abs=0.8)
    assert saved[128] == pytest.approx(one, rel=0.002)
    growth = TABLE_7[128][1] - TABLE_7[64][1]
    assert growth > 0.6 * one / 2, "a gradient of that size is still on the device"


def test_choices_have_equally_many_logits():
    found = choices(LOAD, NegativeLoad(1000, 4, 16, 3500, 3000))
    assert list(found) == [
        "gathered",
        "fused",
        "fp16",
        "offload",
        "offload, fp16",
        "sharing k = 2",
        "sharing k = 2, fp16",
        "sharing k = 2, offload, fp16",
    ]
    assert found["sharing k = 2"].logits == found["fused"].logits
    assert found["sharing k = 2, fp16"].logits == found["fp16"].logits
    assert min(found, key=lambda name: found[name].device) == "offload, fp16"
    assert found["sharing k = 2, offload, fp16"].rows == found["offload, fp16"].rows, "segments hold what is borrowed"
    assert min((x for x in found.values() if x.host), key=lambda x: x.host) == found["sharing k = 2, offload, fp16"]
    distinct = NegativeLoad(1000, 8, 16, 8000, 8000)
    assert fused(distinct).device > gathered(distinct).device > fused(LOAD).device, "where nearly all rows are distinct"
