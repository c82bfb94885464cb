"""Rows on the wire, some of them in half precision: what is kept apart in half precision need not travel wider.

A row that only such features look up travels as D words of 16 bits, any other as the 2 D words that its float32 are made of.
Who asks for a row says which with its number: `~row` asks for a narrow one. So nothing is sent beside the ids and the rows.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from turbogr.ops.copies import to_device
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
        self.total = int(edges[-1])
        self.splits: list[int] = edges[torch.tensor([0, *counts]).cumsum(0)].diff().tolist()
        # On the host, where nobody waits for their number.
        self._rows = [which.nonzero().view(-1) for which in (narrow, ~narrow)]
        self._pieces = [edges[rows] for rows in self._rows]

    def pack(self, rows: Tensor, dtype: torch.dtype) -> Tensor:
        """[total, D] in the half precision, which the wide rows' words only look like; of rows float32 [R, D]."""
        narrow, wide, first_narrow, first_wide = self._on(rows.device)
        packed = torch.empty(self.total, rows.shape[1], dtype=dtype, device=rows.device)
        packed[first_narrow] = rows[narrow].to(dtype)
        words = rows[wide].view(dtype).unflatten(1, (2, rows.shape[1]))
        packed[first_wide], packed[first_wide + 1] = words.unbind(1)
        return packed

    def unpack(self, packed: Tensor) -> Tensor:
        """float32 [R, D]."""
        narrow, wide, first_narrow, first_wide = self._on(packed.device)
        rows = torch.empty(len(narrow) + len(wide), packed.shape[1], dtype=torch.float32, device=packed.device)
        rows[narrow] = packed[first_narrow].float()
        rows[wide] = torch.stack([packed[first_wide], packed[first_wide + 1]], 1).flatten(1).view(torch.float32)
        return rows

    def _on(self, device: torch.device) -> list[Tensor]:
        return [to_device(places, device) for places in (*self._rows, *self._pieces)]
