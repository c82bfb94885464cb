"""What pairs of tokens have between them, block by block: the distance of their positions and the gap of their times.

For the PyTorch implementations, which take blocks of rows first..end over keys 0..end (`turbogr.ops.jagged`).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from turbogr.ops.jagged import LengthGroup


def toeplitz(table: Tensor, first: int, end: int) -> Tensor:
    """[end - first, end] with table[i - j] where i >= j (anything elsewhere): a strided view of the reversed table."""
    rows = end - first
    reversed_table = F.pad(table[:end].flip(0), (0, rows - 1))  # entry x holds table[end - 1 - x]
    return reversed_table.as_strided((rows, end), (1, 1)).flip(0)


def add_diagonals(block: Tensor, first: int, end: int, out: Tensor) -> None:
    """Adds sum over {(i, j): i - j = d} of block [end - first, end] to out[d]; the block is zero where j > i."""
    rows = end - first
    # Row i, reversed and padded to a width of end + rows, then read with one column less: distances become columns.
    skewed = F.pad(block.flip(1), (0, rows)).view(-1)[: rows * (end + rows - 1)].view(rows, end + rows - 1)
    # Before skewing, column c of row r is j = end - 1 - c; after it, c' = c + r, so that d = first + r - j = c' - (rows - 1).
    out[:end] += skewed.sum(0)[rows - 1 :].to(out.dtype)


@dataclass(frozen=True)
class TimeGaps:
    """Differences query time - key time, exact, because they stay integers; narrow ones where those suffice.

    Attributes:
        queries: int32 or int64 [T], counted from the earliest time.
        keys: likewise.
    """

    queries: Tensor
    keys: Tensor

    @classmethod
    def of(cls, queries: Tensor, keys: Tensor) -> TimeGaps:
        """From int64 times [T]."""
        if not keys.numel():
            return cls(queries, keys)
        base = torch.minimum(queries.min(), keys.min())
        span = torch.maximum(queries.max(), keys.max()) - base
        dtype = torch.int32 if int(span) < 2**31 - 1 else torch.int64
        return cls((queries - base).to(dtype), (keys - base).to(dtype))

    def block(self, group: LengthGroup, first: int, end: int) -> Tensor:
        """[G, end - first, end]."""
        return group.gather_times(self.queries)[:, first:end, None] - group.gather_times(self.keys)[:, None, :end]


def check_table(operator: str, name: str, table: Tensor, least: int = 1) -> None:
    """Raises ValueError, which names operator and table, if that is not of one dimension and at least `least` entries."""
    if table.dim() != 1 or not 0 < table.numel() < 2**31:
        raise ValueError(
            f"{operator}: {name} is a table of one dimension and of at most 2^31 - 1 entries; got {list(table.shape)}"
        )
    if table.numel() < least:
        raise ValueError(f"{operator}: {name} has {table.numel()} entries, the longest sequence {least} tokens")


def check_times(
    operator: str, needed_by: str, tokens: int, query_times: Tensor | None, key_times: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Both times as int64 [T].

    Raises:
        ValueError: names the operator, what needs the times and what was found.
    """
    checked = []
    for name, times in (("query_times", query_times), ("key_times", key_times)):
        if times is None or times.shape != (tokens,) or times.dtype not in (torch.int64, torch.int32):
            found = "nothing" if times is None else f"{times.dtype} {list(times.shape)}"
            raise ValueError(f"{operator}: {needed_by} needs {name} as int64 or int32 [{tokens}]; got {found}")
        checked.append(times.long())
    return checked[0], checked[1]
