"""Rows of several batches, merged into those of one before their gradients are exchanged."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from turbogr.ops.backend import Backend
from turbogr.ops.unique import unique_ids
from turbogr.sparse.exchange import RowUnion


class Touched:
    """Rows of a member's weight that its group touched in one batch or several.

    Attributes:
        rows: int64 [n], distinct, ascending.
        union: with what the same member of the other groups touched; None if there is one group.
    """

    def __init__(self, rows: Tensor, union: RowUnion | None) -> None:
        self.rows, self.union = rows, union

    @property
    def by_any_group(self) -> Tensor:
        """int64 [N], rows that any group touched, distinct, ascending."""
        return self.rows if self.union is None else self.union.ids


def merge(batches: Sequence[Touched], backend: Backend = "auto") -> tuple[Touched, Tensor | None]:
    """One Touched for several: every row once.

    Each batch's union tells what all groups touched in it, so nothing has to be sent to know the union of the whole.

    Args:
        batches: at least one.
        backend: see `turbogr.ops.backend.Backend`.

    Returns:
        The whole; and where the rows of all batches, one batch after the other, stand in it: int64, None for a single batch.
    """
    if len(batches) == 1:
        return batches[0], None
    bound = 1 + max((int(batch.rows[-1]) for batch in batches if len(batch.rows)), default=-1)
    rows, inverse = unique_ids(torch.cat([batch.rows for batch in batches]), bound, backend=backend)
    unions = [batch.union for batch in batches if batch.union is not None]
    return Touched(rows, _merged_union(unions, backend) if unions else None), inverse


def _merged_union(unions: Sequence[RowUnion], backend: Backend) -> RowUnion:
    bound = 1 + max((int(union.ids[-1]) for union in unions if len(union.ids)), default=-1)
    ids, inverse = unique_ids(torch.cat([union.ids for union in unions]), bound, backend=backend)
    places = inverse.split([len(union.ids) for union in unions])
    positions = []
    for group in range(len(unions[0].positions)):
        own = torch.cat([place[union.positions[group]] for place, union in zip(places, unions, strict=True)])
        positions.append(unique_ids(own, len(ids), backend=backend)[0])
    return RowUnion(ids, positions)
