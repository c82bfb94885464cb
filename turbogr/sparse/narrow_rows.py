"""Rows on the wire, some of them in half precision: what is kept apart in half precision need not travel wider.

A row that only such features look up travels as D words of 16 bits, any other as the 2 D words that its float32 are made of.
Who asks for a row says which with its number: `~row` asks for a narrow one. So nothing is sent beside the ids and the rows.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from turbogr.sparse.apart import Apart
from turbogr.sparse.lookup import RowRequest

_HALVES = (torch.float16, torch.bfloat16)


def narrow_dtype(apart: Mapping[str, Apart]) -> torch.dtype | None:
    """The half precision of all features that are kept apart; None if there is none, or not one."""
    dtypes = {how.dtype for how in apart.values()}
    return next(iter(dtypes)) if len(dtypes) == 1 and dtypes <= set(_HALVES) else None


def narrow_ones(request: RowRequest) -> Tensor:
    """bool [U], which of a request's distinct rows nothing but features that are kept apart looks up."""
    if request.places is None:
        return torch.zeros(len(request.ids), dtype=torch.bool, device=request.ids.device)
    narrow = torch.ones(len(request.ids), dtype=torch.bool, device=request.ids.device)
    narrow[request.places.main] = False
    return narrow


class Packing:
    """How rows of two widths lie one behind the other, in pieces of D words of 16 bits.

    Args:
        narrow: bool [R], which of the rows are narrow; on the host.
        counts: rows to or from each member, who come one after the other.

    Attributes:
        splits: pieces to or from each member.
    """

    def __init__(self, narrow: Tensor, counts: list[int]) -> None:
        self.narrow = narrow
        edges = torch.cat([torch.zeros(1, dtype=torch.int64), torch.where(narrow, 1, 2).cumsum(0)])
        self.first, self.total = edges[:-1], int(edges[-1])
        self.splits: list[int] = edges[torch.tensor([0, *counts]).cumsum(0)].diff().tolist()

    def pack(self, rows: Tensor, dtype: torch.dtype) -> Tensor:
        """[total, D] in the half precision, which the wide rows' words only look like; of rows float32 [R, D]."""
        narrow, first = (x.to(rows.device) for x in (self.narrow, self.first))
        packed = torch.empty(self.total, rows.shape[1], dtype=dtype, device=rows.device)
        packed[first[narrow]] = rows[narrow].to(dtype)
        words = rows[~narrow].view(dtype).view(-1, 2, rows.shape[1])
        packed[first[~narrow]], packed[first[~narrow] + 1] = words.unbind(1)
        return packed

    def unpack(self, packed: Tensor) -> Tensor:
        """float32 [R, D]."""
        narrow, first = (x.to(packed.device) for x in (self.narrow, self.first))
        rows = torch.empty(len(narrow), packed.shape[1], dtype=torch.float32, device=packed.device)
        rows[narrow] = packed[first[narrow]].float()
        wide = first[~narrow]
        rows[~narrow] = torch.stack([packed[wide], packed[wide + 1]], 1).view(len(wide), -1).view(torch.float32)
        return rows
