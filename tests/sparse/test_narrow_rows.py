"""Rows of two widths on the wire."""

from __future__ import annotations

import pytest
import torch

from turbogr.sparse.apart import Apart
from turbogr.sparse.narrow_rows import Packing, narrow_dtype, narrow_ones
from turbogr.sparse.table import EmbeddingTable, SparseFeature


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("dim", [1, 5, 8])
@pytest.mark.parametrize("share", [0.0, 0.4, 1.0])
@pytest.mark.parametrize("counts", [[7, 0, 5], [0, 0], [12]])
def test_what_is_packed_comes_out(dtype, dim, share, counts):
    g = torch.Generator().manual_seed(0)
    total = sum(counts)
    narrow = torch.rand(total, generator=g) < share
    rows = torch.randn(total, dim, generator=g)
    packing = Packing(narrow, counts)
    packed = packing.pack(rows, dtype)
    wide = int((~narrow).sum())
    assert packed.nbytes == wide * dim * 4 + (total - wide) * dim * 2, "half as wide where that is all that is wanted"
    assert len(packing.splits) == len(counts)
    assert sum(packing.splits) == len(packed)
    expected = torch.where(narrow[:, None], rows.to(dtype).float(), rows)
    assert torch.equal(packing.unpack(packed), expected)
    # Member by member, as they arrive.
    for part, some in zip(
        packed.split(packing.splits), zip(narrow.split(counts), expected.split(counts), strict=True), strict=True
    ):
        flags, values = some
        assert torch.equal(Packing(flags, [len(flags)]).unpack(part), values)


def test_rows_that_anybody_else_looks_up_are_wide():
    table = EmbeddingTable()
    table.allocate({"items": 20, "tab": 4}, 3)
    table.apart["negatives"] = Apart(torch.float16)
    features = {
        "values": torch.tensor([3, 5]),
        "negatives": torch.tensor([[5, 7], [9, 7]]),
        "tab": SparseFeature("tab", torch.tensor([1, 2])),
    }
    request = table.request(features, trains=True)
    assert request.ids.tolist() == [3, 5, 7, 9, 21, 22]
    assert narrow_ones(request).tolist() == [False, False, True, True, False, False]
    assert not narrow_ones(table.request(features)).any()


def test_which_half_precision_travels():
    half, brain, whole = (Apart(dtype) for dtype in (torch.float16, torch.bfloat16, torch.float32))
    assert narrow_dtype({"a": half}) == narrow_dtype({"a": half, "b": half}) == torch.float16
    assert narrow_dtype({"a": half, "b": brain}) is narrow_dtype({"a": whole}) is narrow_dtype({}) is None
