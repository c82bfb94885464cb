"""`unique_ids`: the distinct ids of a batch and where each id found its own, the step before every look-up."""

from __future__ import annotations

import torch
from torch import Tensor

from turbogr.ops.registry import register

OPERATOR = "turbogr::unique_ids"

DENSE_FACTOR = 4
"""Marking a table of `num_rows` flags beats sorting while the table has at most this many rows per id."""


def unique_ids(ids: Tensor, num_rows: int) -> tuple[Tensor, Tensor]:
    """The distinct ids, ascending, and the position of each id among them.

    Args:
        ids: int64, any shape, values in [0, num_rows).
        num_rows: size of the table that the ids index.

    Returns:
        `unique`, int64 [U], ascending; `inverse`, int64 in the shape of `ids`, with `unique[inverse] == ids`.

    Raises:
        IndexError: if an id lies outside [0, num_rows); the message names it.
    """
    if ids.numel():
        low, high = (int(x) for x in torch.aminmax(ids))
        if low < 0 or high >= num_rows:
            raise IndexError(f"{OPERATOR}: id {low if low < 0 else high} is outside the table's rows 0..{num_rows - 1}")
    if num_rows <= DENSE_FACTOR * ids.numel():
        return _by_marking(ids, num_rows)
    unique, inverse = torch.unique(ids, return_inverse=True)
    return unique, inverse


def unique_ids_reference(ids: Tensor, num_rows: int) -> tuple[Tensor, Tensor]:
    """The same through Python's own sort: the oracle."""
    flat = ids.flatten().tolist()
    rows = sorted(set(flat))
    place = {row: index for index, row in enumerate(rows)}
    inverse = torch.tensor([place[row] for row in flat], dtype=torch.int64).view(ids.shape)
    return torch.tensor(rows, dtype=torch.int64), inverse


def _by_marking(ids: Tensor, num_rows: int) -> tuple[Tensor, Tensor]:
    present = torch.zeros(num_rows, dtype=torch.bool, device=ids.device)
    present[ids.flatten()] = True
    place = present.cumsum(0) - 1
    return present.nonzero().view(-1), place.index_select(0, ids.flatten()).view(ids.shape)


register(OPERATOR, "torch", "a table of flags for small catalogues, a sort for large ones")
